"""Blocks that an engine named before we know what they hold: the block before them, or their tokens, are still to come.

Owns the waiting and its bound.  It keeps digests, no tokens; who joins them is `ledger`.
"""

from collections.abc import Iterator
from typing import NamedTuple

BLOCK_BYTES = 350
"""What a waiting block takes: its numbers, its count and their cells."""

_TIER_BITS = 3


class Run(NamedTuple):
    """Blocks in a row whose first one follows a block that is not known."""

    hashes: list[int]
    digests: list[int]


class Orphans:
    """Runs by the hash of their parent, and how often each block was stored meanwhile.

    max_blocks: the oldest are let go beyond it, runs and counts each.
    """

    __slots__ = ("_max_blocks", "_references", "_run_blocks", "_runs", "let_go")

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self.let_go = 0
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._runs: dict[int, list[Run]] = {}
        self._run_blocks = 0
        self._references: dict[int, int] = {}

    def __len__(self) -> int:
        return max(self._run_blocks, len(self._references))

    @property
    def is_waiting(self) -> bool:
        """Whether anything waits."""
        return bool(self._runs or self._references)

    @property
    def used_bytes(self) -> int:
        return len(self) * BLOCK_BYTES

    def wait(self, parent: int, run: Run) -> None:
        """Keep a run until its parent is known."""
        self._runs.setdefault(parent, []).append(run)
        self._run_blocks += len(run.hashes)
        while self._run_blocks > self._max_blocks:
            oldest = next(iter(self._runs))
            runs = self._runs[oldest]
            gone = len(runs.pop(0).hashes)
            if not runs:
                del self._runs[oldest]
            self._run_blocks -= gone
            self.let_go += gone

    def children(self, parent: int) -> list[Run]:
        """Return the runs that wait for this block, and forget them."""
        runs = self._runs.pop(parent, [])
        self._run_blocks -= sum([len(run.hashes) for run in runs])
        return runs

    def hold(self, hash: int, tier: int) -> None:
        """Count that a block was stored on a tier."""
        place = hash << _TIER_BITS | tier
        self._references[place] = self._references.get(place, 0) + 1
        if len(self._references) > self._max_blocks:
            del self._references[next(iter(self._references))]
            self.let_go += 1

    def release(self, hash: int, tier: int) -> bool:
        """Count that a block was removed from a tier; False when it does not wait."""
        place = hash << _TIER_BITS | tier
        count = self._references.get(place, 0)
        if count > 1:
            self._references[place] = count - 1
        elif count:
            del self._references[place]
        return count > 0

    def claim(self, hash: int) -> Iterator[tuple[int, int]]:
        """Return (tier, count) of a block that is known now, and forget them."""
        if self._references:
            for tier in range(1 << _TIER_BITS):
                count = self._references.pop(hash << _TIER_BITS | tier, 0)
                if count:
                    yield tier, count
