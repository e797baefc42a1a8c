"""sglang-router's and production-stack's policies against examples worked by hand from their published rules."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.scheduling.baselines_trees import PrefixTree, ProductionStackPrefixScorer, SglangCacheAwareScorer
from tests.scheduling.script import chain, request, sent, view

ABCD = chain("a", "b", "c", "d")
ABXY = chain("a", "b", "x", "y")


def target(scorer: Any, prompt: Any, load: list[float], tokens: int = 256) -> int:
    """Where the scorer sends a prompt: the only endpoint of score 1."""
    scores = scorer.score(request(tokens), view(chain=prompt, inflight_requests=load))
    assert list(scores).count(1.0) == 1
    return int(np.argmax(scores))


def test_a_tree_gives_the_longest_beginning_that_is_offered_and_who_was_first_sent_it() -> None:
    tree = PrefixTree()
    tree.add(ABCD, "e1")
    tree.add(ABXY, "e0")
    assert tree.match(ABCD, ["e0", "e1"]) == (256, ("e1",))
    assert tree.match(ABCD, ["e0"]) == (128, ("e0",))
    assert tree.match(ABXY[:2], ["e0", "e1"]) == (128, ("e1", "e0"))
    assert tree.match(ABCD, ["e2"]) == tree.match([], ["e0"]) == (0, ())
    assert tree.tokens == {"e0": 256, "e1": 256}


def test_a_tree_counts_what_prompts_share_once_and_drops_the_oldest_ends_first() -> None:
    tree = PrefixTree()
    tree.add(ABCD, "e0")
    tree.add(ABXY, "e0")
    assert tree.tokens == {"e0": 384}
    tree.trim(256)
    assert tree.match(ABCD, ["e0"]).tokens == 128
    assert tree.match(ABXY, ["e0"]).tokens == 256
    tree.trim(64)
    assert tree.match(ABXY, ["e0"]).tokens == 64
    tree.remove("e0")
    assert tree.tokens == {}
    assert tree.match(ABXY, ["e0"]).tokens == 0


@given(
    st.lists(st.tuples(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), st.sampled_from(["e0", "e1"]))),
    st.integers(0, 6),
)
def test_whatever_is_sent_and_dropped_a_tree_holds_whole_beginnings(sends: list[Any], blocks: int) -> None:
    tree = PrefixTree()
    for letters, name in sends:
        tree.add(chain(*letters), name)
        tree.trim(64 * blocks)
    assert all(tokens <= 64 * blocks for tokens in tree.tokens.values())
    for name, tokens in tree.tokens.items():
        reached = {
            link for letters, _ in sends for link in chain(*letters)[: tree.match(chain(*letters), [name]).tokens // 64]
        }
        assert 64 * len(reached) == tokens


def test_cache_aware_goes_where_more_than_the_threshold_of_the_prompt_is() -> None:
    scorer = SglangCacheAwareScorer()
    sent(scorer, view(3, chain=ABCD), "e1")
    # 128 of 256 tokens is above 0.3; of 512 it is not, and e0 and e2 have the smallest trees.
    assert target(scorer, ABXY, [0, 5, 0]) == 1
    assert target(scorer, ABXY, [9, 5, 0], tokens=512) == 0


def test_cache_aware_stays_with_the_first_of_several_holders() -> None:
    scorer = SglangCacheAwareScorer()
    sent(scorer, view(3, chain=ABCD), "e2")
    sent(scorer, view(3, chain=ABCD), "e0")
    assert target(scorer, ABCD, [0, 0, 40]) == 2


def test_cache_aware_sends_a_miss_to_the_smallest_tree() -> None:
    scorer = SglangCacheAwareScorer()
    sent(scorer, view(3, chain=ABCD), "e0")
    sent(scorer, view(3, chain=chain("q", "r")), "e1")
    sent(scorer, view(3, chain=chain("s", "t", "u")), "e2")
    assert target(scorer, chain("z"), [0, 0, 0]) == 1


@pytest.mark.parametrize(
    ("load", "went"),
    [
        ([65, 0], 1),  # 65 more, and any number is above 1.5 times 0
        ([64, 0], 0),  # not more than 64 more
        ([200, 134], 0),  # 66 more, but 200 is not above 1.5 * 134 = 201
        ([202, 134], 1),
    ],
)
def test_cache_aware_takes_the_shortest_queue_when_both_thresholds_are_passed(load: list[float], went: int) -> None:
    scorer = SglangCacheAwareScorer()
    sent(scorer, view(2, chain=ABCD), "e0")
    assert target(scorer, ABCD, load) == went


def test_cache_aware_drops_the_oldest_once_per_interval() -> None:
    scorer = SglangCacheAwareScorer(max_tree_tokens=256, eviction_interval_seconds=10)
    sent(scorer, view(2, chain=chain("k")), "e1", now=0.0)
    sent(scorer, view(2, chain=ABCD), "e1", now=1.0)
    sent(scorer, view(2, chain=ABXY), "e1", now=9.0)
    assert target(scorer, ABCD, [0, 0]) == 1
    sent(scorer, view(2, chain=ABXY), "e1", now=10.0)
    # Of ABCD only AB is left, which is half of it; K is gone, so e0's tree is the smaller one.
    assert target(scorer, ABCD, [0, 0], tokens=600) == 0
    assert target(scorer, chain("k"), [0, 0], tokens=64) == 0


def test_prefix_aware_leaves_all_holders_of_the_longest_match_to_chance_whatever_their_load() -> None:
    scorer = ProductionStackPrefixScorer()
    for name in ("e0", "e2"):
        sent(scorer, view(3, chain=ABCD), name)
    sent(scorer, view(3, chain=ABXY), "e1")
    seen = view(chain=ABCD, inflight_requests=[90, 0, 50])
    assert list(scorer.score(request(256), seen)) == [1.0, 0.5, 1.0]
    assert list(scorer.score(request(64), view(3, chain=chain("z"), inflight_requests=[1, 2, 3]))) == [1.0] * 3


def test_both_forget_an_endpoint_that_left_and_keep_their_tree_over_a_reload() -> None:
    for scorer, other in (
        (SglangCacheAwareScorer(), SglangCacheAwareScorer()),
        (ProductionStackPrefixScorer(), ProductionStackPrefixScorer()),
    ):
        sent(scorer, view(3, chain=ABCD), "e1")
        other.adopt(scorer)
        assert target(other, ABCD, [0, 0, 0]) == 1
        other.endpoint_left("e1")
        sent(other, view(3, chain=ABCD), "e2")
        assert target(other, ABCD, [0, 0, 0]) == 2


def test_bad_parameters_are_refused_with_their_name() -> None:
    with pytest.raises(ValueError, match="cacheThreshold"):
        SglangCacheAwareScorer(cache_threshold=1.5)
    with pytest.raises(ValueError, match="evictionIntervalSeconds"):
        SglangCacheAwareScorer(eviction_interval_seconds=0)
    with pytest.raises(ValueError, match="maxTreeTokens"):
        ProductionStackPrefixScorer(max_tree_tokens=0)
