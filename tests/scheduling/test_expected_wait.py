from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pool import Endpoint, FleetView
from shoal.scheduling.expected_wait import ExpectedWaitScorer
from tests.scheduling.script import NAN, Pool, chain, decide, request, scheduler, sent, view

FAST = 1e-4


def spread_of(seen: FleetView, tokens: int, times: int = 400) -> list[int]:
    made = scheduler(ExpectedWaitScorer())
    counts = [0] * len(seen)
    for _ in range(times):
        counts[int(decide(made, request(tokens), seen).chosen[0][1:])] += 1
    return counts


def test_a_prompt_goes_where_its_prefix_is_held() -> None:
    seen = view(matched_tokens=[0, 4000, 1000], inflight_requests=[1, 1, 1])
    assert decide(scheduler(ExpectedWaitScorer()), request(4000), seen).chosen == ("e1", "e2", "e0")


def test_a_miss_goes_by_load_and_not_by_what_the_index_holds() -> None:
    seen = view(
        matched_tokens=[0, 0], inflight_requests=[20, 0], inflight_uncached_tokens=[60_000, 0], request_s=[0.01, 0.01]
    )
    assert spread_of(seen, 3000)[1] == 400


def test_requests_without_a_prompt_go_by_load() -> None:
    seen = view(matched_tokens=[0, 0, 0], inflight_requests=[9, 2, 5])
    assert spread_of(seen, 0) == [0, 400, 0]


def test_equal_endpoints_are_chosen_at_random_and_not_in_list_order() -> None:
    counts = spread_of(view(matched_tokens=[0, 0, 0, 0], inflight_requests=[3, 3, 3, 3]), 2000)
    assert min(counts) > 60


@pytest.mark.parametrize("tokens", [1500, 6000, 60_000])
@pytest.mark.parametrize("request_s", [0.0005, 0.0075])
def test_a_hot_prefix_spreads_when_its_holder_is_busy(tokens: int, request_s: float) -> None:
    pool = Pool([FAST] * 4, request_s=request_s)
    pool.run(["hot"] * 600, tokens, concurrency=48)
    assert pool.imbalance < 1.3


def test_a_hot_prefix_is_not_copied_while_its_holder_is_idle() -> None:
    pool = Pool([FAST] * 4)
    pool.run(["hot"] * 50, 6000, concurrency=1)
    assert np.count_nonzero(pool.served) == 1


def after_uses(apart_s: float, count: int = 4, **parameters: float) -> int:
    """Where a prompt goes that one of `count` endpoints holds, and that was sent there 60 times before."""
    scorer = ExpectedWaitScorer(**parameters)
    columns: dict[str, list[float]] = {
        "matched_tokens": [128.0] + [0.0] * (count - 1),
        "inflight_requests": [7.0] + [2.0] * (count - 1),
        "prefill_s_per_token": [FAST] * count,
        "request_s": [0.0075] * count,
    }
    seen = view(chain=chain("a", "b", "c"), **columns)
    for at in range(60):
        sent(scorer, seen, "e0", at * apart_s, 192)
    return int(decide(scheduler(scorer), request(192), seen).chosen[0] != "e0")


@pytest.mark.parametrize("count", [4, 40])
def test_a_prefix_that_is_asked_for_again_and_again_is_copied_before_its_holder_is_crowded(count: int) -> None:
    crowd = {"imbalance_weight": 0.0}
    assert after_uses(0.5, count, **crowd)
    assert not after_uses(0.5, count, half_price_uses=0, **crowd)


def test_a_prompt_whose_samples_come_together_stays_with_its_holder() -> None:
    assert not after_uses(0.001, imbalance_weight=0.0)


def test_a_changed_configuration_keeps_what_was_seen_of_prefixes() -> None:
    old, new = ExpectedWaitScorer(), ExpectedWaitScorer(half_price_uses=5)
    seen = view(chain=chain("a"), matched_tokens=[64.0, 0.0])
    for at in range(9):
        sent(old, seen, "e0", float(at), 64)
    new.adopt(old)
    assert new._heat.of(seen.beginning(64)) > 5


def test_affinity_gives_way_gradually_as_the_holder_gets_busier() -> None:
    scores = []
    for busy in range(0, 40, 4):
        seen = view(matched_tokens=[4000, 0, 0, 0], inflight_requests=[busy, 2, 2, 2], prefill_s_per_token=[FAST] * 4)
        scores.append(ExpectedWaitScorer().score(request(4000), seen))
    holder = [float(score[0]) for score in scores]
    assert holder == sorted(holder, reverse=True)
    assert len({round(value, 6) for value in holder}) == len(holder)
    assert scores[0][0] > scores[0][1]
    assert scores[-1][0] < scores[-1][1]


def test_what_every_endpoint_holds_is_no_reason_to_concentrate() -> None:
    pool = Pool([FAST] * 4)
    for held in pool.cached:
        held.add("system")
    pool.run(["system"] * 400, 6000, concurrency=8)
    assert pool.imbalance < 1.2


def test_unique_prompts_spread_evenly_before_any_has_answered() -> None:
    pool = Pool([FAST] * 4)
    pool.run([f"unique {at}" for at in range(64)], 8000, concurrency=64)
    assert pool.served.max() <= 16 * 1.2
    assert pool.served.min() >= 16 * 0.8


def test_a_slow_accelerator_gets_less() -> None:
    pool = Pool([FAST, FAST, FAST, 4 * FAST])
    pool.run([f"unique {at}" for at in range(600)], 4000, concurrency=24)
    share = pool.served[3] / pool.served[:3].mean()
    assert 0.1 < share < 0.6


def test_speeds_that_differ_by_noise_do_not_decide_between_idle_endpoints() -> None:
    speeds = [1.02e-4, 0.98e-4, 1.05e-4, 1.00e-4]
    seen = view(matched_tokens=[0] * 4, inflight_requests=[0] * 4, prefill_s_per_token=speeds)
    assert min(spread_of(seen, 4000)) > 60


@pytest.mark.parametrize("count", [4, 40])
def test_among_many_requests_one_that_decodes_a_little_quicker_is_not_sent_more(count: int) -> None:
    prices = [0.009] + [0.010] * (count - 1)
    seen = view(inflight_requests=[206.0] + [200.0] * (count - 1), request_s=prices, matched_tokens=[0] * count)
    scores = ExpectedWaitScorer(level_share=0).score(request(0), seen)
    assert scores[0] < scores[1]
    slower = view(inflight_requests=[199.0] + [200.0] * (count - 1), request_s=[0.02, *prices[1:]])
    scores = ExpectedWaitScorer(level_share=0).score(request(0), slower)
    assert scores[0] < scores[1]


def test_among_few_requests_how_an_endpoint_decodes_counts_as_it_was_seen() -> None:
    seen = view(inflight_requests=[11, 10, 10], request_s=[0.009, 0.011, 0.011])
    scores = ExpectedWaitScorer(level_share=0).score(request(0), seen)
    assert scores[0] > scores[1]


def test_an_unknown_speed_counts_as_the_median_and_not_as_fast() -> None:
    seen = view(matched_tokens=[0] * 3, inflight_requests=[4, 4, 4], prefill_s_per_token=[FAST, NAN, 3 * FAST])
    scores = ExpectedWaitScorer().score(request(4000), seen)
    assert scores[0] == scores[1] > scores[2]


def test_an_endpoint_whose_load_is_unknown_looks_like_the_busiest() -> None:
    seen = view(matched_tokens=[0] * 3, inflight_requests=[1, NAN, 7], inflight_uncached_tokens=[100, NAN, 9000])
    scores = ExpectedWaitScorer().score(request(100), seen)
    assert scores[1] == scores[2] < scores[0]


def test_a_new_endpoint_gets_bounded_trial_traffic() -> None:
    pool = Pool([FAST] * 4)
    pool.trial[3] = 1.0
    pool.run([f"unique {at}" for at in range(400)], 4000, concurrency=32)
    assert 1 <= pool.most_inflight[3] <= 1 + 0.25 * pool.most_inflight[:3].max()
    assert 0 < pool.served[3] < pool.served[:3].mean()


def test_a_new_endpoint_gets_one_request_at_a_time_while_the_others_are_idle() -> None:
    made = scheduler(ExpectedWaitScorer())
    columns = {"matched_tokens": [0, 0], "is_trial": [0, 1]}
    assert decide(made, request(4000), view(inflight_requests=[1, 0], **columns)).chosen[0] == "e1"
    assert decide(made, request(4000), view(inflight_requests=[2, 1], **columns)).chosen[0] == "e0"


def test_endpoints_on_trial_count_when_it_is_asked_who_is_crowded() -> None:
    crowd = {"inflight_requests": [40, 40, 0, 0], "is_trial": [0, 0, 1, 1]}
    seen = view(matched_tokens=[4000, 4000, 0, 0], prefill_s_per_token=[FAST] * 4, **crowd)
    assert spread_of(seen, 4000)[:2] == [0, 0]


def test_a_fleet_that_is_all_new_is_not_held_back() -> None:
    seen = view(matched_tokens=[0] * 3, inflight_requests=[8, 9, 9], is_trial=[1, 1, 1])
    assert spread_of(seen, 4000) == [400, 0, 0]


def test_no_column_at_all_means_chance() -> None:
    assert min(spread_of(view(3), 4000)) > 80


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="imbalanceSlack"):
        ExpectedWaitScorer(imbalance_slack=0)
    with pytest.raises(ValueError, match="speedStep"):
        ExpectedWaitScorer(speed_step=0.5)


maybe = st.one_of(st.just(NAN), st.floats(0, 1e6))


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(maybe, min_size=n, max_size=n), min_size=6, max_size=6)))
def test_scores_are_between_0_and_1_whatever_is_known(columns: list[list[float]]) -> None:
    names = ("matched_tokens", "inflight_requests", "inflight_uncached_tokens", "prefill_s_per_token", "request_s")
    given_columns = dict(zip(names, columns, strict=False))
    seen = view(**given_columns, is_trial=[float(value > 5) for value in columns[5]])
    scores = ExpectedWaitScorer().score(request(3000), seen)
    assert np.all((scores >= 0) & (scores <= 1))


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8), st.integers(0, 7))
def test_more_work_on_an_endpoint_never_makes_it_more_attractive(inflight: list[int], which: int) -> None:
    at = which % len(inflight)
    busier = [count + (place == at) for place, count in enumerate(inflight)]
    matched = [100.0 * place for place in range(len(inflight))]
    before = ExpectedWaitScorer().score(request(1000), view(matched_tokens=matched, inflight_requests=inflight))
    after = ExpectedWaitScorer().score(request(1000), view(matched_tokens=matched, inflight_requests=busier))
    assert after[at] < before[at]


FIGURES = st.fixed_dictionaries(
    {
        "inflight_requests": st.integers(0, 90),
        "inflight_prefill_s": st.floats(0, 20),
        "prefill_s_per_token": st.floats(1e-6, 1e-2),
        "request_s": st.floats(1e-4, 1.0),
        "matched_tokens": st.sampled_from([0, 640, 4096, 9000]),
    }
)


@given(fleet=st.lists(FIGURES, min_size=1, max_size=16), tokens=st.integers(0, 10_000), holds_any=st.booleans())
def test_few_candidates_are_scored_as_many_are(fleet: list[dict[str, float]], tokens: int, holds_any: bool) -> None:
    scorer = ExpectedWaitScorer()
    endpoints = tuple(Endpoint(id=f"e{at}", address=f"10.0.0.{at}:8000") for at in range(len(fleet)))

    def seen() -> FleetView:
        columns: dict[str, Any] = {name: np.array([one[name] for one in fleet], np.float64) for name in fleet[0]}
        columns["is_trial"] = 0.0
        if not holds_any:
            columns["matched_tokens"] = 0.0
        return FleetView(endpoints, columns, [None] * len(fleet), None, frozenset(scorer.needs))

    few, many = scorer.score_few(request(tokens), seen()), scorer._score_many(request(tokens), seen())
    assert few is not None
    assert scorer.score(request(tokens), seen()).tolist() == few
    np.testing.assert_allclose(few, many, rtol=1e-9)
