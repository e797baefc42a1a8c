"""Where an endpoint publishes its KV events, as the configuration and the endpoint itself say.

Owns the rule of ports of llm-d (`podDiscoveryConfig`).  Asking an engine for its publishers, and reading them from a
backends file, is done by `hosts.fleet`: what it found stands in `Endpoint.kv_sources` and comes before the rule.
"""

import re
from collections.abc import Callable

import msgspec

from shoal.pool import Endpoint
from shoal.pool.kvevents import KvSource
from shoal.scheduling.exact_producers import KvEventsConfig

# llm-d calls the endpoints of one pod so, one for each data-parallel rank.
_RANK = re.compile(r"-rank-([0-9]{1,3})$")
_MAX_PORT = 65_535


def sources_of(config: KvEventsConfig) -> Callable[[Endpoint], tuple[KvSource, ...]]:
    """Return what tells the sources of an endpoint."""
    ports = config.pod_discovery_config

    def sources(endpoint: Endpoint) -> tuple[KvSource, ...]:
        found = endpoint.kv_sources
        if not found and ports.socket_port:
            found = by_ports(endpoint, ports.socket_port, ports.replay_socket_port)
        if config.topic_filter:
            found = tuple(msgspec.structs.replace(source, topic=config.topic_filter) for source in found)
        return found

    return sources


def by_ports(endpoint: Endpoint, port: int, replay_port: int) -> tuple[KvSource, ...]:
    """The one source of an endpoint whose rank publishes on `port` plus its rank.  replay_port: 0 for no replay."""
    host = endpoint.address.rpartition(":")[0]
    named = _RANK.search(endpoint.id)
    rank = int(named[1]) if named else 0
    if max(port, replay_port) + rank > _MAX_PORT:
        return ()
    replay = f"tcp://{host}:{replay_port + rank}" if replay_port else ""
    return (KvSource(endpoint=f"tcp://{host}:{port + rank}", replay_endpoint=replay, rank=rank),)
