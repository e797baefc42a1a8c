"""Dynamo's and AIBrix's formulas against numbers worked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.scheduling.baselines_costs import AibrixPrefixCacheScorer, DynamoCostScorer, TokensInUse
from tests.scheduling.script import chain, request, sent, view

ABCD = chain("a", "b", "c", "d")
ABXY = chain("a", "b", "x", "y")


def test_tokens_in_use_are_counted_once_however_many_requests_share_them() -> None:
    used = TokensInUse()
    used.add("r1", "e0", ABCD, 300)
    used.add("r2", "e0", ABXY, 256)
    # 256 of r1, 44 more behind its last block, and the 128 of r2 that r1 does not have.
    assert used.at("e0") == 428
    assert used.shared(chain("a", "b", "q")) == {"e0": 128}
    used.remove("r1")
    assert used.at("e0") == 256
    assert used.shared(ABCD) == {"e0": 128}
    used.remove("r2")
    used.remove("r2")
    assert used.at("e0") == 0
    assert used.shared(ABCD) == {}


@given(st.lists(st.tuples(st.lists(st.sampled_from("abc"), max_size=4), st.sampled_from(["e0", "e1"]))), st.randoms())
def test_when_all_have_ended_nothing_is_in_use(requests: list[tuple[list[str], str]], order: "object") -> None:
    used = TokensInUse()
    for number, (letters, name) in enumerate(requests):
        used.add(str(number), name, chain(*letters), 64 * len(letters) + 10)
    names = [str(number) for number in range(len(requests))]
    order.shuffle(names)  # type: ignore[attr-defined]
    for name in names:
        used.remove(name)
    assert used.at("e0") == used.at("e1") == 0
    assert all(used.shared(chain(*letters)) == {} for letters, _ in requests)


def test_dynamos_cost_is_prefill_that_waits_and_is_asked_for_less_the_overlap_plus_blocks_in_use() -> None:
    scorer = DynamoCostScorer(block_tokens=64)
    sent(scorer, view(2, chain=ABCD), "e0", tokens=256, name="r1")
    seen = view(chain=ABXY, matched_tokens=[128, 0], inflight_uncached_tokens=[320, 64], inflight_requests=[1, 0])
    # e0: max(0, 320 + 256 - 128) / 64 = 7 to prefill; 4 in use and the 2 that r1 does not hold: 6.
    # e1: (64 + 256) / 64 = 5; nothing in use, and 4 new ones.
    assert list(scorer.costs(request(256), seen)) == [7 + 6, 5 + 4]
    assert list(scorer.score(request(256), seen)) == [0.0, 1.0]
    scorer.released("r1")
    assert list(scorer.costs(request(256), seen)) == [7 + 4, 5 + 4]


def test_dynamos_weights_are_those_of_its_flags() -> None:
    seen = view(chain=ABCD, matched_tokens=[256, 128], inflight_uncached_tokens=[512, 0], inflight_requests=[3, 1])
    scorer = DynamoCostScorer(
        block_tokens=64, overlap_score_credit=0.5, prefill_load_scale=2.0, active_request_weight=1.5
    )
    # e0: 2 * (8 + 4 - 0.5 * 4) + 4 + 1.5 * 3; e1: 2 * (0 + 4 - 0.5 * 2) + 4 + 1.5.
    assert list(scorer.costs(request(256), seen)) == [2 * 10 + 4 + 4.5, 2 * 3 + 4 + 1.5]


def test_dynamos_credit_decays_with_the_prefill_that_waits_above_the_fewest() -> None:
    seen = view(chain=ABCD, matched_tokens=[256, 256], inflight_uncached_tokens=[576, 64], inflight_requests=[0, 0])
    scorer = DynamoCostScorer(block_tokens=64, overlap_score_credit_decay=0.5)
    # e0 has 8 blocks more than e1, twice this request's 4: its credit is 4 / (1 + 0.5 * 2) = 2.
    assert list(scorer.costs(request(256), seen)) == [9 + 4 - 2 + 4, 1 + 4 - 4 + 4]


def test_dynamos_prefill_is_never_negative() -> None:
    seen = view(chain=ABCD, matched_tokens=[256, 0], inflight_uncached_tokens=[0, 0], inflight_requests=[0, 0])
    scorer = DynamoCostScorer(block_tokens=64, overlap_score_credit=3.0)
    assert list(scorer.costs(request(256), seen)) == [4, 8]


def test_dynamo_keeps_what_is_in_use_over_a_reload() -> None:
    scorer, other = DynamoCostScorer(block_tokens=64), DynamoCostScorer(block_tokens=64)
    seen = view(2, chain=ABCD, matched_tokens=[0, 0], inflight_uncached_tokens=[0, 0], inflight_requests=[0, 0])
    sent(scorer, seen, "e0", tokens=256, name="r1")
    other.adopt(scorer)
    other.released("r1")
    assert list(other.costs(request(256), seen)) == [8, 8]


def chosen(matched: list[float], load: list[float], **parameters: float) -> list[int]:
    scorer = AibrixPrefixCacheScorer(**parameters)  # type: ignore[arg-type]
    scores = scorer.score(request(1000), view(matched_tokens=matched, inflight_requests=load))
    return np.flatnonzero(scores == 1.0).tolist()


def test_aibrix_takes_the_best_match_and_of_equal_ones_the_least_busy() -> None:
    assert chosen([100, 900, 900, 0], [1, 4, 3, 0]) == [2]
    assert chosen([100, 900, 900, 0], [1, 3, 3, 2]) == [1, 2]


def test_aibrix_passes_over_a_match_that_is_a_deviation_above_the_mean() -> None:
    # Mean 3, deviation 3: 8 is above 6, 3 is not.
    assert chosen([900, 100, 0, 0], [8, 3, 1, 0]) == [1]
    assert chosen([900, 100, 0, 0], [8, 3, 1, 0], standard_deviation_factor=2) == [0]


def test_aibrix_takes_the_least_busy_without_a_match_that_fits() -> None:
    assert chosen([0, 0, 0], [2, 1, 1]) == [1, 2]
    assert chosen([900, 0, 0, 0], [8, 0, 0, 0]) == [1, 2, 3]


def test_aibrix_takes_the_least_busy_when_the_difference_is_above_the_threshold() -> None:
    assert chosen([0, 900, 0], [8, 0, 1]) == [1]
    assert chosen([0, 0, 900], [9, 0, 1]) == [1]
    assert chosen([0, 0, 900], [9, 0, 1], load_imbalance_threshold=16) == [2]


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="blockTokens"):
        DynamoCostScorer(block_tokens=0)
    with pytest.raises(ValueError, match="negative"):
        DynamoCostScorer(prefill_load_scale=-1)
    with pytest.raises(ValueError, match="negative"):
        AibrixPrefixCacheScorer(load_imbalance_threshold=-1)
