"""What sharing is for, in virtual time: several pickers place as well as one."""

import functools

import numpy as np

from bench.pickers import Pickers, Result, talks

SEEDS = (1, 2, 3)
GOSSIP_S = 0.01


@functools.cache
def runs(routers: int, delay_s: float | None) -> list[Result]:
    return [Pickers(routers, 4, delay_s, seed).run(talks(seed), concurrency=32) for seed in SEEDS]


def mean(results: list[Result], name: str) -> float:
    return float(np.mean([getattr(each, name) for each in results]))


def test_two_pickers_lose_less_than_two_points_of_hit_ratio() -> None:
    assert mean(runs(2, GOSSIP_S), "hit_ratio") > mean(runs(1, None), "hit_ratio") - 0.02


def test_two_pickers_that_say_nothing_to_each_other_lose_more_than_ten() -> None:
    assert mean(runs(2, None), "hit_ratio") < mean(runs(1, None), "hit_ratio") - 0.10


def test_two_pickers_spread_as_evenly_as_one() -> None:
    assert mean(runs(2, GOSSIP_S), "imbalance") < 1.1 * mean(runs(1, None), "imbalance")


def test_nothing_is_left_in_flight_anywhere() -> None:
    assert all(each.is_idle for each in (*runs(2, GOSSIP_S), *runs(4, GOSSIP_S)))


def test_four_pickers_that_hear_of_each_other_at_once_place_as_one_does() -> None:
    assert mean(runs(4, 0.0), "hit_ratio") > mean(runs(1, None), "hit_ratio") - 0.05
