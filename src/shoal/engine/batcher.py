"""Continuous batching: which sequences compute how many tokens in the next step.

Follows vLLM's scheduler: running sequences first, then waiting ones in order while the token budget, the
sequence limit and the KV blocks last; a long prefill is cut into chunks; when blocks run out the last running
sequence goes back to the queue and is computed again later.  Owns the queue and who holds which block.
"""

from bisect import insort
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from shoal.engine.cache import KvCache
from shoal.engine.counters import Counters
from shoal.engine.sequences import Sequence


class Plan(NamedTuple):
    """One step: (sequence, new tokens) in order, and the sums that its time depends on (see `StepTime.seconds`).

    load_s: seconds of loading KV from tiers below the GPU.  is_steady: whether the next step is like this one, if no
    sequence ends, nothing happens meanwhile and blocks last.
    """

    work: list[tuple[Sequence, int]]
    tokens: int
    context_tokens: int
    pairs: float
    load_s: float
    is_steady: bool


class Batcher:
    """The queue, the running batch and their KV blocks.

    Sequences run in order of `key`, so the victim of a preemption is always the last one.
    """

    __slots__ = (
        "_block_size",
        "_blocked",
        "_budget_tokens",
        "_cache",
        "_counters",
        "_load_s",
        "_max_loras",
        "_max_seqs",
        "_num_dead",
        "_waiting",
        "num_deferred",
        "pool",
        "running",
    )

    def __init__(
        self, cache: KvCache, counters: Counters, *, block_size: int, max_seqs: int, budget_tokens: int, max_loras: int
    ) -> None:
        self.pool = cache.pool
        self.running: list[Sequence] = []
        self.num_deferred = 0
        self._cache = cache
        self._counters = counters
        self._load_s = 0.0
        self._block_size = block_size
        self._max_seqs = max_seqs
        self._budget_tokens = budget_tokens
        self._max_loras = max_loras
        self._waiting: list[Sequence] = []
        self._num_dead = 0
        self._blocked: tuple[Sequence, int] | None = None

    @property
    def num_waiting(self) -> int:
        """Live sequences in the queue."""
        return len(self._waiting) - self._num_dead

    def waiting(self) -> list[Sequence]:
        """The live sequences of the queue, in no particular order."""
        return [sequence for sequence in self._waiting if sequence.is_live]

    def enqueue(self, sequence: Sequence) -> None:
        """Put a sequence into the queue at the place that its key gives it."""
        heappush(self._waiting, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it is and release its blocks."""
        sequence.is_live = False
        if sequence.is_running:
            self.retire([sequence])
            return
        self._num_dead += 1
        if self._num_dead > 64 and self._num_dead * 2 > len(self._waiting):
            self._waiting = self.waiting()
            heapify(self._waiting)
            self._num_dead = 0

    def retire(self, sequences: list[Sequence]) -> None:
        """Take running sequences out of the batch and release their blocks."""
        for sequence in sequences:
            sequence.is_live = sequence.is_running = False
            self._release(sequence)
        self.running = [sequence for sequence in self.running if sequence.is_running]

    def plan(self, now: float) -> Plan | None:
        """Choose the work of the next step, or None when there is nothing to do."""
        work: list[tuple[Sequence, int]] = []
        self._load_s = 0.0
        budget = self._budget_tokens
        had_preemption = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            count = min(sequence.num_tokens - sequence.computed, budget)
            needed = -(-(sequence.computed + count) // self._block_size) - len(sequence.blocks)
            if needed > 0:
                while needed > self.pool.num_free and sequence.is_running:
                    self._preempt(self.running[-1])
                    had_preemption = True
                if not sequence.is_running:
                    break
                sequence.blocks += self._cache.allocate(needed)
            self._cache.seal(sequence, sequence.computed + count)
            work.append((sequence, count))
            budget -= count
            index += 1
        is_steady = index == len(self.running) and not had_preemption
        if not had_preemption and self._waiting:
            self._admit(work, budget, now)
        return self._sum(work, is_steady and index == len(work)) if work else None

    def _admit(self, work: list[tuple[Sequence, int]], budget: int, now: float) -> None:
        """Move waiting sequences into the batch while everything lasts."""
        deferred: list[Sequence] = []
        adapters = {sequence.adapter for sequence in self.running if sequence.adapter}
        while self._waiting and budget > 0 and len(self.running) < self._max_seqs:
            sequence = self._waiting[0]
            if not sequence.is_live:
                heappop(self._waiting)
                self._num_dead -= 1
                continue
            if sequence.adapter and sequence.adapter not in adapters and len(adapters) >= self._max_loras:
                deferred.append(heappop(self._waiting))
                continue
            count = self._start(sequence, budget, now)
            if count == 0:
                break
            heappop(self._waiting)
            insort(self.running, sequence)
            if sequence.adapter:
                adapters.add(sequence.adapter)
            work.append((sequence, count))
            budget -= count
        for sequence in deferred:
            heappush(self._waiting, sequence)
        self.num_deferred = len(deferred)

    def _start(self, sequence: Sequence, budget: int, now: float) -> int:
        """Give a waiting sequence its cached and its first new blocks; returns its new tokens, 0 when they do not fit.

        At least one prompt token is always computed, or there would be nothing to sample from.
        """
        pool = self.pool
        if self._blocked is not None and self._blocked[0] is sequence and pool.num_free <= self._blocked[1]:
            return 0
        limit = (sequence.num_tokens - 1) // self._block_size
        hits = pool.match(sequence.hashes, limit)
        num_received = min(limit, sequence.received_tokens // self._block_size) - len(hits)
        num_loaded, load_s = (0, 0.0) if num_received > 0 else self._cache.find_below(sequence, len(hits), limit)
        num_loaded = max(num_loaded, num_received)
        cached_tokens = (len(hits) + num_loaded) * self._block_size
        count = min(sequence.num_tokens - cached_tokens, budget)
        needed = -(-(cached_tokens + count) // self._block_size) - len(hits)
        if needed + pool.count_idle(hits) > pool.num_free:
            self._blocked = (sequence, pool.num_free)
            return 0
        self._blocked = None
        if num_loaded and num_received <= 0:
            self._cache.touch(sequence, len(hits), len(hits) + num_loaded)
            self._load_s += load_s
        pool.hold(hits)
        sequence.blocks = hits + self._cache.allocate(needed)
        sequence.sealed = len(hits)
        sequence.computed = cached_tokens
        sequence.received_tokens = 0
        sequence.is_running = True
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = cached_tokens
            sequence.admitted_at = now
            self._count(sequence, cached_tokens, num_loaded * self._block_size)
        self._cache.seal(sequence, cached_tokens + count)
        return count

    def _count(self, sequence: Sequence, cached_tokens: int, loaded_tokens: int) -> None:
        """Count a look-up, once a request; the host tier is asked for what the GPU did not have."""
        sequence.loaded_tokens = loaded_tokens
        counters = self._counters
        counters.prefix_queries += sequence.num_tokens
        counters.prefix_hits += cached_tokens - loaded_tokens
        if self._cache.has_lower:
            counters.external_queries += sequence.num_tokens - cached_tokens + loaded_tokens
            counters.external_hits += loaded_tokens

    def preempt_all(self) -> None:
        """Throw every running sequence back to the queue, between two steps."""
        for sequence in reversed(self.running[:]):
            self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Throw a running sequence back to the queue; what it generated so far is recomputed as prompt."""
        self.running.remove(sequence)
        sequence.is_running = False
        sequence.computed = 0
        sequence.preemptions += 1
        self._release(sequence)
        self._counters.preemptions += 1
        heappush(self._waiting, sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.sealed = 0

    def _sum(self, work: list[tuple[Sequence, int]], is_steady: bool) -> Plan:
        tokens = context_tokens = 0
        pairs = 0.0
        for sequence, count in work:
            tokens += count
            context_tokens += sequence.computed
            pairs += count * (sequence.computed + count / 2)
            is_steady = is_steady and sequence.first_token_at is not None
        is_steady = is_steady and tokens == len(work)
        return Plan(work, tokens, context_tokens, pairs, self._load_s, is_steady)
