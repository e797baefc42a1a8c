import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.routing.pace import DEFAULT_S_PER_TOKEN, Decoding, Pace, pool_s_per_token, request_s


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


def taught(answers: list[tuple[Pace, float, float]]) -> None:
    """Each answer: whose it was, the requests in flight there, and its time per output token."""
    decoding = Decoding()
    for pace, requests, tpot_s in answers:
        pace.learn_tpot(tpot_s, decoding.usual_s(requests))
        decoding.learn(requests, tpot_s)


def test_an_endpoint_that_decodes_slower_at_the_same_load_charges_more_for_each_request() -> None:
    quick, slow = Pace(), Pace()
    taught([(quick, 10.0, 0.01), (slow, 10.0, 0.03)] * 60)
    assert request_s(slow, 1e-4) > 2 * request_s(quick, 1e-4)


def test_an_endpoint_is_not_slower_for_having_more_to_do() -> None:
    busy, idle, chance = Pace(), Pace(), np.random.default_rng(1)
    answers = []
    for _ in range(100):
        for pace, most in ((busy, 200.0), (idle, 20.0)):
            requests = float(chance.uniform(0, most))
            answers.append((pace, requests, 0.008 + 0.0004 * requests))
    taught(answers)
    assert request_s(busy, 1e-4) == pytest.approx(request_s(idle, 1e-4), rel=0.05)


def test_until_answers_were_seen_all_requests_cost_the_same() -> None:
    quick, slow = Pace(), Pace()
    taught([(quick, 1.0, 0.01), (slow, 1.0, 0.03)] * 3)
    assert request_s(slow, 1e-4) == request_s(quick, 1e-4)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(1e-6, 1e3)), max_size=60), st.floats(0, 1e5))
def test_what_is_usual_is_never_negative_or_infinite(history: list[tuple[float, float]], requests: float) -> None:
    decoding = Decoding()
    for load, tpot_s in history:
        decoding.learn(load, tpot_s)
    assert 0.0 <= decoding.usual_s(requests) < float("inf")
