"""A day of a pool runs once more in the twin, and comes out as it was."""

import pytest

from bench.bars.twin_fit import journal_of
from shoal.engine import find_profile
from shoal.kernel import InvalidInput
from shoal.pool import Endpoint, EndpointState, Request
from shoal.routing import Arrived, Event, events
from shoal.routing.journal import MAGIC, Opening, Step, encode
from shoal.simulation.replay import as_recorded, day_of, moves, nodes_of, outages, play

PROFILE = find_profile("h100-8b")
ROUND_ROBIN = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: round-robin-picker}]
schedulingProfiles: [{name: a, plugins: [{pluginRef: round-robin-picker}]}]
"""


def test_the_same_configuration_gives_about_what_was_recorded_and_another_moves_requests() -> None:
    day = day_of(journal_of(PROFILE, 4, 200))
    recorded, _ = as_recorded(day)
    nodes = nodes_of(day, PROFILE, {})
    same, before = play(day, nodes, day.pool.config)
    # The record of the last request is not in the journal.
    assert (recorded.requests, recorded.failed) == (day.arrivals - 1, 0)
    assert (same.requests, same.failed) == (day.arrivals, 0)
    assert same.ttft_p50_s == pytest.approx(recorded.ttft_p50_s, rel=0.15)
    assert same.e2e_p95_s == pytest.approx(recorded.e2e_p95_s, rel=0.10)
    assert same.hit_ratio == pytest.approx(recorded.hit_ratio, abs=0.03)
    stayed = moves(before, before)
    assert (stayed.compared, stayed.elsewhere, stayed.computed_ratio) == (day.arrivals, 0, 1.0)
    other, after = play(day, nodes, ROUND_ROBIN)
    changed = moves(before, after)
    assert changed.compared == day.arrivals
    assert changed.elsewhere > day.arrivals / 10
    assert changed.colder > changed.warmer
    assert changed.computed_ratio > 1.05
    assert other.hit_ratio < same.hit_ratio - 0.05


def written(steps: list[tuple[float, Event]]) -> bytes:
    frames = [encode(Opening(0, "", False)), *(encode(Step(now, event, [])) for now, event in steps)]
    return MAGIC + b"".join(frames)


def test_endpoints_stop_and_begin_again_when_they_did() -> None:
    a, b, never = (Endpoint(id=name, address=f"10.0.0.{n}:8000") for n, name in enumerate(("a", "b", "never")))
    ready, loading = EndpointState.READY, EndpointState.LOADING
    steps: list[tuple[float, Event]] = [
        (1.0, events.EndpointJoined(a, ready)),
        (2.0, events.EndpointJoined(never)),
        (100.0, Arrived(Request(id="r", prompt_tokens=80))),
        (130.0, events.EndpointChanged("a", loading)),
        (135.0, events.EndpointChanged("a", EndpointState.DRAINING)),
        (140.0, events.EndpointJoined(b, ready)),
        (150.0, events.EndpointLeft("b")),
    ]
    day = day_of([written(steps)])
    assert [seen.endpoint.id for seen in day.machines] == ["a", "b"]
    assert outages(day, 2.0) == [
        (0.0, "b", False), (28.0, "a", False), (33.0, "a", True), (38.0, "b", True), (48.0, "b", False),
    ]  # fmt: skip


def test_a_journal_without_engines_or_requests_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no request"):
        day_of([written([])])
    with pytest.raises(InvalidInput, match="no endpoint"):
        day_of([written([(1.0, Arrived(Request(id="r", prompt_tokens=80)))])])


@pytest.mark.parametrize(
    ("said", "blocks", "held"), [(1, 160_000, (16, 10_000)), (24, 8_000, (32, 6_000)), (32, 500, (32, 500))]
)
def test_engines_with_blocks_that_are_no_multiple_of_16_tokens_keep_their_room(
    said: int, blocks: int, held: tuple[int, int]
) -> None:
    day = day_of(journal_of(PROFILE, 4, 20))
    for seen in day.machines:
        seen.block_size, seen.num_blocks = said, blocks
    nodes = nodes_of(day, PROFILE, {})
    assert {(node.engine.block_size, node.engine.num_blocks) for node in nodes} == {held}
    assert play(day, nodes, "")[0].requests == day.arrivals
