import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernel import InvalidInput
from shoal.prefix import EstimatedIndex
from shoal.prefix.handover import ROWS_PER_PART, IndexRows
from shoal.prefix.horizon import HorizonState


def chain(seed: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.random.default_rng(seed).integers(1, 2**63, count, np.uint64)


def filled(slots: int, prompts: int, seed: int, budget_bytes: int = 1 << 20) -> EstimatedIndex:
    """An index in which prompts were sent here and there, with caches that are too small for all."""
    rng = np.random.default_rng(seed)
    index = EstimatedIndex(budget_bytes)
    for _ in range(slots):
        index.set_capacity(index.open_slot(), int(rng.integers(100, 2_000)))
    for number in range(prompts):
        index.add(int(rng.integers(slots)), chain(number % 40, int(rng.integers(1, 60))))
    return index


def handed(giver: EstimatedIndex, slots: list[int], budget_bytes: int = 1 << 20) -> EstimatedIndex:
    """A new index with all that `giver` knows; slots: the taker's for each of the giver's."""
    taker = EstimatedIndex(budget_bytes)
    for _ in slots:
        taker.open_slot()
    clock = giver.clock
    taker.begin_taking(clock, [(slot, giver.horizon(place)) for place, slot in enumerate(slots) if slot >= 0])
    at: int | None = 0
    while at is not None:
        rows, at = giver.give(at, clock)
        wire = msgspec.msgpack.decode(msgspec.msgpack.encode(rows), type=IndexRows)
        taker.take(wire, slots)
    return taker


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.integers(0, 300), st.integers(0, 2**32))
def test_a_handed_over_index_answers_as_its_giver_does(slots: int, prompts: int, seed: int) -> None:
    giver = filled(slots, prompts, seed)
    places = np.random.default_rng(seed).permutation(slots).tolist()
    taker = handed(giver, places)
    for number in range(45):
        blocks = chain(number, 60)
        old, new = giver.match(blocks).blocks, taker.match(blocks).blocks
        assert [old[place] for place in range(slots)] == [new[places[place]] for place in range(slots)]
    assert [giver.capacity(place) for place in range(slots)] == [taker.capacity(slot) for slot in places]


def test_both_go_on_alike_after_the_handover() -> None:
    giver = filled(4, 200, 3)
    taker = handed(giver, [0, 1, 2, 3])
    for number in range(100, 160):
        for index in (giver, taker):
            index.add(number % 4, chain(number, 50))
    for number in range(160):
        assert giver.match(chain(number, 50)).blocks.tolist() == taker.match(chain(number, 50)).blocks.tolist()


def test_an_endpoint_that_the_taker_does_not_know_is_left_out() -> None:
    giver = EstimatedIndex(1 << 20)
    for slot in range(2):
        giver.open_slot()
        giver.add(slot, chain(slot, 8))
    taker = handed(giver, [-1, 0])
    assert taker.match(chain(0, 8)).blocks.sum() == 0
    assert taker.match(chain(1, 8)).held(0) == 8
    assert taker.gauges().rows == 8


def test_an_endpoint_that_left_while_it_is_handed_over_is_left_out() -> None:
    giver = EstimatedIndex(1 << 20)
    giver.open_slot()
    giver.add(0, chain(1, 8))
    clock = giver.clock
    giver.remove(0)
    giver.open_slot()
    giver.add(0, chain(2, 8))
    rows, _ = giver.give(0, clock)
    taker = EstimatedIndex(1 << 20)
    taker.open_slot()
    taker.begin_taking(clock, [])
    taker.take(rows, [0])
    assert taker.gauges().rows == 0


def test_parts_are_bounded_and_cover_every_row_once() -> None:
    giver = EstimatedIndex(4 << 20)
    giver.open_slot()
    for number in range(600):
        giver.add(0, chain(number, 30))
    at: int | None = 0
    seen: list[int] = []
    while at is not None:
        rows, at = giver.give(at, giver.clock)
        assert len(rows.keys) <= 8 * ROWS_PER_PART
        seen += np.frombuffer(rows.keys, "<u8").tolist()
    assert len(seen) == len(set(seen)) == giver.gauges().rows > 2 * ROWS_PER_PART


def test_a_smaller_taker_keeps_the_youngest_and_its_counts_right() -> None:
    giver = EstimatedIndex(4 << 20)
    giver.open_slot()
    for number in range(600):
        giver.add(0, chain(number, 30))
    taker = handed(giver, [0], budget_bytes=1 << 18)
    gauges = taker.gauges()
    assert 0 < gauges.used_bytes <= gauges.budget_bytes
    held = [taker.match(chain(number, 30)).held(0) for number in range(600)]
    assert np.mean(held[-100:]) > np.mean(held[:100])
    for number in range(600, 900):
        taker.add(0, chain(number, 30))
    assert taker.gauges().used_bytes <= gauges.budget_bytes


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=20), st.lists(st.binary(max_size=4), max_size=3)
)
def test_rows_that_make_no_sense_are_refused_or_harmless(
    keys: bytes, stamps: bytes, holders: bytes, sets: list[bytes]
) -> None:
    taker = filled(3, 20, 1)
    with contextlib.suppress(InvalidInput):
        taker.take(IndexRows(keys, stamps, holders, tuple(sets)), [0, 1, -1])
    taker.add(1, chain(99, 20))
    assert taker.match(chain(99, 20)).held(1) == taker.match(chain(99, 20)).total
    assert taker.gauges().used_bytes <= taker.gauges().budget_bytes


@pytest.mark.parametrize("state", [HorizonState(stamp=99), HorizonState(total=5, marks=((4, 9), (3, 9)))])
def test_a_horizon_that_makes_no_sense_is_refused(state: HorizonState) -> None:
    index = EstimatedIndex(1 << 20)
    index.open_slot()
    with pytest.raises(InvalidInput):
        index.begin_taking(10, [(0, state)])
