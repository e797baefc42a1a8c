"""The answers of the indexes: how much of a prompt is held where, and what a dispatch expects of it.

Values only; `index` and `exact` make them.
"""

from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from shoal.pool.kvevents import Tier
from shoal.prefix.hashing import BLOCK_TOKENS
from shoal.prefix.sets import slots_of

TIERS = tuple(Tier)
"""From the fastest to the slowest; a block on several counts as on the first of them."""

# Up to so many holders the plain way is faster than the one made for many: to add to figures, and to set them.
_FEW = 6
_FEW_SET = 16


class Run(NamedTuple):
    """A stretch of a prompt that some endpoints hold up to its end.  holders: set of slots.  stamp: of its last use."""

    holders: int
    blocks: int
    stamp: int


class Match(NamedTuple):
    """How much of one prompt each endpoint is believed to hold.

    total: blocks of the request.  runs: where the figures come from.  width: slots that were ever open.  keys and rows:
    the hashes of a short prompt and where each lies, -1 for nowhere, for an `add` in the same step; empty for others.
    """

    total: int
    runs: list[Run]
    width: int
    keys: list[int] = []  # noqa: RUF012
    rows: list[int] = []  # noqa: RUF012

    @property
    def blocks(self) -> npt.NDArray[np.int32]:
        """Leading blocks held by each slot, summed over the request's prompts."""
        held = np.zeros(self.width, np.int32)
        for holders, depth, _ in self.runs:
            if holders.bit_count() > _FEW:
                held[slots_of(holders)] += depth
                continue
            while holders:
                low = holders & -holders
                held[low.bit_length() - 1] += depth
                holders ^= low
        return held

    def tokens(self, prompt_tokens: int) -> npt.NDArray[np.float64]:
        """The same in tokens of a prompt that has so many."""
        held = np.zeros(self.width)
        # Single figures are added through this: a fifth of the cost of numpy's indexing.
        cells = cast("memoryview[float]", held.data)
        for holders, depth, _ in self.runs:
            tokens = float(depth * BLOCK_TOKENS)
            if holders.bit_count() > _FEW_SET:
                held[slots_of(holders)] += tokens
                continue
            while holders:
                low = holders & -holders
                cells[low.bit_length() - 1] += tokens
                holders ^= low
        if self.total * BLOCK_TOKENS > prompt_tokens:
            np.minimum(held, float(prompt_tokens), out=held)
        return held

    def held(self, slot: int) -> int:
        """Leading blocks held by one slot."""
        blocks = 0
        for holders, depth, _ in self.runs:
            if holders >> slot & 1:
                blocks += depth
        return blocks


class Expectation(NamedTuple):
    """What a request is sent out with, kept with its booking until the engine says what was cached.

    blocks of total: believed to be cached at `slot`.  age: blocks that came to the endpoint since the deepest of them
    was last used.  epoch: tells a later endpoint in the same slot, or the same one after `clear`, from this one.
    """

    slot: int
    epoch: int
    blocks: int
    total: int
    age: int


Leading = tuple[int, int, int]
"""A stretch of a prompt that the same places hold in the same way: (places, holders, blocks).

places: those that hold it and all before it, as a set with the bit `place * len(TIERS)`.  holders: a bit more for each
tier, and for places that hold this stretch but not all before it.
"""


class ExactMatch:
    """How much of one prompt each publisher of KV events is known to hold.

    total: blocks of the request.  stretches: the prompt as far as any one holds it.  tier_numbers: tiers that
    anything is on, ascending.  place_of: the place of each slot.
    """

    __slots__ = ("_counts", "_held", "place_of", "stretches", "tier_numbers", "total")

    def __init__(
        self, total: int, stretches: list[Leading], tier_numbers: list[int], place_of: npt.NDArray[np.int64]
    ) -> None:
        self.total = total
        self.stretches = stretches
        self.tier_numbers = tier_numbers
        self.place_of = place_of
        self._counts: npt.NDArray[np.int32] | None = None
        self._held: list[int] = []

    def held(self, slot: int) -> int:
        """Leading blocks held by one slot, on any tier."""
        if not self._held:
            self._held = self.blocks.tolist()
        return self._held[slot]

    def by_tier(self, slot: int) -> tuple[int, ...]:
        """Leading blocks held by one slot on each of `TIERS`, each block counted on the fastest that has it."""
        return tuple(self.tiers[:, slot].tolist())

    @property
    def blocks(self) -> npt.NDArray[np.int32]:
        """Leading blocks held by each slot, on any tier."""
        held: npt.NDArray[np.int32] = self.tiers.sum(axis=0, dtype=np.int32)
        return held

    @property
    def tiers(self) -> npt.NDArray[np.int32]:
        """The same on each of `TIERS`: shape (tiers, slots)."""
        if self._counts is None:
            self._counts = self._count().take(self.place_of, axis=1)
        return self._counts

    def _count(self) -> npt.NDArray[np.int32]:
        """Add up where a place begins to hold the prompt on a tier, and where it ends: few do at each stretch."""
        counts = np.zeros((len(TIERS), int(self.place_of.max(initial=0)) + 1), np.int32)
        held = dict.fromkeys(self.tier_numbers, 0)
        depth = 0
        for places, holders, blocks in self.stretches:
            for tier, before in held.items():
                here = holders >> tier & places
                if here != before:
                    if depth:
                        _add(counts, tier, before & ~here, depth)
                        _add(counts, tier, here & ~before, -depth)
                    held[tier] = here
                places ^= here
            depth += blocks
        for tier, here in held.items():
            _add(counts, tier, here, depth)
        return counts


def _add(counts: npt.NDArray[np.int32], tier: int, places: int, blocks: int) -> None:
    """Add to the counts of a set of places on a tier."""
    if places.bit_count() > _FEW:
        counts[tier, slots_of(places) // len(TIERS)] += blocks
        return
    while places:
        low = places & -places
        counts[tier, (low.bit_length() - 1) // len(TIERS)] += blocks
        places ^= low
