"""The exact index against a dict of sets, within its budget and beyond it."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.pool.kvevents import Tier
from shoal.prefix.exact import ExactIndex
from shoal.prefix.hashing import Blocks
from shoal.prefix.match import TIERS

SLOTS = 5
KEYS = 24


def blocks(*keys: int) -> Blocks:
    return np.array(keys, np.uint64)


class Oracle:
    """(slot, tier) -> keys, without any bound."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, Tier], set[int]] = {(slot, tier): set() for slot in range(SLOTS) for tier in TIERS}

    def by_tier(self, slot: int, keys: list[int]) -> tuple[int, ...]:
        counts = [0] * len(TIERS)
        for key in keys:
            on = [number for number, tier in enumerate(TIERS) if key in self.held[slot, tier]]
            if not on:
                break
            counts[on[0]] += 1
        return tuple(counts)


keys_lists = st.lists(st.integers(1, KEYS), max_size=12)
steps = st.tuples(
    st.sampled_from(["store", "store", "store", "evict", "clear"]),
    st.integers(0, SLOTS - 1),
    st.sampled_from([Tier.GPU, Tier.GPU, Tier.CPU, Tier.SHARED]),
    keys_lists,
)
histories = st.lists(steps, max_size=50)


def spread(keys: list[int]) -> Blocks:
    """Keys as hashes are: all over the range."""
    return np.array(keys, np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def replay(index: ExactIndex, oracle: Oracle, history: list[tuple[str, int, Tier, list[int]]]) -> None:
    for verb, slot, tier, keys in history:
        if verb == "store":
            index.store(slot, spread(keys), tier)
            oracle.held[slot, tier].update(keys)
        elif verb == "evict":
            index.evict(slot, spread(keys), tier)
            oracle.held[slot, tier].difference_update(keys)
        else:
            index.clear(slot)
            for each in TIERS:
                oracle.held[slot, each].clear()


def opened(budget_bytes: int = 1 << 20, slots: int = SLOTS) -> ExactIndex:
    index = ExactIndex(budget_bytes)
    assert [index.open_slot() for _ in range(slots)] == list(range(slots))
    return index


@given(histories, st.lists(keys_lists, min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_within_its_budget_it_says_what_a_dict_of_sets_says(
    history: list[tuple[str, int, Tier, list[int]]], asked: list[list[int]]
) -> None:
    index, oracle = opened(), Oracle()
    replay(index, oracle, history)
    for keys in asked:
        match = index.match(spread(keys))
        expected = [oracle.by_tier(slot, keys) for slot in range(SLOTS)]
        assert [match.by_tier(slot) for slot in range(SLOTS)] == expected
        assert match.tiers.T.tolist() == [list(counts) for counts in expected]
        assert match.blocks.tolist() == [sum(counts) for counts in expected]
        assert [match.held(slot) for slot in range(SLOTS)] == match.blocks.tolist()
        assert match.total == len(keys)


@given(histories, st.lists(keys_lists, min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_beyond_its_budget_it_never_says_more(
    history: list[tuple[str, int, Tier, list[int]]], asked: list[list[int]]
) -> None:
    index, oracle = opened(1024), Oracle()
    replay(index, oracle, history)
    for keys in asked:
        said = index.match(spread(keys)).blocks.tolist()
        assert all(said[slot] <= sum(oracle.by_tier(slot, keys)) for slot in range(SLOTS))


@given(histories, st.sampled_from([1024, 1 << 20]))
@settings(deadline=None)
def test_the_count_of_rows_per_set_stays_true(history: list[tuple[str, int, Tier, list[int]]], budget: int) -> None:
    index = opened(budget)
    replay(index, Oracle(), history)
    ids = index._table._flat_entries & np.uint64(0xFFFF)
    counted = np.bincount(ids.astype(np.int64), minlength=len(index._sets.rows))
    assert counted.tolist() == np.maximum(index._sets.rows, 0).tolist()
    assert np.array_equal(index._table._flat_keys == 0, ids == 0)


@settings(max_examples=60, deadline=None)
@given(histories, st.lists(st.integers(0, 50), max_size=6))
def test_taking_the_memory_in_parts_between_events_changes_nothing(
    history: list[tuple[str, int, Tier, list[int]]], turns: list[int]
) -> None:
    index, oracle = opened(4 << 20), Oracle()
    for turn, step in enumerate(history):
        if turn in turns:
            index.prepare()
        replay(index, oracle, [step])
    while index.prepare():
        pass
    prompt = list(range(1, KEYS + 1))
    for slot in range(SLOTS):
        assert index.match(spread(prompt)).by_tier(slot) == oracle.by_tier(slot, prompt)


_GROWTH = """
import numpy as np
import psutil
from shoal.pool.kvevents import Tier
from tests.prefix.test_exact import opened
process = psutil.Process()
index = opened(32 << 20)
before = process.memory_info().rss
while index.prepare():
    pass
prepared = process.memory_info().rss
index.store(0, np.random.default_rng(1).integers(1, 2**63, 20_000, dtype=np.uint64), Tier.GPU)
print(prepared - before, process.memory_info().rss - prepared)
"""


def test_after_it_was_prepared_the_first_blocks_wait_for_no_memory() -> None:
    # In a process of its own: one that has had more memory before gives it out again without asking for any.
    done = subprocess.run([sys.executable, "-c", _GROWTH], capture_output=True, text=True, timeout=60, check=True)
    prepared, stored = map(int, done.stdout.split())
    assert prepared > 24 << 20
    assert stored < 4 << 20


def test_a_match_ends_at_the_first_block_that_is_not_held() -> None:
    index = opened()
    index.store(0, blocks(11, 12, 14), Tier.GPU)
    index.store(1, blocks(12, 13, 14), Tier.GPU)
    assert index.match(blocks(11, 12, 13, 14)).blocks.tolist() == [2, 0, 0, 0, 0]


def test_a_block_on_several_tiers_counts_on_the_fastest() -> None:
    index = opened()
    index.store(2, blocks(11, 12, 13), Tier.CPU)
    index.store(2, blocks(12), Tier.GPU)
    index.store(2, blocks(13), Tier.SHARED)
    by_tier = dict(zip(TIERS, index.match(blocks(11, 12, 13)).by_tier(2), strict=True))
    assert by_tier == {Tier.GPU: 1, Tier.EXPECTED: 0, Tier.CPU: 2, Tier.DISK: 0, Tier.SHARED: 0}


def test_what_a_publisher_left_behind_is_not_the_next_ones() -> None:
    index = opened()
    index.store(2, blocks(11, 12), Tier.GPU)
    index.store(3, blocks(11, 12), Tier.GPU)
    index.remove(2)
    with pytest.raises(ValueError, match="slot 2"):
        index.store(2, blocks(13), Tier.GPU)
    assert index.match(blocks(11, 12)).blocks.tolist() == [0, 0, 0, 2, 0]
    assert index.open_slot() == 2
    assert index.match(blocks(11, 12)).blocks.tolist() == [0, 0, 0, 2, 0]


def test_places_do_not_run_out_however_often_slots_are_cleared() -> None:
    index = opened(slots=3)
    for turn in range(10_000):
        index.store(turn % 3, blocks(turn % 50 + 1), Tier.GPU)
        index.clear(turn % 3)
    assert index.match(blocks(1)).blocks.tolist() == [0, 0, 0]
    assert index._width < 300


def test_a_cleared_slot_is_forgotten_at_once_however_many_sets_name_it() -> None:
    slots = 60
    index = opened(4 << 20, slots)
    pairs = [(one, other) for one in range(slots) for other in range(one)]
    for key, pair in enumerate(pairs, 1):
        for slot in pair:
            index.store(slot, spread([key]), Tier.GPU)
    assert index.gauges().sets > 1_700
    index.remove(0)
    assert index.open_slot() == 0
    for cleared in range(1, 14):
        index.clear(cleared)
        index.store(cleared, spread([10_000 + cleared]), Tier.GPU)
        for slot in range(1, cleared + 1):
            assert index.match(spread([10_000 + slot])).blocks.nonzero()[0].tolist() == [slot]
        for key, pair in enumerate(pairs, 1):
            held = index.match(spread([key])).blocks.nonzero()[0].tolist()
            assert held == sorted(slot for slot in pair if slot > cleared)


def test_clearing_while_sets_are_scarce_never_names_a_publisher_too_many() -> None:
    rng = np.random.default_rng(11)
    slots, keys = 40, 400
    index = opened(1 << 20, slots)
    held: list[set[int]] = [set() for _ in range(slots)]
    for turn in range(12_000):
        slot, key = int(rng.integers(slots)), int(rng.integers(1, keys))
        if turn % 3 == 0:
            index.clear(slot)
            held[slot].clear()
        index.store(slot, spread([key]), Tier.GPU)
        held[slot].add(key)
        asked = int(rng.integers(1, keys))
        said = index.match(spread([asked])).blocks.nonzero()[0].tolist()
        assert all(asked in held[each] for each in said)


def test_4096_publishers_have_slots_and_one_more_is_refused() -> None:
    index = opened(512 << 20, 4096)
    for slot in (0, 63, 4095):
        index.store(slot, blocks(5), Tier.SHARED)
    assert index.match(blocks(5)).blocks.nonzero()[0].tolist() == [0, 63, 4095]
    with pytest.raises(ValueError, match="4096"):
        index.open_slot()
    for slot in range(4096):
        index.clear(slot)
    assert index.match(blocks(5)).blocks.sum() == 0


def test_b3_stores_without_removes_keep_to_the_budget_and_the_newest() -> None:
    rng = np.random.default_rng(3)
    index = opened(1 << 20)
    prompts = [rng.integers(1, 2**63, 100, dtype=np.uint64) for _ in range(2_000)]
    for turn, prompt in enumerate(prompts):
        index.store(turn % SLOTS, prompt, Tier.GPU)
    gauges = index.gauges()
    assert gauges.used_bytes <= gauges.budget_bytes
    assert gauges.displaced > 100_000
    kept = [index.match(prompt).held(turn % SLOTS) for turn, prompt in enumerate(prompts)]
    assert min(kept[-300:]) == 100
    assert max(kept[:300]) == 0


def test_what_is_asked_for_stays_when_the_budget_is_reached() -> None:
    rng = np.random.default_rng(3)
    index = opened(1 << 20)
    hot = rng.integers(1, 2**63, 200, dtype=np.uint64)
    index.store(0, hot, Tier.GPU)
    for _ in range(2_000):
        index.store(1, rng.integers(1, 2**63, 100, dtype=np.uint64), Tier.GPU)
        index.match(hot)
    assert index.match(hot).held(0) == 200


def test_nine_rows_in_ten_are_taken_before_one_is_lost() -> None:
    index = opened(2 << 20)
    rng = np.random.default_rng(3)
    for _ in range(index._table.size * 9 // 10 // 1_000):
        index.store(0, rng.integers(1, 2**63, 1_000, dtype=np.uint64), Tier.GPU)
    assert index.gauges().displaced == 0
