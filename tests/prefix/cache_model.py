"""A cache of an engine that announces what it does, for the laws of ledgers and the exact index."""

from collections import Counter, defaultdict

import numpy as np
from hypothesis import strategies as st

from shoal.pool.kvevents import KvCleared, KvEvent, KvRemoved, KvStored, Tier
from shoal.prefix.hashing import read_blocks
from shoal.prefix.ledger import Change, Cleared, Stored
from shoal.prefix.tokens import TokenHasher

HASHER = TokenHasher(7)
SIZE = 4


def tokens_of(names: tuple[int, ...]) -> list[int]:
    """A block of four ids for each name."""
    return [name * 10 + place for name in names for place in range(SIZE)]


def keys_of(names: tuple[int, ...], adapter: str = "", salt: str = "") -> list[int]:
    raw = np.array(tokens_of(names), "<u4").tobytes()
    return read_blocks(HASHER.hash_tokens(raw, "m", adapter, salt, SIZE)).tolist()


def hash_of(names: tuple[int, ...]) -> int:
    """What the engine calls the last block of a chain: nothing that we could compute."""
    return hash(names) & (1 << 64) - 1


def hashes_of(names: tuple[int, ...], start: int = 0) -> list[int]:
    return [hash_of(names[: end + 1]) for end in range(start, len(names))]


def stored(names: tuple[int, ...], start: int = 0, tier: Tier = Tier.GPU, **more: object) -> KvStored:
    """The event for the blocks of a chain from `start` on."""
    parent = hash_of(names[:start]) if start else None
    return KvStored(hashes_of(names, start), parent, tokens_of(names[start:]), SIZE, tier, **more)  # type: ignore[arg-type]


def bare(names: tuple[int, ...], start: int, tier: Tier) -> KvStored:
    return KvStored(hashes_of(names, start), None, [], 0, tier)


class Held:
    """What changes come to."""

    def __init__(self) -> None:
        self.keys: defaultdict[Tier, set[int]] = defaultdict(set)

    def take(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Cleared):
                self.keys.clear()
            elif isinstance(change, Stored):
                self.keys[change.tier].update(read_blocks(change.keys).tolist())
            else:
                self.keys[change.tier].difference_update(read_blocks(change.keys).tolist())

    def sets(self) -> dict[Tier, set[int]]:
        return {tier: keys for tier, keys in self.keys.items() if keys}


class Engine:
    """A cache of chains with copies, which announces what it does."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[Tier, tuple[int, ...]]] = Counter()

    def compute(self, names: tuple[int, ...]) -> list[KvEvent]:
        """Serve a prompt: what is there is used, the rest is computed; its last block always is, as engines do."""
        start = 0
        while start < len(names) - 1 and self.copies[Tier.GPU, names[: start + 1]]:
            start += 1
        if start == 0 and self.copies[Tier.GPU, names[:1]]:
            return []
        for end in range(start, len(names)):
            self.copies[Tier.GPU, names[: end + 1]] += 1
        return [stored(names, start)] if names else []

    def offload(self, names: tuple[int, ...]) -> list[KvEvent]:
        there = [names[:end] for end in range(1, len(names) + 1) if self.copies[Tier.GPU, names[:end]]]
        for chain in there:
            self.copies[Tier.CPU, chain] += 1
        return [KvStored([hash_of(chain) for chain in there], None, [], 0, Tier.CPU)] if there else []

    def evict(self, names: tuple[int, ...], tier: Tier) -> list[KvEvent]:
        """Remove the deepest block of a chain that nothing hangs on."""
        for end in range(len(names), 0, -1):
            if self.copies[tier, names[:end]]:
                self.copies[tier, names[:end]] -= 1
                return [KvRemoved([hash_of(names[:end])], tier)]
        return []

    def reset(self) -> list[KvEvent]:
        self.copies.clear()
        return [KvCleared()]

    def report(self, names: tuple[int, ...]) -> list[KvEvent]:
        """Say again what a request hits, from its first block on."""
        end = 0
        while end < len(names) and self.copies[Tier.GPU, names[: end + 1]]:
            end += 1
        return [stored(names[:end])] if end else []

    def sets(self) -> dict[Tier, set[int]]:
        keys: defaultdict[Tier, set[int]] = defaultdict(set)
        for (tier, names), count in self.copies.items():
            if count:
                keys[tier].add(keys_of(names)[-1])
        return dict(keys)


chains = st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple)
acts = st.lists(
    st.tuples(st.sampled_from(["compute"] * 4 + ["offload", "evict", "evict", "drop", "report", "reset"]), chains),
    max_size=40,
)


def play(engine: Engine, verb: str, names: tuple[int, ...]) -> list[KvEvent]:
    if verb == "evict":
        return engine.evict(names, Tier.GPU)
    if verb == "drop":
        return engine.evict(names, Tier.CPU)
    if verb == "reset":
        return engine.reset()
    return list(getattr(engine, verb)(names))
