"""AIBrix's Preble against numbers worked by hand."""

from typing import Any

import numpy as np
import pytest

from shoal.scheduling.baselines_windows import AibrixPrebleScorer, prefill_s
from tests.scheduling.script import chain, request, sent, view

ABCD = chain("a", "b", "c", "d")
QRST = chain("q", "r", "s", "t")
DECODE_S = 45 * 0.15


def target(scorer: Any, prompt: Any, tokens: int = 256) -> int:
    scores = scorer.score(request(tokens), view(chain=prompt, inflight_requests=[0, 0, 0]))
    assert list(scores).count(1.0) == 1
    return int(np.argmax(scores))


@pytest.mark.parametrize(
    ("new", "context", "ms"),
    [
        (100, 100, 55.0 + 0.80),
        (256, 256, -295 + 3.125 * 256 - 6.4e-3 * 65536 + 0.80),
        (1000, 1000, 0.27106428 * 1000 + 10.52444263 + 0.80),
        (1000, 2000, 0.27106428 * 1000 + 10.52444263 + (4.65e-4 * 2000 + 0.398) / 2),
        (5000, 5000, 0.27106428 * 5000 + 10.52444263 + 4.65e-4 * 5000 + 0.398 - 18.425 + 9.65e-3 * 5000 + 135.0),
    ],
)
def test_prefill_takes_what_the_model_of_a_v100_says(new: int, context: int, ms: float) -> None:
    assert prefill_s(new, context, "V100") == pytest.approx(ms / 900)


def test_an_a6000_is_faster() -> None:
    assert prefill_s(100, 100, "A6000") == pytest.approx((22.0 + 0.32) / 900)
    assert all(prefill_s(n, n, "A6000") < prefill_s(n, n, "V100") for n in (50, 250, 1000, 5000))


def test_a_prompt_of_which_more_than_half_is_known_goes_to_its_holder_with_fewest_requests() -> None:
    scorer = AibrixPrebleScorer()
    sent(scorer, view(3, chain=ABCD), "e1", tokens=256)
    assert target(scorer, chain("a", "b", "c", "x")) == 1
    assert target(scorer, chain("a", "b", "x", "y")) == 0
    sent(scorer, view(3, chain=ABCD), "e2", tokens=256)
    # Both were sent ABCD, which counts twice for each; e1 had QRST as well.
    sent(scorer, view(3, chain=QRST), "e1", tokens=256)
    assert target(scorer, ABCD) == 2


def test_other_prompts_go_where_the_window_cost_least() -> None:
    scorer = AibrixPrebleScorer()
    sent(scorer, view(3, chain=ABCD), "e0", tokens=256)
    assert scorer.cost("e0") == pytest.approx(prefill_s(256, 256, "V100") + DECODE_S)
    sent(scorer, view(3, chain=ABCD), "e1", tokens=256)
    # The same prompt twice, half of it on each.
    assert scorer.cost("e0") == scorer.cost("e1") == pytest.approx(prefill_s(256, 256, "V100") + DECODE_S)
    assert target(scorer, QRST) == 2


def test_what_was_known_of_a_prompt_makes_it_cheaper() -> None:
    scorer = AibrixPrebleScorer()
    sent(scorer, view(3, chain=ABCD[:2]), "e0", tokens=128)
    first = prefill_s(128, 128, "V100") + DECODE_S
    sent(scorer, view(3, chain=ABCD), "e1", tokens=256)
    # e1 was sent the beginning too, so its price is shared; half of ABCD was new.
    half = prefill_s(128, 128, "V100") / 2 + DECODE_S
    assert scorer.cost("e0") == pytest.approx(half)
    assert scorer.cost("e1") == pytest.approx(half + 0.5 * prefill_s(128, 256, "V100") + DECODE_S)
    assert first > half


def test_what_is_older_than_the_window_costs_nothing() -> None:
    scorer = AibrixPrebleScorer(sliding_window_minutes=1)
    sent(scorer, view(3, chain=ABCD), "e0", now=0.0, tokens=256)
    sent(scorer, view(3, chain=ABCD), "e0", now=30.0, tokens=256)
    sent(scorer, view(3, chain=QRST), "e1", now=59.0, tokens=256)
    assert scorer.cost("e0") == pytest.approx(2 * prefill_s(256, 256, "V100") + DECODE_S)
    sent(scorer, view(3, chain=QRST), "e1", now=60.0, tokens=256)
    assert scorer.cost("e0") == pytest.approx(prefill_s(256, 256, "V100") + DECODE_S)
    sent(scorer, view(3, chain=QRST), "e1", now=90.0, tokens=256)
    assert scorer.cost("e0") == 0.0


def test_an_endpoint_that_left_is_forgotten_and_a_reload_forgets_nothing() -> None:
    scorer, other = AibrixPrebleScorer(), AibrixPrebleScorer()
    sent(scorer, view(3, chain=ABCD), "e0", tokens=256)
    sent(scorer, view(3, chain=ABCD), "e1", tokens=256)
    other.adopt(scorer)
    other.endpoint_left("e0")
    assert other.cost("e0") == 0.0
    assert other.cost("e1") == pytest.approx(2 * prefill_s(256, 256, "V100") + DECODE_S)
    assert target(other, ABCD) == 1


def test_a_prompt_of_unknown_content_counts_nowhere() -> None:
    scorer = AibrixPrebleScorer()
    sent(scorer, view(3), "e1", tokens=256)
    assert scorer.cost("e1") == 0.0
    assert target(scorer, ()) == 0


def test_bad_parameters_are_refused_with_their_name() -> None:
    for name, parameters in (
        ("decodingLength", {"decoding_length": -1}),
        ("slidingWindowMinutes", {"sliding_window_minutes": 0.0}),
        ("maxTreeTokens", {"max_tree_tokens": 0}),
    ):
        with pytest.raises(ValueError, match=name):
            AibrixPrebleScorer(**parameters)  # type: ignore[arg-type]
