import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.routing.pace import DEFAULT_S_PER_TOKEN, Pace, pool_s_per_token, request_s


def test_a_steady_engine_is_learned_within_a_few_dozen_records() -> None:
    pace, chance = Pace(), np.random.default_rng(1)
    for _ in range(80):
        work = float(chance.uniform(200, 8000))
        pace.learn(work, 0.02 + work * 4e-5, DEFAULT_S_PER_TOKEN)
    assert pace.s_per_token == pytest.approx(4e-5, rel=0.35)


def test_a_slower_engine_is_seen_as_slower_though_both_start_from_the_same_prior() -> None:
    fast, slow, chance = Pace(), Pace(), np.random.default_rng(2)
    for _ in range(60):
        work = float(chance.uniform(200, 4000))
        fast.learn(work, work * 1e-4, 1e-4)
        slow.learn(work, work * 3e-4, 1e-4)
    assert slow.s_per_token > 1.8 * fast.s_per_token


def test_one_stalled_request_does_not_make_an_engine_slow() -> None:
    pace = Pace()
    for step in range(50):
        pace.learn(1000.0 + step, 0.1, 1e-4)
    before = pace.s_per_token
    pace.learn(1000.0, 60.0, 1e-4)
    assert pace.s_per_token < 1.5 * before


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e4)), max_size=60))
def test_no_history_gives_a_speed_that_is_not_positive_and_finite(history: list[tuple[float, float]]) -> None:
    pace = Pace()
    for work, ttft in history:
        pace.learn(work, ttft, DEFAULT_S_PER_TOKEN)
    assert 0 < pace.s_per_token < float("inf")
    assert 0 <= pace.base_s < float("inf")


def test_a_pool_without_records_uses_the_default() -> None:
    assert pool_s_per_token([Pace(), Pace()]) == DEFAULT_S_PER_TOKEN


def test_a_slower_machine_charges_more_for_each_request_in_flight_and_an_equal_one_the_same() -> None:
    quick, slow, equal = Pace(), Pace(), Pace()
    for _ in range(40):
        quick.learn(4000.0, 0.4, 1e-4)
        slow.learn(4000.0, 1.6, 1e-4)
        equal.learn(4000.0, 0.5, 1e-4)
    assert request_s(slow, 1e-4) > 2 * request_s(quick, 1e-4)
    assert request_s(equal, 1e-4) == request_s(quick, 1e-4)


@pytest.mark.parametrize("relative", [0.6, 0.75, 1.33, 1.36, 1.75])
def test_machines_that_differ_by_less_than_a_step_are_equal(relative: float) -> None:
    pace = Pace()
    for _ in range(200):
        pace.learn(4000.0, 0.4 * relative, 1e-4)
    assert request_s(pace, 1e-4) == request_s(Pace(), 1e-4)


def test_what_decoding_took_says_nothing_of_the_machine_since_it_grows_with_the_load() -> None:
    busy, idle = Pace(), Pace()
    for pace, tpot_s in ((busy, 0.09), (idle, 0.01)):
        for _ in range(40):
            pace.learn(4000.0, 0.4, 1e-4)
            pace.learn_tpot(tpot_s)
    assert request_s(busy, 1e-4) == request_s(idle, 1e-4)
