"""The ledger against a model of an engine's cache: what it says is held is what lies there."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.pool.kvevents import KvCleared, KvEvent, KvRemoved, KvStored, Tier
from shoal.prefix.hashing import read_blocks
from shoal.prefix.ledger import Cleared, Ledger, Stored
from tests.prefix.cache_model import (
    HASHER,
    SIZE,
    Engine,
    Held,
    acts,
    bare,
    chains,
    hashes_of,
    keys_of,
    play,
    stored,
    tokens_of,
)


def said(ledger: Ledger, *events: KvEvent) -> dict[Tier, set[int]]:
    """What is held after these events, of a ledger that was empty."""
    held = Held()
    held.take(ledger.apply(events))
    return held.sets()


def fresh(max_bytes: int = 1 << 20) -> Ledger:
    return Ledger(HASHER, "m", max_bytes)


@given(acts, st.lists(st.integers(1, 8), min_size=1, max_size=40))
@settings(max_examples=300, deadline=None)
def test_what_it_says_is_what_the_engine_holds(history: list[tuple[str, tuple[int, ...]]], cuts: list[int]) -> None:
    engine, ledger, held = Engine(), fresh(), Held()
    waiting: list[KvEvent] = []
    for number, (verb, names) in enumerate(history):
        waiting += play(engine, verb, names)
        if number % cuts[number % len(cuts)] == 0:
            held.take(ledger.apply(waiting))
            waiting = []
            assert held.sets() == engine.sets()
    held.take(ledger.apply(waiting))
    assert held.sets() == engine.sets()


@given(acts)
@settings(deadline=None)
def test_a_small_ledger_never_says_more_than_the_engine_holds(history: list[tuple[str, tuple[int, ...]]]) -> None:
    engine, ledger, held = Engine(), fresh(2_000), Held()
    for verb, names in history:
        held.take(ledger.apply(play(engine, verb, names)))
        truth = engine.sets()
        assert all(keys <= truth.get(tier, set()) for tier, keys in held.sets().items())


@given(acts, st.integers(0, 20))
@settings(deadline=None)
def test_a_ledger_that_began_late_never_says_more_than_the_engine_holds(
    history: list[tuple[str, tuple[int, ...]]], missed: int
) -> None:
    engine, ledger, held = Engine(), fresh(), Held()
    for number, (verb, names) in enumerate(history):
        events = play(engine, verb, names)
        if number >= missed:
            held.take(ledger.apply(events))
            truth = engine.sets()
            assert all(keys <= truth.get(tier, set()) for tier, keys in held.sets().items())


@given(chains, st.permutations(range(6)), st.data())
@settings(deadline=None)
def test_runs_are_joined_in_whatever_order_they_come(
    names: tuple[int, ...], order: list[int], data: st.DataObject
) -> None:
    ledger, held = fresh(), Held()
    events = [stored(names[: place + 1], place) for place in order if place < len(names)]
    batch = data.draw(st.integers(1, 6))
    for start in range(0, len(events), batch):
        held.take(ledger.apply(events[start : start + batch]))
    assert held.sets() == {Tier.GPU: set(keys_of(names))}
    assert ledger.gauges().orphans == 0


def test_b12_what_an_engine_calls_its_blocks_does_not_matter() -> None:
    one = KvStored([11, 12], None, tokens_of((1, 2)), SIZE)
    other = KvStored([2**64 - 1, 5], None, tokens_of((1, 2)), SIZE)
    assert said(fresh(), one) == said(fresh(), other) == {Tier.GPU: set(keys_of((1, 2)))}


def test_b13_salts_and_adapters_part_what_is_held() -> None:
    salted = stored((1, 2), extras=[("s",), None])
    assert said(fresh(), salted) == {Tier.GPU: set(keys_of((1, 2), salt="s"))}
    assert said(fresh(), stored((1, 2), lora="l")) == {Tier.GPU: set(keys_of((1, 2), adapter="l"))}
    both = said(fresh(), stored((1, 2)), KvStored([1, 2], None, tokens_of((1, 2)), SIZE, extras=[("s",), None]))
    assert both == {Tier.GPU: set(keys_of((1, 2))) | set(keys_of((1, 2), salt="s"))}


def test_b6_children_that_come_before_their_parent_are_not_lost() -> None:
    ledger = fresh()
    assert ledger.apply([stored((1, 2, 3, 4), 2), bare((1, 2, 3), 2, Tier.CPU)]) == []
    assert ledger.gauges().orphans == 3
    held = Held()
    held.take(ledger.apply([stored((1, 2))]))
    keys = keys_of((1, 2, 3, 4))
    assert held.sets() == {Tier.GPU: set(keys), Tier.CPU: {keys[2]}}
    assert ledger.gauges().joined == 3


def test_what_was_removed_while_it_waited_is_not_held_when_its_parent_comes() -> None:
    ledger, held = fresh(), Held()
    ledger.apply([stored((1, 2, 3, 4), 2)])
    ledger.apply([KvRemoved(hashes_of((1, 2, 3), 2))])
    held.take(ledger.apply([stored((1, 2))]))
    keys = keys_of((1, 2, 3, 4))
    assert held.sets() == {Tier.GPU: {keys[0], keys[1], keys[3]}}


def test_what_is_stored_and_removed_while_unknown_waits_no_longer() -> None:
    ledger = fresh()
    ledger.apply([bare((1,), 0, Tier.CPU), bare((1,), 0, Tier.CPU)])
    ledger.apply([KvRemoved(hashes_of((1,)), Tier.CPU)])
    assert ledger.gauges().orphans == 1
    ledger.apply([KvRemoved(hashes_of((1,)), Tier.CPU)])
    assert ledger.gauges().orphans == 0


def test_orphans_are_bounded() -> None:
    ledger = fresh(200_000)
    for number in range(2_000):
        ledger.apply([KvStored([10**6 + number], 10**9 + number, tokens_of((1,)), SIZE)])
    gauges = ledger.gauges()
    assert gauges.orphans < 100
    assert gauges.lost_orphans > 1_900
    assert gauges.used_bytes < 200_000


def test_a_report_of_what_is_held_adds_no_copy() -> None:
    ledger, held = fresh(), Held()
    for _ in range(50):
        held.take(ledger.apply([stored((1, 2, 3))]))
    held.take(ledger.apply([KvRemoved([hash]) for hash in hashes_of((1, 2, 3))]))
    assert held.sets() == {}


def test_a_second_copy_is_held_until_its_own_remove() -> None:
    ledger, held = fresh(), Held()
    held.take(ledger.apply([stored((1, 2, 3)), stored((1, 2, 3), 1)]))
    held.take(ledger.apply([KvRemoved(hashes_of((1, 2, 3), 2))]))
    assert held.sets() == {Tier.GPU: set(keys_of((1, 2, 3)))}
    held.take(ledger.apply([KvRemoved(hashes_of((1, 2, 3), 2))]))
    assert held.sets() == {Tier.GPU: set(keys_of((1, 2)))}


def test_chunks_of_a_host_tier_that_overlap_are_copies_from_the_first_block_on() -> None:
    ledger, held = fresh(), Held()
    held.take(ledger.apply([stored((1, 2), tier=Tier.CPU), stored((1, 2, 3), tier=Tier.CPU)]))
    held.take(ledger.apply([KvRemoved(hashes_of((1, 2)), Tier.CPU)]))
    assert held.sets() == {Tier.CPU: set(keys_of((1, 2, 3)))}
    held.take(ledger.apply([KvRemoved(hashes_of((1, 2, 3)), Tier.CPU)]))
    assert held.sets() == {}


def test_blocks_that_come_and_go_leave_nothing_behind() -> None:
    ledger, held = fresh(), Held()
    rng = np.random.default_rng(5)
    most = 0
    for _ in range(100):
        hashes = rng.integers(1, 2**64, 300, dtype=np.uint64).tolist()
        tokens = rng.integers(0, 150_000, 300 * SIZE).tolist()
        held.take(ledger.apply([KvStored(hashes, None, tokens, SIZE)]))
        held.take(ledger.apply([KvRemoved([hash]) for hash in hashes]))
        most = max(most, ledger.gauges().blocks)
    assert held.sets() == {}
    assert most < 2_000


def test_sparse_groups_are_not_counted_whatever_they_remove() -> None:
    ledger = fresh()
    window = KvStored(hashes_of((1, 2)), None, tokens_of((1, 2)), SIZE, group=1, kind="sliding_window")
    holes = KvStored(hashes_of((7, 8)), None, tokens_of((7, 8, 9)), SIZE)
    full = stored((1, 2), kind="full_attention")
    removed = KvRemoved(hashes_of((1, 2)), group=1)
    assert said(ledger, window, holes, full, removed) == {Tier.GPU: set(keys_of((1, 2)))}
    assert ledger.gauges().other_groups == 3


def test_only_one_of_several_dense_groups_is_followed() -> None:
    ledger, held = fresh(), Held()
    for group in (3, 4):
        held.take(ledger.apply([stored((1, 2), kind="full_attention", group=group)]))
    held.take(ledger.apply([KvRemoved(hashes_of((1, 2)), group=3)]))
    assert held.sets() == {}


def test_after_a_reset_nothing_of_before_is_held_and_another_block_size_is_taken() -> None:
    ledger = fresh()
    first = ledger.apply([stored((1, 2))])
    assert [change.block_size_tokens for change in first if isinstance(change, Stored)] == [SIZE]
    other = KvStored([1], None, list(range(8)), 8)
    (cleared, again) = ledger.apply([stored((3,)), KvCleared(), other])
    assert cleared == Cleared()
    assert isinstance(again, Stored)
    assert (len(again.keys), again.block_size_tokens) == (8, 8)
    assert ledger.apply([stored((1, 2))]) == []
    assert ledger.gauges().unreadable == 1


def test_b11_a_number_out_of_range_costs_its_own_event_only() -> None:
    ledger = fresh()
    wrong = [
        KvStored([-1], None, tokens_of((1,)), SIZE),
        KvStored([1], 1 << 64, tokens_of((1,)), SIZE),
        KvStored([1], None, [1, 2, 3, -4], SIZE),
        KvStored([1], None, [1, 2, 3, 1 << 32], SIZE, extras=[("image",)]),
    ]
    assert said(ledger, *wrong, stored((1, 2))) == {Tier.GPU: set(keys_of((1, 2)))}
    assert ledger.gauges().unreadable == 4


def test_b3_stores_without_removes_keep_to_the_budget_and_the_newest() -> None:
    ledger, held = fresh(1 << 20), Held()
    rng = np.random.default_rng(5)
    prompts = []
    for _ in range(300):
        hashes = rng.integers(1, 2**63, 1_000).tolist()
        prompts.append(tokens := rng.integers(0, 150_000, 1_000 * SIZE).tolist())
        held.take(ledger.apply([KvStored(hashes, None, tokens, SIZE)]))
        assert ledger.gauges().used_bytes < 1 << 20
    gauges = ledger.gauges()
    assert gauges.let_go > 200_000
    assert len(held.keys[Tier.GPU]) == gauges.blocks
    assert len(held.keys[Tier.GPU]) > 20_000
    for tokens in prompts[-20:]:
        raw = HASHER.hash_tokens(np.array(tokens, "<u4").tobytes(), "m", "", "", SIZE)
        assert set(read_blocks(raw).tolist()) <= held.keys[Tier.GPU]


longer = st.lists(st.integers(1, 3), min_size=1, max_size=12).map(tuple)
busy = st.lists(
    st.tuples(st.sampled_from(["compute"] * 6 + ["offload", "evict", "evict", "drop", "report"]), longer),
    min_size=10,
    max_size=60,
)


@given(busy, st.integers(1, 60), st.sampled_from([1 << 20, 3_000]))
@settings(deadline=None)
def test_many_events_at_once_come_to_what_they_come_to_one_by_one(
    history: list[tuple[str, tuple[int, ...]]], begun: int, max_bytes: int
) -> None:
    engine, ledgers, helds = Engine(), (fresh(max_bytes), fresh(max_bytes)), (Held(), Held())
    events = [event for verb, names in history for event in play(engine, verb, names)]
    begun = min(begun, len(events))
    for ledger, held in zip(ledgers, helds, strict=True):
        held.take(ledger.apply(events[:begun]))
    for event in events[begun:]:
        helds[0].take(ledgers[0].apply([event]))
    helds[1].take(ledgers[1].apply(events[begun:]))
    truth = engine.sets()
    if max_bytes > 3_000:
        assert helds[0].sets() == helds[1].sets() == truth
        assert ledgers[0].gauges() == ledgers[1].gauges()
    for held in helds:
        assert all(keys <= truth.get(tier, set()) for tier, keys in held.sets().items())


def test_events_that_follow_one_another_in_a_batch_are_chained_whatever_their_sizes() -> None:
    names = tuple(number % 7 for number in range(200))
    cuts = [0, 1, 2, 5, 6, 30, 31, 32, 33, 34, 90, 199, 200]
    events: list[KvEvent] = [stored(names[:end], start) for start, end in pairwise(cuts)]
    events.insert(3, stored((8, *names[:20])))
    expected = set(keys_of(names)) | set(keys_of((8, *names[:20])))
    assert said(fresh(), *events) == {Tier.GPU: expected}
    ledger, held = fresh(), Held()
    held.take(ledger.apply([events[0], *reversed(events[1:])]))
    assert held.sets() == {Tier.GPU: expected}
    assert ledger.gauges().orphans == 0


def test_an_event_that_makes_its_own_parent_is_not_believed() -> None:
    ledger = fresh()
    own = KvStored([5, 6], 6, tokens_of((1, 2)), SIZE)
    circle = [KvStored([7], 8, tokens_of((1,)), SIZE), KvStored([8], 7, tokens_of((2,)), SIZE)]
    good = stored(tuple(range(1, 21)))
    assert ledger.apply([own, *circle, good]) == fresh().apply([good])
