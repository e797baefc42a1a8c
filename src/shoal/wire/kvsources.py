"""Where an engine says that it publishes KV events: `/kv_event_sources` of vLLM and Shoal, `/server_info` of SGLang.

Owns what of an engine's word is believed.  An engine can name any address, and whoever dials it would do so from inside
the pool's network; so only ports are taken from it, on the endpoint's own host.
"""

import ipaddress
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from shoal.kernel import UNREADABLE, InvalidInput
from shoal.pool.kvevents import KvSource

MAX_RANKS = 256
_MAX_ADDRESS_CHARS = 256
_MAX_TOPIC_CHARS = 256
_MAX_PORT = 65_535


class _Publisher(msgspec.Struct, gc=False):
    endpoint: Any = None
    replay_endpoint: Any = None
    topic: Any = None
    publisher: Any = None


class _Descriptor(msgspec.Struct, gc=False):
    publisher: Any = None
    endpoint_host: Any = None
    endpoint_port_base: Any = None
    replay_endpoint_port_base: Any = None
    topic: Any = None
    dp_size: Any = None


class _ServerInfo(msgspec.Struct, gc=False):
    kv_events: _Descriptor | None = None


_publishers = msgspec.json.Decoder(dict[str, _Publisher | None])
_server_info = msgspec.json.Decoder(_ServerInfo)


def parse_event_sources(body: bytes, host: str) -> tuple[KvSource, ...]:
    """Return the publishers that `/kv_event_sources` names, by rank; those that cannot be dialled are left out.

    host: IP literal of the endpoint, without brackets.  Raises InvalidInput when it is no such answer.
    """
    try:
        named = _publishers.decode(body)
    except UNREADABLE as error:
        raise InvalidInput(f"/kv_event_sources did not answer an object of publishers: {error}") from None
    found = []
    for name, publisher in named.items():
        if publisher is None or publisher.publisher == "null" or not _is_rank(name):
            continue
        endpoint = _own_address(publisher.endpoint, host)
        if endpoint:
            replay = _own_address(publisher.replay_endpoint, host)
            found.append(
                KvSource(endpoint=endpoint, replay_endpoint=replay, topic=_topic(publisher.topic), rank=int(name))
            )
    return _by_rank(found)


def parse_server_info(body: bytes, host: str) -> tuple[KvSource, ...]:
    """Return the publishers that `kv_events` of SGLang's `/server_info` names: one port after the other, by rank.

    As `parse_event_sources` otherwise; without the field there are none.
    """
    try:
        said = _server_info.decode(body).kv_events
    except UNREADABLE as error:
        raise InvalidInput(f"/server_info did not answer an object: {error}") from None
    if said is None or said.publisher not in (None, "zmq"):
        return ()
    if not isinstance(said.endpoint_host, str | None) or not _is_reachable(said.endpoint_host or "*", host):
        return ()
    port, replay_port = _port(said.endpoint_port_base), _port(said.replay_endpoint_port_base)
    ranks = said.dp_size if type(said.dp_size) is int and 0 < said.dp_size <= MAX_RANKS else 1
    return tuple(
        KvSource(
            endpoint=_dialled(host, port + rank),
            replay_endpoint=_dialled(host, replay_port + rank) if replay_port else "",
            topic=_topic(said.topic),
            rank=rank,
        )
        for rank in range(ranks)
        if port and max(port, replay_port) + rank <= _MAX_PORT
    )


def _own_address(said: Any, host: str) -> str:
    """The address to dial for one that an engine names, "" for none."""
    if not isinstance(said, str) or len(said) > _MAX_ADDRESS_CHARS or not said.isascii():
        return ""
    if said.startswith("ipc://"):
        # A path is on the engine's machine, which is ours only where the endpoint is.
        return said if _is_loopback(host) and said.isprintable() else ""
    # A wildcard is no host name to a parser of URLs, so it goes by a name.
    try:
        parts = urlsplit(said.replace("*", "any"))
        named, port = parts.hostname or "", parts.port or 0
    except ValueError:
        return ""
    if parts.scheme != "tcp" or not port or not _is_reachable(named, host):
        return ""
    return _dialled(host, port)


def _is_reachable(named: str, host: str) -> bool:
    """Whether a publisher on `named` of the engine's machine can be reached from here at `host`."""
    return _is_loopback(host) or not (_is_loopback(named) or named == "localhost")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _dialled(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _is_rank(name: str) -> bool:
    return len(name) <= 3 and name.isdecimal() and int(name) < MAX_RANKS


def _port(said: Any) -> int:
    return said if type(said) is int and 0 < said <= _MAX_PORT else 0


def _topic(said: Any) -> str:
    return said if isinstance(said, str) and len(said) <= _MAX_TOPIC_CHARS and said.isprintable() else ""


def _by_rank(found: Iterable[KvSource]) -> tuple[KvSource, ...]:
    return tuple({source.rank: source for source in sorted(found, key=lambda source: source.rank)}.values())
