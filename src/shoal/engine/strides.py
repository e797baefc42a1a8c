"""Strides: decode steps that follow each other with nothing between them, taken at once.

While nobody comes, goes or is thrown back, every step computes one token of each running sequence, so the times of many
steps are one array operation.  Owns how far such a run of steps reaches and what it changes; the result is the same, to
the last bit, as of taking its steps one by one.
"""

from bisect import bisect_right

from shoal.engine.batcher import Plan
from shoal.engine.cache import KvCache
from shoal.engine.sequences import Sequence

MAX_STEPS = 1024
"""Steps of one stride; bounds what an event in the middle of it throws away."""


class Stride:
    """Steps of one steady plan, from `start` on.  ends: when each of them ends.  work: the sequences."""

    __slots__ = ("_block_size", "_cache", "ends", "start", "work")

    def __init__(self, plan: Plan, cache: KvCache, block_size: int, start: float, ends: list[float]) -> None:
        self.start = start
        self.ends = ends
        self.work = [sequence for sequence, _ in plan.work]
        self._cache = cache
        self._block_size = block_size

    def apply(self, now: float) -> tuple[int, float, float]:
        """Apply the steps that have ended by `now`, but never the last one.

        Returns how many they are, and when the step after them begins and ends; its blocks are allocated.
        """
        steps = self._count(now)
        if not steps:
            return 0, self.start, self.ends[0]
        _keep(self.work, self._cache, self._block_size, steps)
        for sequence in self.work:
            sequence.computed += steps
            sequence.num_tokens += steps
        return steps, self.ends[steps - 1], self.ends[steps]

    def count_blocks(self, now: float) -> int:
        """How many blocks the steps that have begun by `now` took, the first step's not counted."""
        steps, size = self._count(now), self._block_size
        return sum(max(0, (each.computed + steps) // size + 1 - len(each.blocks)) for each in self.work)

    def _count(self, now: float) -> int:
        return bisect_right(self.ends, now, 0, len(self.ends) - 1)


def reach(plan: Plan, cache: KvCache, block_size: int) -> int:
    """How many steps like `plan`, itself included, follow each other until a sequence ends or KV blocks run out.

    Where changes of the cache are told, no step of a stride makes any, since they are told at the end of their step.
    """
    if cache.log:
        return 1
    work = plan.work
    steps = min(MAX_STEPS, min(each.output_tokens + each.prompt_tokens - each.num_tokens for each, _ in work))
    free = cache.pool.num_free
    if cache.log is None and len(work) * (steps // block_size + 1) <= free:
        return steps
    first = [len(each.blocks) * block_size - each.computed for each, _ in work]
    if cache.log is not None:
        return min(steps, *first, *(_first_seal(each, block_size) for each, _ in work))
    wanted = sorted(at for each in first for at in range(each, steps, block_size))
    return steps if len(wanted) <= free else wanted[free]


def _first_seal(sequence: Sequence, block_size: int) -> int:
    """At which step from now a block becomes full and gets findable."""
    if sequence.sealed >= len(sequence.hashes):
        return MAX_STEPS
    return block_size - 1 - sequence.computed % block_size or block_size


def _keep(work: list[Sequence], cache: KvCache, block_size: int, steps: int) -> None:
    """Give the sequences the blocks of the next `steps` steps and seal full ones, as single steps would."""
    wanted: list[tuple[int, int]] = []
    sealing: list[tuple[int, int]] = []
    for place, sequence in enumerate(work):
        # A block is full one step before the next one is wanted.
        first = len(sequence.blocks) * block_size - sequence.computed
        if first > steps + 1:
            continue
        wanted += [(at, place) for at in range(first, steps + 1, block_size)]
        if sequence.sealed < len(sequence.hashes):
            sealing.append((first - 1, place))
    hashes: list[int] = []
    for _, place in sealing:
        sequence = work[place]
        hashes += sequence.hashes[sequence.sealed : (sequence.computed + steps + 1) // block_size]
    if not hashes or cache.may_seal_last(hashes):
        wanted.sort()
        for (_, place), block in zip(wanted, cache.allocate(len(wanted)), strict=True):
            work[place].blocks.append(block)
        for _, place in sealing:
            cache.seal(work[place], work[place].computed + steps + 1)
        return
    sealed = [(at, place) for first, place in sealing for at in range(first, steps + 1, block_size)]
    for at, place in sorted(wanted + sealed):
        sequence = work[place]
        computed = sequence.computed + at
        if computed == len(sequence.blocks) * block_size:
            sequence.blocks += cache.allocate(1)
        cache.seal(sequence, computed + 1)
