"""How far back an endpoint is believed to remember: its assumed cache size, and what its answers teach of it.

Owns the counts of blocks sent to each endpoint.  Does not know single blocks, rows or sets of them.
"""

from array import array
from bisect import bisect_left
from typing import Annotated

import msgspec
import numpy as np

from shoal.kernel import InvalidInput
from shoal.prefix.hashing import BLOCK_TOKENS
from shoal.prefix.sets import mask_of, slots_of

UNLIMITED = 1 << 62
_GENEROSITY = 1.5
_MARKS = 32
_FINENESS = 16
_SMALLEST = 16
_FLOOR_UNKNOWN = 512
_FLOOR_PART = 4
_STEP = 8
_FEW = 6


def capacity_blocks(num_blocks: int, block_size_tokens: int) -> int:
    """Return the capacity to assume for an engine with that KV geometry, in blocks of this index.

    Half as much again as the engine says: a prefix assumed to be there and gone costs one late prefill, one assumed
    gone and there costs a prefill on another endpoint and the copy there.
    """
    return max(_SMALLEST, int(num_blocks * block_size_tokens / BLOCK_TOKENS * _GENEROSITY))


_Count = Annotated[int, msgspec.Meta(ge=0, le=UNLIMITED)]


class HorizonState(msgspec.Struct, frozen=True, array_like=True):
    """All that is known of one endpoint's memory, for another router.  marks: (clock, blocks until then)."""

    stamp: _Count = 0
    total: _Count = 0
    capacity: _Count = UNLIMITED
    limit: _Count = UNLIMITED
    spacing: Annotated[int, msgspec.Meta(ge=1, le=UNLIMITED)] = _SMALLEST
    marks: Annotated[tuple[tuple[_Count, _Count], ...], msgspec.Meta(max_length=2 * _MARKS)] = ()


class Horizon:
    """An endpoint's horizon: what was last used before `stamp` has been evicted there.

    With least-recently-used eviction a block is gone for certain once `capacity` blocks that were not there came
    after its last use.  So the clock at which that many were still to come is the horizon; it is remembered at a few
    marks, not per block.
    """

    __slots__ = (
        "_capacity",
        "_clocks",
        "_floor",
        "_shortfalls",
        "_spacing",
        "_totals",
        "epoch",
        "limit",
        "stamp",
        "total",
    )

    def __init__(self, stamp: int, epoch: int) -> None:
        self.stamp = stamp
        self.epoch = epoch
        self.total = 0
        self._clocks = array("q")
        self._totals = array("q")
        self._spacing = _SMALLEST
        self._shortfalls = 0
        self.limit = self._capacity = UNLIMITED
        self._floor = _FLOOR_UNKNOWN

    @property
    def capacity(self) -> int:
        """Blocks assumed to fit now, at most the limit; UNLIMITED when nothing is known."""
        return self._capacity

    def set_limit(self, blocks: int | None) -> None:
        """Set what the endpoint can hold at most; None when unknown.  What was learnt stays where it is smaller.

        Learning never goes below a quarter of it: too small an estimate costs more than one too large.
        """
        limit = UNLIMITED if blocks is None else max(blocks, _SMALLEST)
        self._floor = _FLOOR_UNKNOWN if limit == UNLIMITED else limit // _FLOOR_PART
        self._capacity = limit if self._capacity == self.limit else min(max(self._capacity, self._floor), limit)
        self.limit = limit

    def advance(self, clock: int, blocks: int) -> None:
        """Count `blocks` that came to the endpoint at `clock` and were not there."""
        self.total += blocks
        if self.total - (self._totals[-1] if self._totals else 0) >= min(self._spacing, self._capacity // _FINENESS):
            self._clocks.append(clock)
            self._totals.append(self.total)
            if len(self._totals) > _MARKS:
                self._spacing *= 2
                del self._clocks[:-1:2], self._totals[:-1:2]
        while self._totals and self._totals[0] <= self.total - self._capacity:
            self.stamp = self._clocks.pop(0) + 1
            self._totals.pop(0)

    def state(self) -> HorizonState:
        """Return all that is known, for another router."""
        marks = tuple(zip(self._clocks.tolist(), self._totals.tolist(), strict=True))
        return HorizonState(self.stamp, self.total, self._capacity, self.limit, self._spacing, marks)

    def take(self, state: HorizonState) -> None:
        """Go on from what another router knew; a limit that is known here stays.  Raises InvalidInput."""
        clocks, totals = [clock for clock, _ in state.marks], [total for _, total in state.marks]
        if clocks != sorted(clocks) or totals != sorted(totals) or (totals and totals[-1] > state.total):
            raise InvalidInput("the marks of a handed-over horizon go back")
        self.stamp, self.total, self._spacing = state.stamp, state.total, state.spacing
        self._clocks, self._totals = array("q", clocks), array("q", totals)
        if self.limit == UNLIMITED and state.limit != UNLIMITED:
            self.set_limit(state.limit)
        self._capacity = min(max(state.capacity, self._floor), self.limit)

    def age(self, stamp: int) -> int:
        """Return how many blocks came after `stamp`, rounded down to the next mark."""
        mark = bisect_left(self._clocks, stamp)
        return self.total - self._totals[mark] if mark < len(self._totals) else 0

    def learn(self, expected: int, cached: int, age: int) -> bool:
        """Correct the assumed capacity by one answer; all in blocks.  Return whether clearly less was cached.

        The reasons stand at `EstimatedIndex.correct`.
        """
        believed = min(self._capacity, self.total)
        if cached < expected * 3 // 4 - 1:
            age += min(self._spacing, self._capacity // _FINENESS)
            if believed // _STEP <= age < believed:
                self._shortfalls += 1
                if self._shortfalls > 1:
                    self._capacity = max(self._floor, believed - (believed - age) // _STEP)
            return True
        if cached > expected * 5 // 4 + 2:
            self._shortfalls = 0
            self._capacity = min(self.limit, self._capacity + self._capacity // 10)
        elif age >= believed // _STEP:
            self._shortfalls = 0
            if age >= believed // 2:
                self._capacity = min(self.limit, self._capacity + self._capacity // 50)
        return False


class Horizons:
    """The horizon of every slot.  latest: the latest of them; what was used since is believed of every holder."""

    __slots__ = ("_epoch", "_slots", "_stamps", "latest")

    def __init__(self) -> None:
        self._slots: list[Horizon] = []
        self._stamps = np.zeros(64, np.int64)
        self._epoch = 0
        self.latest = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, slot: int) -> Horizon:
        return self._slots[slot]

    def open(self) -> int:
        """Append a slot and return its number."""
        slot = len(self._slots)
        if slot >= len(self._stamps):
            self._stamps = np.concatenate((self._stamps, np.zeros(slot, np.int64)))
        self._slots.append(Horizon(0, self._epoch))
        return slot

    def reset(self, slot: int, stamp: int, limit: int) -> None:
        """Begin anew with a slot: nothing from before `stamp` is believed of it."""
        self._epoch += 1
        self._slots[slot] = Horizon(stamp, self._epoch)
        self._slots[slot].set_limit(limit)
        self._move(slot)

    def take(self, slot: int, state: HorizonState) -> None:
        """Go on with a slot from what another router knew.  Raises InvalidInput."""
        self._slots[slot].take(state)
        self._move(slot)

    def later_than(self, clock: int) -> int:
        """Return the set of slots that are believed to hold nothing from `clock` or before."""
        slots = np.flatnonzero(self._stamps[: len(self._slots)] > clock)
        return mask_of(slots, int(slots[-1]) + 1) if len(slots) else 0

    def advance(self, slot: int, clock: int, blocks: int) -> None:
        """Count `blocks` that came to `slot` at `clock` and were not there."""
        horizon = self._slots[slot]
        before = horizon.stamp
        horizon.advance(clock, blocks)
        if horizon.stamp != before:
            self._move(slot)

    def believed(self, holders: int, stamp: int) -> int:
        """Return those of the set `holders` that still hold what was last used at `stamp`."""
        if stamp >= self.latest:
            return holders
        if holders.bit_count() > _FEW:
            slots = slots_of(holders)
            return mask_of(slots[self._stamps[slots] <= stamp], len(self._slots))
        rest = holders
        while rest:
            low = rest & -rest
            if self._slots[low.bit_length() - 1].stamp > stamp:
                holders ^= low
            rest ^= low
        return holders

    def _move(self, slot: int) -> None:
        stamp = self._slots[slot].stamp
        self._stamps[slot] = stamp
        self.latest = max(self.latest, stamp)
