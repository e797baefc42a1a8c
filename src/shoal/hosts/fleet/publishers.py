"""Where an operator says that an engine publishes KV events: ports or whole addresses, one per data-parallel rank.

Owns the check of what is written, and the sources it makes for one address of the engine.  What engines say of
themselves is read by `readiness`.
"""

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from shoal.kernel import ConfigError
from shoal.pool.kvevents import KvSource

EVENTS_LABEL = "shoal.dev/kv-events-port"
REPLAY_LABEL = "shoal.dev/kv-replay-port"

MAX_RANKS = 256
_MAX_CHARS = 256


def kv_addresses(events: object, replay: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what the fields `kv_events` and `kv_replay` name, ports as digits and addresses as they are.

    Raises ConfigError, also when the replays cannot belong to the publishers.
    """
    found = _addresses(events, "kv_events"), _addresses(replay, "kv_replay")
    if found[1] and len(found[1]) != len(found[0]):
        raise ConfigError(f"kv_replay must name as many as kv_events: {len(found[0])}, not {len(found[1])}")
    return found


def _addresses(written: object, field: str) -> tuple[str, ...]:
    if written is None:
        return ()
    each = written if isinstance(written, list) else [written]
    if not all(isinstance(one, int | str) and not isinstance(one, bool) for one in each):
        raise ConfigError(f"{field} must be a port, an address such as tcp://10.0.0.1:5557, or a list of these")
    if len(each) > MAX_RANKS:
        raise ConfigError(f"{field} has {len(each)} entries, more than {MAX_RANKS}")
    return tuple(_checked(str(one), field) for one in each)


def sources(events: Sequence[str], replay: Sequence[str], labels: Mapping[str, str], ip: str) -> tuple[KvSource, ...]:
    """Return the publishers of an engine at `ip`, by rank; labels count where nothing else is written."""
    if not events:
        events = _labelled(labels, EVENTS_LABEL)
        replay = _labelled(labels, REPLAY_LABEL)
    replay = replay or [""] * len(events)
    return tuple(
        KvSource(endpoint=_dialled(events[rank], ip), replay_endpoint=_dialled(replay[rank], ip), rank=rank)
        for rank in range(len(events))
    )


def _labelled(labels: Mapping[str, str], name: str) -> list[str]:
    port = labels.get(name, "")
    # A label that is no port is none of ours: labels are for many readers.
    return [port] if port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65_536 else []


def _dialled(written: str, ip: str) -> str:
    if not written.isdecimal():
        return written
    return f"tcp://[{ip}]:{written}" if ":" in ip else f"tcp://{ip}:{written}"


def _checked(written: str, field: str) -> str:
    if written.isdecimal():
        if len(written) > 5 or not 0 < int(written) < 65_536:
            raise ConfigError(f"{field}: the port must be a number of 1 to 65535, not {written[:20]}")
        return written
    if len(written) > _MAX_CHARS or not (written.isascii() and written.isprintable()):
        raise ConfigError(f"{field} must be a port, or an address as tcp://10.0.0.7:5557")
    if written.startswith("ipc://") and len(written) > len("ipc://"):
        return written
    try:
        parts = urlsplit(written)
        is_whole = parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        is_whole = False
    if not is_whole or "*" in written or parts.hostname in ("0.0.0.0", "::"):
        raise ConfigError(f"{field}: {written!r} cannot be dialled; write a port, or an address as tcp://10.0.0.7:5557")
    return written
