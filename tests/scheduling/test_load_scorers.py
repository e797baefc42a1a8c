from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.scheduling.load_scorers import (
    ActiveRequestScorer,
    KvCacheUtilizationScorer,
    LoadAwareScorer,
    QueueScorer,
    RunningRequestsSizeScorer,
    TokenLoadScorer,
)
from shoal.scheduling.producers import InflightLoadProducer
from tests.scheduling.script import NAN, decide, request, scheduler, view

BY_COLUMN: list[tuple[Any, str]] = [
    (QueueScorer(), "waiting"),
    (RunningRequestsSizeScorer(), "running"),
    (KvCacheUtilizationScorer(), "kv_usage"),
    (LoadAwareScorer(), "waiting"),
    (ActiveRequestScorer(), "inflight_requests"),
    (TokenLoadScorer(), "inflight_uncached_tokens"),
]


def scores(scorer: Any, tokens: int = 0, **columns: list[float]) -> list[float]:
    return [round(float(value), 6) for value in scorer.score(request(tokens), view(**columns))]


def test_queue_and_running_are_scaled_between_the_longest_and_the_shortest() -> None:
    assert scores(QueueScorer(), waiting=[0, 5, 10]) == [1.0, 0.5, 0.0]
    assert scores(RunningRequestsSizeScorer(), running=[2, 4, 3]) == [1.0, 0.0, 0.5]


def test_equal_queues_score_1() -> None:
    assert scores(QueueScorer(), waiting=[7, 7]) == [1.0, 1.0]


def test_kv_use_scores_what_is_free() -> None:
    assert scores(KvCacheUtilizationScorer(), kv_usage=[0.25, 1.0]) == [0.75, 0.0]


def test_load_aware_is_half_for_an_idle_endpoint_and_0_at_the_threshold() -> None:
    assert scores(LoadAwareScorer(), waiting=[0, 64, 128, 500]) == [0.5, 0.25, 0.0, 0.0]
    assert scores(LoadAwareScorer(threshold=10), waiting=[5]) == [0.25]


def test_active_requests_up_to_the_idle_threshold_score_1() -> None:
    assert scores(ActiveRequestScorer(), inflight_requests=[0, 2, 8]) == [1.0, 0.75, 0.0]
    lenient = ActiveRequestScorer(idle_threshold=2, max_busy_score=0.5)
    assert scores(lenient, inflight_requests=[0, 2, 4, 8]) == [1.0, 1.0, 0.25, 0.0]


def test_token_load_counts_what_is_in_flight_and_what_this_request_adds() -> None:
    scorer = TokenLoadScorer(queue_threshold_tokens=1000)
    columns = {"inflight_uncached_tokens": [0.0, 400.0, 2000.0], "matched_tokens": [0.0, 100.0, 100.0]}
    assert scores(scorer, 100, **columns) == [0.9, 0.6, 0.0]


def test_token_load_counts_expected_output_when_the_producer_says_so() -> None:
    scorer = TokenLoadScorer(queue_threshold_tokens=1000, in_flight_load_producer_name="load")
    columns = {"inflight_uncached_tokens": [100.0], "matched_tokens": [0.0], "inflight_output_tokens": [300.0]}
    assert scores(scorer, 0, **columns) == [0.9]
    scorer.connect({"load": InflightLoadProducer(add_estimated_output_tokens=True)})
    assert scores(scorer, 0, **columns) == [0.6]


@pytest.mark.parametrize(("scorer", "column"), BY_COLUMN)
def test_an_unknown_load_scores_like_the_busiest_known_and_never_like_idle(scorer: Any, column: str) -> None:
    values = scorer.score(request(), view(**{column: [0.1, NAN, 0.9]}, matched_tokens=[0, 0, 0]))
    assert values[1] == values[2] < values[0]


@pytest.mark.parametrize(("scorer", "column"), BY_COLUMN)
def test_where_no_load_is_known_chance_decides(scorer: Any, column: str) -> None:
    made = scheduler(scorer)
    for seen in (view(**{column: [NAN, NAN]}), view(2)):
        targets = {decide(made, request(), seen).chosen[0] for _ in range(40)}
        assert targets == {"e0", "e1"}


@pytest.mark.parametrize(("scorer", "column"), BY_COLUMN)
@given(values=st.lists(st.one_of(st.just(NAN), st.floats(0, 1e7)), min_size=1, max_size=8))
def test_scores_are_between_0_and_1_or_unknown(scorer: Any, column: str, values: list[float]) -> None:
    if column == "kv_usage":
        values = [value / 1e7 for value in values]
    scored = scorer.score(request(), view(**{column: values}, matched_tokens=[0.0] * len(values)))
    assert len(scored) == len(values)
    assert np.all(np.isnan(scored) | ((scored >= 0) & (scored <= 1)))


def test_a_busy_score_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="maxBusyScore"):
        ActiveRequestScorer(max_busy_score=1.5)
