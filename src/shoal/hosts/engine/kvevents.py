"""The configuration of KV events, with vLLM's keys."""

import msgspec

from shoal.hosts.engine.kvforms import KvForm
from shoal.kernel import UNREADABLE, ConfigError

_SOURCE = "--kv-events-config"


class KvEvents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What vLLM's --kv-events-config takes; SGLang's has the same keys without the first."""

    enable_kv_cache_events: bool = False
    """Whether events are sent."""
    publisher: str | None = None
    """`zmq`, or `null` for none; None is `zmq` when events are enabled.  SGLang has only this switch."""
    endpoint: str = "tcp://*:5557"
    """PUB address.  One with a wildcard or port 0, `ipc://` and `inproc://` are bound, any other is connected to."""
    replay_endpoint: str | None = None
    """ROUTER address for replays, always bound; None for no replay."""
    buffer_steps: int = 10_000
    """Batches that a replay can give."""
    hwm: int = 100_000
    """Messages that may wait for one slow subscriber; further ones are dropped for it."""
    max_queue_size: int = 100_000
    """Taken for compatibility: batches go to the socket at once, so no queue stands before it."""
    topic: str = ""
    """First frame of each message."""

    def of_rank(self, rank: int) -> "KvEvents":
        """Return what a data-parallel rank has: ports one after the other, as in vLLM.  Raises ConfigError."""
        if not rank:
            return self
        replay = self.replay_endpoint
        return msgspec.structs.replace(
            self,
            endpoint=_shifted(self.endpoint, rank),
            replay_endpoint=_shifted(replay, rank) if replay else replay,
        )

    @property
    def has_free_port(self) -> bool:
        """Whether a port is taken that happens to be free."""
        return any(each.endswith(":0") for each in (self.endpoint, self.replay_endpoint or ""))

    def is_on(self, form: KvForm) -> bool:
        """Whether an engine of that kind publishes."""
        is_asked = self.enable_kv_cache_events or (form.is_sglang and self.publisher == "zmq")
        return is_asked and self.publisher != "null"

    def check(self) -> None:
        """Raise ConfigError for values that no publisher can have."""
        if self.publisher not in (None, "null", "zmq"):
            raise ConfigError(f"unknown publisher {self.publisher!r}; known: zmq, null", source=_SOURCE)
        if self.buffer_steps < 1 or self.hwm < 0:
            raise ConfigError("buffer_steps must be at least 1 and hwm not negative", source=_SOURCE)


def _shifted(endpoint: str, rank: int) -> str:
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        raise ConfigError(f"{endpoint} cannot be had by several ranks: give tcp:// with a port", source=_SOURCE)
    return f"{host}:{int(port) + rank}" if int(port) else endpoint


def read_kv_events(text: str) -> KvEvents:
    """Return the configuration that a JSON object names.  Raises ConfigError."""
    try:
        config = msgspec.json.decode(text, type=KvEvents)
    except UNREADABLE as error:
        raise ConfigError(f"{error}", source=_SOURCE) from None
    config.check()
    return config
