"""Which publishers an endpoint has by llm-d's rule of ports."""

import pytest

from shoal.hosts.signals import sources_of
from shoal.pool import Endpoint
from shoal.pool.kvevents import KvSource
from shoal.scheduling.exact_producers import KvEventsConfig, PodDiscovery

RULE = KvEventsConfig(pod_discovery_config=PodDiscovery(socket_port=5557, replay_socket_port=6557))


@pytest.mark.parametrize(
    ("endpoint_id", "address", "publishes", "replays", "rank"),
    [
        ("a", "10.0.0.7:8000", "tcp://10.0.0.7:5557", "tcp://10.0.0.7:6557", 0),
        ("pod-3-rank-2", "10.0.0.7:8002", "tcp://10.0.0.7:5559", "tcp://10.0.0.7:6559", 2),
        ("a", "[fd00::7]:8000", "tcp://[fd00::7]:5557", "tcp://[fd00::7]:6557", 0),
    ],
)
def test_each_rank_publishes_one_port_higher(
    endpoint_id: str, address: str, publishes: str, replays: str, rank: int
) -> None:
    found = sources_of(RULE)(Endpoint(id=endpoint_id, address=address))
    assert found == (KvSource(endpoint=publishes, replay_endpoint=replays, rank=rank),)


def test_what_an_endpoint_says_comes_before_the_rule() -> None:
    said = (KvSource(endpoint="tcp://10.0.0.7:1", topic="kv@m"),)
    endpoint = Endpoint(id="a", address="10.0.0.7:8000", kv_sources=said)
    assert sources_of(RULE)(endpoint) == said
    assert sources_of(KvEventsConfig())(endpoint) == said
    (filtered,) = sources_of(KvEventsConfig(topic_filter="kv@other"))(endpoint)
    assert filtered.topic == "kv@other"


def test_without_a_rule_or_with_a_port_beyond_the_last_there_is_none() -> None:
    last = KvEventsConfig(pod_discovery_config=PodDiscovery(socket_port=65_535))
    assert sources_of(last)(Endpoint(id="x-rank-1", address="10.0.0.7:8000")) == ()
    assert sources_of(KvEventsConfig())(Endpoint(id="a", address="10.0.0.7:8000")) == ()
