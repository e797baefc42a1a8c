"""KubeAI's and production-stack's rings against examples worked by hand from their published rules."""

from typing import Any

import numpy as np
import pytest

from shoal.pool import FleetView
from shoal.scheduling.baselines_rings import (
    HashRing,
    KubeaiBoundedHashScorer,
    ProductionStackSessionScorer,
    place_of,
)
from tests.scheduling.script import chain, request, sent, view


def order(count: int, key: str, points: int = 256) -> list[int]:
    """The endpoints as the ring comes to them, worked out point by point."""
    places = sorted((place_of(f"e{row}{point}"), row) for row in range(count) for point in range(points))
    start = place_of(key)
    turned = [row for place, row in places if place >= start] + [row for place, row in places if place < start]
    return list(dict.fromkeys(turned))


def target(scorer: Any, seen: FleetView, session: str = "") -> int:
    scores = scorer.score(request(64, session_id=session), seen)
    assert list(scores).count(1.0) == 1
    return int(np.argmax(scores))


def key_of(letter: str) -> str:
    return f"m/{chain(letter)[0][0]}"


def test_the_ring_yields_every_endpoint_once_from_the_place_of_the_key_on() -> None:
    ring = HashRing(view(5).endpoints, 40)
    for key in "abcdef":
        assert list(ring.walk(place_of(key))) == order(5, key, 40)
    assert list(ring.walk(2**64 - 1)) == list(ring.walk(0))


def test_an_endpoint_that_leaves_moves_only_its_own_keys() -> None:
    all_of_them, without = view(5).endpoints, view(4).endpoints
    before, after = HashRing(all_of_them, 256), HashRing(without, 256)
    for number in range(200):
        key = place_of(f"key{number}")
        first = next(before.walk(key))
        assert first == 4 or next(after.walk(key)) == first


def test_bounded_hash_takes_the_first_place_while_nothing_is_in_flight() -> None:
    scorer = KubeaiBoundedHashScorer()
    for letter in "abcdefgh":
        seen = view(chain=chain(letter, "x"), inflight_requests=[0, 0, 0, 0])
        assert target(scorer, seen) == order(4, key_of(letter))[0]


def test_bounded_hash_passes_over_who_has_more_than_125_percent_of_the_mean() -> None:
    first, second, *_ = order(4, key_of("a"))
    # (15 + 1) / 4 * 1.25 = 5: who has four in flight may take this one, who has five may not.
    load = [4.0, 4.0, 4.0, 4.0]
    load[second] = 3.0
    assert target(KubeaiBoundedHashScorer(), view(chain=chain("a"), inflight_requests=load)) == first
    load = [4.0, 4.0, 4.0, 4.0]
    load[first], load[second] = 5.0, 2.0
    assert target(KubeaiBoundedHashScorer(), view(chain=chain("a"), inflight_requests=load)) == second


def test_bounded_hash_falls_back_to_the_first_place_when_nobody_is_under_the_bound() -> None:
    # (1 + 1) / 4 * 1.25 is below 1, so not even an idle endpoint may take it.
    first = order(4, key_of("a"))[0]
    load = [0.0] * 4
    load[first] = 1.0
    assert target(KubeaiBoundedHashScorer(), view(chain=chain("a"), inflight_requests=load)) == first


def test_bounded_hash_knows_a_prompt_by_its_first_block_and_model_alone() -> None:
    scorer = KubeaiBoundedHashScorer()
    targets = {
        target(scorer, view(chain=chain("a", letter), inflight_requests=[0, 0, 0, 0, 0])) for letter in "bcdefgh"
    }
    assert len(targets) == 1


def test_bounded_hash_chooses_among_the_candidates_that_are_left() -> None:
    first, second, *_ = order(4, key_of("a"))
    seen = view(chain=chain("a"), inflight_requests=[0, 0, 0, 0])
    kept = seen.keep(np.array([row != first for row in range(4)]))
    assert kept.endpoint(target(KubeaiBoundedHashScorer(), kept)).id == f"e{second}"


def test_a_session_has_its_place_on_the_ring_whatever_the_load() -> None:
    scorer = ProductionStackSessionScorer()
    for session in ("s1", "s2", "s3", "s4"):
        seen = view(inflight_requests=[50, 0, 0])
        assert target(scorer, seen, session) == order(3, session, 160)[0]


def test_a_session_is_read_from_the_header_that_is_named() -> None:
    scorer = ProductionStackSessionScorer(session_key="X-User-Id")
    assert scorer.request_headers() == ("x-user-id",)
    seen = view(inflight_requests=[0, 0, 0])
    asked = request(64, headers={"x-user-id": "ann"}, session_id="other")
    assert int(np.argmax(scorer.score(asked, seen))) == order(3, "ann", 160)[0]
    assert ProductionStackSessionScorer().request_headers() == ()


def test_without_a_session_it_is_who_was_sent_fewest_in_the_window() -> None:
    scorer = ProductionStackSessionScorer(window_seconds=60)
    seen = view(inflight_requests=[0, 0, 0])
    assert target(scorer, seen) == 0
    for now, name in ((0.0, "e0"), (1.0, "e0"), (2.0, "e1"), (3.0, "e2"), (4.0, "e2")):
        sent(scorer, seen, name, now)
    assert target(scorer, seen) == 1
    # At 61 s the first two of e0 are out of the window.
    sent(scorer, seen, "e1", 61.0)
    assert target(scorer, seen) == 0


def test_a_session_scorer_keeps_its_window_over_a_reload() -> None:
    scorer, other = ProductionStackSessionScorer(), ProductionStackSessionScorer()
    seen = view(inflight_requests=[0, 0])
    sent(scorer, seen, "e0")
    other.adopt(scorer)
    assert target(other, seen) == 1


def test_bad_parameters_are_refused_with_their_name() -> None:
    with pytest.raises(ValueError, match="meanLoadPercentage"):
        KubeaiBoundedHashScorer(mean_load_percentage=99)
    with pytest.raises(ValueError, match="replication"):
        KubeaiBoundedHashScorer(replication=0)
    with pytest.raises(ValueError, match="windowSeconds"):
        ProductionStackSessionScorer(window_seconds=0)
