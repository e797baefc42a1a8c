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


def test_an_endpoint_that_decodes_slower_charges_more_for_each_request_in_flight() -> None:
    quick, slow = Pace(), Pace()
    quick.learn_tpot(0.01)
    slow.learn_tpot(0.03)
    assert request_s(slow, 1e-4, 0.02) > 2 * request_s(quick, 1e-4, 0.02)
