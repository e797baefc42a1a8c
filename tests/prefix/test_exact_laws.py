"""Engines, their ledgers and one index together, against what the engines hold; and what real engines published."""

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.pool.kvevents import KvEvent, KvRemoved, KvStored, Tier
from shoal.prefix.exact import ExactIndex
from shoal.prefix.hashing import read_blocks
from shoal.prefix.ledger import Cleared, Ledger, Stored
from shoal.prefix.match import TIERS
from shoal.wire.kvevents import decode, read_frames
from tests.prefix.cache_model import HASHER, Engine, Held, acts, chains, keys_of, play

ENGINES = 3
CUTS = Path(__file__).parents[1] / "wire" / "golden"
HISTORIES = Path(__file__).parent / "golden"


class Pool:
    """Engines that share an index, each with its ledger and its events on the way."""

    def __init__(self, budget_bytes: int) -> None:
        self.index = ExactIndex(budget_bytes)
        self.engines = [Engine() for _ in range(ENGINES)]
        self._slots = [self.index.open_slot() for _ in range(ENGINES)]
        self._ledgers = [Ledger(HASHER, "m", budget_bytes) for _ in range(ENGINES)]
        self._waiting: list[list[KvEvent]] = [[] for _ in range(ENGINES)]

    def act(self, number: int, verb: str, names: tuple[int, ...]) -> None:
        if verb == "restart":
            self.engines[number] = Engine()
            self._ledgers[number] = Ledger(HASHER, "m")
            self._waiting[number] = []
            self.index.clear(self._slots[number])
        else:
            self._waiting[number] += play(self.engines[number], verb, names)

    def deliver(self, number: int) -> None:
        slot = self._slots[number]
        for change in self._ledgers[number].apply(self._waiting[number]):
            if isinstance(change, Cleared):
                self.index.clear(slot)
            elif isinstance(change, Stored):
                self.index.store(slot, read_blocks(change.keys), change.tier)
            else:
                self.index.evict(slot, read_blocks(change.keys), change.tier)
        self._waiting[number] = []

    def held(self, names: tuple[int, ...]) -> list[tuple[int, ...]]:
        match = self.index.match(np.array(keys_of(names), np.uint64))
        return [match.by_tier(slot) for slot in self._slots]

    def truth(self, names: tuple[int, ...]) -> list[tuple[int, ...]]:
        found = []
        for engine in self.engines:
            counts = Counter[Tier]()
            for end in range(1, len(names) + 1):
                tier = next((tier for tier in TIERS if engine.copies[tier, names[:end]]), None)
                if tier is None:
                    break
                counts[tier] += 1
            found.append(tuple(counts[tier] for tier in TIERS))
        return found


numbers = st.integers(0, ENGINES - 1)
histories = st.lists(
    st.tuples(numbers, st.one_of(acts.filter(bool).map(lambda each: each[0]), st.just(("restart", (1,))))), max_size=50
)


def replay(pool: Pool, history: list[tuple[int, tuple[str, tuple[int, ...]]]], deliveries: list[int]) -> None:
    for step, (number, (verb, names)) in enumerate(history):
        pool.act(number, verb, names)
        pool.deliver(deliveries[step % len(deliveries)])
    for number in range(ENGINES):
        pool.deliver(number)


@given(histories, st.lists(numbers, min_size=1, max_size=10), st.lists(chains, min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_within_its_budget_the_index_knows_what_every_engine_holds(
    history: list[tuple[int, tuple[str, tuple[int, ...]]]], deliveries: list[int], asked: list[tuple[int, ...]]
) -> None:
    pool = Pool(1 << 20)
    replay(pool, history, deliveries)
    for names in asked:
        assert pool.held(names) == pool.truth(names)


@given(histories, st.lists(numbers, min_size=1, max_size=10), st.lists(chains, min_size=1, max_size=6))
@settings(deadline=None)
def test_beyond_its_budget_the_index_never_names_more_than_an_engine_holds(
    history: list[tuple[int, tuple[str, tuple[int, ...]]]], deliveries: list[int], asked: list[tuple[int, ...]]
) -> None:
    pool = Pool(1_500)
    replay(pool, history, deliveries)
    for names in asked:
        for said, true in zip(pool.held(names), pool.truth(names), strict=True):
            assert sum(said) <= sum(true)


def captured(name: str) -> Iterator[list[KvEvent]]:
    """The events of each message of a file: a count of frames, then each with its length before it."""
    folder = HISTORIES if (HISTORIES / f"{name}.bin").exists() else CUTS
    data, at = (folder / f"{name}.bin").read_bytes(), 0
    while at < len(data):
        (count,) = struct.unpack_from(">I", data, at)
        at += 4
        frames = []
        for _ in range(count):
            (size,) = struct.unpack_from(">I", data, at)
            frames.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        yield decode(read_frames(frames)[2]).events


@pytest.mark.parametrize(
    "name",
    [
        "vllm-0.32-maps",
        "vllm-0.32-digests-lora",
        "vllm-0.32-offload",
        "sglang-0.5-maps",
        "vllm-0.32-history",
        "vllm-0.32-history-lora",
        "vllm-0.32-history-offload",
    ],
)
def test_what_real_engines_published_comes_to_as_many_blocks_as_they_hold(name: str) -> None:
    ledger, held = Ledger(HASHER, "m"), Held()
    copies: Counter[tuple[Tier, int]] = Counter()
    most = 0
    for events in captured(name):
        for event in events:
            if isinstance(event, KvStored):
                copies.update((event.tier, hash) for hash in event.hashes)
            elif isinstance(event, KvRemoved):
                copies.subtract((event.tier, hash) for hash in event.hashes)
            else:
                copies.clear()
        held.take(ledger.apply(events))
        there = Counter(tier for (tier, _), count in copies.items() if count > 0)
        assert {tier: len(keys) for tier, keys in held.sets().items()} == dict(there)
        most = max(most, there.total())
    assert most > 0
    gauges = ledger.gauges()
    assert (gauges.unreadable, gauges.other_groups, gauges.unknown_removes, gauges.orphans) == (0, 0, 0, 0)


def test_what_an_engine_published_before_we_came_is_not_held_against_it() -> None:
    ledger, held = Ledger(HASHER, "m"), Held()
    for events in captured("vllm-0.32-later"):
        held.take(ledger.apply(events))
    assert ledger.gauges().unknown_removes > 0
    assert held.sets()[Tier.GPU]
