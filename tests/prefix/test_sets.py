"""Interned sets: equal sets share an id, unused ones are freed, and their room is bounded."""

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.prefix.sets import MAX_SLOTS, HolderSets, mask_of, slots_of

SMALL = 16 * 1024


@given(st.sets(st.integers(0, MAX_SLOTS - 1), min_size=1))
def test_a_set_and_its_slots_are_the_same_thing(slots: set[int]) -> None:
    mask = sum(1 << slot for slot in slots)
    assert slots_of(mask).tolist() == sorted(slots)
    assert mask_of(slots_of(mask), MAX_SLOTS) == mask


def test_equal_sets_have_one_id() -> None:
    sets = HolderSets(SMALL, 100)
    assert sets.intern(0b101, 0) == sets.intern(0b101, 2)
    assert sets.intern(0b11, 0) != sets.intern(0b101, 0)


def test_the_empty_set_is_the_free_row() -> None:
    sets = HolderSets(SMALL, 100)
    assert sets.intern(0, 3) == 0
    assert sets.rows[0] == 100


def test_sets_that_no_row_names_make_room() -> None:
    sets = HolderSets(SMALL, 100)
    for one, two in combinations(range(60), 2):
        set_id = sets.intern(1 << one | 1 << two, one)
        assert sets.masks[set_id] == 1 << one | 1 << two
        sets.hold(set_id, 1)
        sets.release(np.array([set_id]))
    assert sets.used_bytes <= SMALL


def test_a_row_keeps_only_its_newest_holder_when_no_set_fits() -> None:
    sets = HolderSets(SMALL, 100)
    kept = []
    for one, two in combinations(range(60), 2):
        set_id = sets.intern(1 << one | 1 << two, two)
        sets.hold(set_id, 1)
        kept.append(sets.masks[set_id])
    assert kept[0] == 0b11
    assert kept[-1] == 1 << 59
    assert sets.used_bytes <= SMALL + 60 * 140


def test_wider_fleets_get_fewer_sets() -> None:
    narrow, wide = HolderSets(SMALL, 100), HolderSets(SMALL, 100)
    wide.widen(64)
    for sets in (narrow, wide):
        for one, two in combinations(range(40), 2):
            sets.hold(sets.intern(1 << one | 1 << two, two), 1)
    assert len(wide) < len(narrow)
