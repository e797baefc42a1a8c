"""What sharing is for, in virtual time: several pickers place as well as one."""

import functools
import math
from typing import NamedTuple

import numpy as np

from shoal.engine import PROFILES, EngineConfig
from shoal.simulation import Cluster, ClusterConfig, NodeConfig
from shoal.simulation.results import summarise
from shoal.simulation.workloads import MultiTurn

SEEDS = (1, 2, 3)
GOSSIP_S = 0.01
SILENCE_S = math.inf
ENGINES, CLIENTS = 4, 32
CHATS = MultiTurn(
    sessions=160,
    turns=(6, 6),
    systems=16,
    system_tokens=1_024,
    say_tokens=(150, 350),
    reply_tokens=(16, 48),
    think_s=0.0,
)


class Run(NamedTuple):
    """hit_ratio: share of prompt tokens found in caches.  left: requests that a router has in its books at the end."""

    hit_ratio: float
    imbalance: float
    left: int


@functools.cache
def runs(routers: int, gossip_s: float) -> list[Run]:
    """A run for each seed.  gossip_s: until pickers hear of each other; infinite for never."""
    return [run(routers, gossip_s, seed) for seed in SEEDS]


def run(routers: int, gossip_s: float, seed: int) -> Run:
    engine = EngineConfig(profile=PROFILES["tiny"])
    nodes = tuple(NodeConfig(id=f"e{number}", engine=engine) for number in range(ENGINES))
    delay_s = 1e9 if math.isinf(gossip_s) else gossip_s
    cluster = Cluster(
        ClusterConfig(nodes=nodes, routers=routers, gossip_s=delay_s, seed=seed, concurrency=CLIENTS, scrape_s=0.5)
    )
    cluster.run(CHATS.make(np.random.default_rng(seed)))
    result = summarise(cluster.samples, [node.id for node in nodes], cluster.loop.now)
    assert result.failed == 0
    left = [router.status() for router in cluster.routers]
    return Run(result.hit_ratio, result.imbalance, sum(each.inflight for each in left))


def mean(found: list[Run], name: str) -> float:
    return float(np.mean([getattr(each, name) for each in found]))


def test_two_pickers_lose_less_than_two_points_of_hit_ratio() -> None:
    assert mean(runs(2, GOSSIP_S), "hit_ratio") > mean(runs(1, SILENCE_S), "hit_ratio") - 0.02


def test_two_pickers_that_say_nothing_to_each_other_lose_much_more() -> None:
    assert mean(runs(2, SILENCE_S), "hit_ratio") < mean(runs(1, SILENCE_S), "hit_ratio") - 0.08


def test_two_pickers_spread_as_evenly_as_one() -> None:
    assert mean(runs(2, GOSSIP_S), "imbalance") < 1.1 * mean(runs(1, SILENCE_S), "imbalance")


def test_nothing_is_left_in_flight_anywhere() -> None:
    assert all(each.left == 0 for each in (*runs(2, GOSSIP_S), *runs(4, GOSSIP_S)))


def test_four_pickers_that_hear_of_each_other_at_once_place_as_one_does() -> None:
    assert mean(runs(4, 0.0), "hit_ratio") > mean(runs(1, SILENCE_S), "hit_ratio") - 0.05
