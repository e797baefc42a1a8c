"""An engine in the large: what `Engine` does for thousands of them, at a cost per request and not per step.

All that decode share each step alike, so one count of steps stands for the progress of every one of them, and the time
of many steps is a sum in closed form.  Prefills go through in chunks, oldest first.  The KV cache is kept in runs of
blocks, and the room that answers take as one sum.  Left out: LoRA limits, priorities, pauses and the host tier.  Owns
the approximation; the bar `twin.aggregate-error` says how far it is from single steps.
"""

from collections import deque
from heapq import heappop, heappush

from shoal.engine.changes import CacheChanged, ChangeLog
from shoal.engine.commands import Command, Finish, Refuse
from shoal.engine.config import EngineConfig
from shoal.engine.counters import Counters
from shoal.engine.events import Aborted, Event, PaceChanged, Submitted, Ticked
from shoal.engine.segments import Segment, SegmentCache
from shoal.engine.steptime import Pace, StepTime
from shoal.kernel import ClockWentBack


class _Member:
    """A live request.  prompt: tokens to compute before the next one is sampled, what was generated before a preemption
    included.  left: those of them that are missing.  done: tokens generated, as of `joined`, the step at which it began
    to decode.  own: tokens in blocks that nobody else can find.  received: tokens that another engine sent."""

    __slots__ = (
        "admitted_at", "arrived_at", "cached", "done", "event", "first_token_at", "hashes", "is_decoding", "is_live",
        "joined", "left", "number", "own", "preemptions", "prompt", "received", "segment",
    )  # fmt: skip

    def __init__(self, event: Submitted, number: int, now: float, block_size: int) -> None:
        self.event = event
        self.number = number
        self.arrived_at = now
        self.hashes = event.block_hashes[: event.prompt_tokens // block_size]
        self.prompt = event.prompt_tokens
        self.received = event.received_tokens
        self.cached = -1
        self.left = self.done = self.joined = self.own = self.preemptions = 0
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.segment: Segment | None = None
        self.is_decoding = False
        self.is_live = True


_Ending = tuple[int, int, int, _Member]
"""The step with which an answer ends, the number of its request, and the step at which it began to decode."""


class AggregateEngine:
    """A `kernel.Machine` that approximates `Engine`; it knows the events of requests and `PaceChanged`.

    `deadline()` is the end of the phase in progress: one step while anybody prefills, else all steps until an answer
    ends.  An event costs O(log of the sequences), and O(new blocks) of a prompt.
    """

    __slots__ = (
        "_begin_s", "_budget_tokens", "_cache", "_context_tokens", "_decoding", "_end_s", "_ending", "_last_now",
        "_log", "_max_seqs", "_members", "_number", "_own_tokens", "_pace", "_prefilling", "_running", "_slow_factor",
        "_step_time", "_steps", "_steps_done", "_waiting", "_work", "block_size", "counters", "num_blocks",
    )  # fmt: skip

    def __init__(self, config: EngineConfig) -> None:
        profile = config.profile
        self.num_blocks = config.num_blocks or profile.num_blocks
        self.block_size = config.block_size or profile.block_size
        self.counters = Counters()
        self._step_time = StepTime(profile, config.speculation)
        self._max_seqs = config.max_num_seqs or profile.max_num_seqs
        self._budget_tokens = config.max_num_batched_tokens or profile.max_num_batched_tokens
        self._slow_factor = config.slow_factor
        self._cache = SegmentCache(self.num_blocks)
        self._log = ChangeLog(self.block_size) if config.has_cache_events else None
        self._cache.evicted = [] if config.has_cache_events else None
        self._members: dict[str, _Member] = {}
        self._waiting: deque[_Member] = deque()
        self._running: dict[int, _Member] = {}
        self._prefilling: list[_Member] = []
        self._work: list[tuple[_Member, int]] = []
        self._ending: list[_Ending] = []
        self._number = self._decoding = self._context_tokens = self._own_tokens = 0
        self._steps = self._steps_done = 0
        self._pace = Pace(1.0, 0.0)
        self._begin_s = self._end_s = 0.0
        self._last_now = float("-inf")

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._members) - len(self._running)

    def usage_ratio(self, now: float) -> float:
        """Return the share of KV blocks that requests hold at `now`, 0 to 1."""
        grown = self._decoding * self._ended_by(now) / self.block_size
        return min(1.0, 1.0 - (self._cache.room - grown) / self.num_blocks)

    def deadline(self) -> float | None:
        """Return the end of the phase in progress; None when idle."""
        return self._end_s if self._steps else None

    def has_begun(self, request_id: str) -> bool:
        """Whether a request has its first token, or is not here."""
        member = self._members.get(request_id)
        return member is None or member.first_token_at is not None

    def held_tokens(self, hashes: tuple[int, ...]) -> int:
        """Return how many tokens from the beginning of blocks with these hashes are in the cache."""
        return self._cache.match(hashes) * self.block_size

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply `event` at `now` and return what the host must do.  Raises ClockWentBack; other events do nothing."""
        if now < self._last_now:
            raise ClockWentBack(now, self._last_now)
        self._last_now = now
        match event:
            case Ticked() if self._steps and now >= self._end_s:
                commands = self._complete()
                self._begin(self._end_s)
                return commands
            case Submitted():
                return self._submit(event, now)
            case Aborted():
                return self._abort(event.request_id, now)
            case PaceChanged():
                self._shorten(now)
                self._slow_factor = event.slow_factor
        return []

    # ------------------------------------------------------------------ who comes and goes

    def _submit(self, event: Submitted, now: float) -> list[Command]:
        capacity = self.num_blocks * self.block_size
        total = event.prompt_tokens + max(event.output_tokens - 1, 0)
        if event.prompt_tokens < 1 or total > capacity or event.request_id in self._members:
            message = f"{event.prompt_tokens} prompt and {event.output_tokens} output tokens do not fit {capacity}"
            return [Refuse(request_id=event.request_id, message=message)]
        self._number += 1
        member = _Member(event, self._number, now, self.block_size)
        self._members[event.request_id] = member
        self._waiting.append(member)
        if not self._steps:
            self._begin(now)
        elif len(self._running) < self._max_seqs:
            self._shorten(now)
        return []

    def _abort(self, request_id: str, now: float) -> list[Command]:
        member = self._members.get(request_id)
        if member is None:
            return []
        self._shorten(now)
        return [self._leave(member, "abort", now)]

    def _leave(self, member: _Member, reason: str, now: float) -> Finish:
        """A request is over, wherever it is."""
        event = member.event
        del self._members[event.request_id]
        member.is_live = False
        if member.number in self._running:
            self._stop(member)
        return Finish(
            request_id=event.request_id,
            reason=reason,
            prompt_tokens=event.prompt_tokens,
            output_tokens=member.done,
            cached_tokens=max(member.cached, 0),
            preemptions=member.preemptions,
            arrived_at=member.arrived_at,
            admitted_at=member.admitted_at,
            first_token_at=member.first_token_at,
            finished_at=now,
        )

    def _stop(self, member: _Member) -> None:
        """Take a running request out of the batch; its blocks stay while there is room."""
        del self._running[member.number]
        if member.is_decoding:
            generated = self._steps_done - member.joined
            member.done += generated
            member.own += generated
            self._decoding -= 1
            self._context_tokens -= member.prompt + generated
            member.is_decoding = False
        elif member in self._prefilling:
            self._prefilling.remove(member)
        cache, size = self._cache, self.block_size
        self._own_tokens -= member.own
        cache.private = self._own_tokens / size
        # The last token was sampled and is in no block yet.
        computed = member.event.prompt_tokens + max(member.done - 1, 0)
        full = member.event.block_hashes[: computed // size]
        if len(full) > len(member.hashes):
            cache.release(self._hold(member, full, cache.match(full, len(member.hashes))), 0)
        cache.release(member.segment, max(0, -(-computed // size) - max(len(full), len(member.hashes))))
        member.segment = None

    def _hold(self, member: _Member, hashes: tuple[int, ...], hits: int) -> Segment | None:
        """Hold blocks, of which the first `hits` are in the cache, and note what that changes."""
        last = self._cache.hold(hashes, hits)
        if self._log is not None:
            self._note_evicted()
            event = member.event
            self._log.store_positions(hashes, range(hits, len(hashes)), event.tokens, event.adapter, event.cache_salt)
        return last

    def _preempt(self) -> None:
        """Throw the last running request back to the queue; what it generated is computed again as prompt."""
        member = self._running[max(self._running)]
        self._stop(member)
        member.prompt = member.event.prompt_tokens + member.done
        member.hashes = member.event.block_hashes[: member.prompt // self.block_size]
        member.preemptions += 1
        self.counters.preemptions += 1
        self._waiting.appendleft(member)

    # ------------------------------------------------------------------ phases

    def _begin(self, start: float) -> None:
        """Start the next phase at `start`, or go idle."""
        size = self.block_size
        preemptions = self.counters.preemptions
        while len(self._running) > 1 and self._cache.room * size < self._decoding:
            self._preempt()
        has_preempted = self.counters.preemptions > preemptions
        budget = self._budget_tokens - self._decoding
        work = self._work = []
        for member in self._prefilling:
            count = min(member.left, budget)
            if count > 0:
                work.append((member, count))
                budget -= count
        # Nobody is admitted in a step that threw somebody back, who would be the first one.
        while not has_preempted and self._waiting and budget > 0 and len(self._running) < self._max_seqs:
            member = self._waiting[0]
            if member.is_live and not self._admit(member, start):
                break
            self._waiting.popleft()
            if member.is_live:
                count = min(member.left, budget)
                work.append((member, count))
                budget -= count
        self._begin_s = start
        if work:
            self._steps = 1
            step_s = self._mixed_s(work)
        elif self._decoding:
            self._steps = 1 if has_preempted else self._steps_left()
            self._pace = self._step_time.pace(sequences=self._decoding, context_tokens=self._context_tokens)
            step_s = self._pace.total_s(self._steps)
        else:
            self._steps = 0
            return
        self._end_s = start + self._slow_factor * step_s

    def _admit(self, member: _Member, now: float) -> bool:
        """Give a waiting request its blocks if they are there."""
        cache, size = self._cache, self.block_size
        hits = cache.match(member.hashes)
        # Of the last block of a request half is empty on average.
        own = member.prompt - len(member.hashes) * size + size // 2
        needed = len(member.hashes) - hits + cache.idle_of(member.hashes, hits) + own / size
        if self._running and needed > cache.room:
            return False
        member.own = own
        self._own_tokens += member.own
        cache.private = self._own_tokens / size
        member.segment = self._hold(member, member.hashes, hits)
        # What another engine sent is there once; if the request is thrown back it is computed.
        received, member.received = member.received, 0
        cached = min(max(hits, received // size), (member.prompt - 1) // size) * size
        member.left = member.prompt - cached
        self._running[member.number] = member
        self._prefilling.append(member)
        if member.cached < 0:
            member.cached = cached
            member.admitted_at = now
            self.counters.prefix_queries += member.prompt
            self.counters.prefix_hits += min(cached, hits * size)
        return True

    def _mixed_s(self, work: list[tuple[_Member, int]]) -> float:
        tokens, context_tokens = self._decoding, self._context_tokens
        pairs = context_tokens + self._decoding / 2
        for member, count in work:
            computed = member.prompt - member.left
            tokens += count
            context_tokens += computed
            pairs += count * (computed + count / 2)
        sequences = self._decoding + len(work)
        return self._step_time.seconds(sequences=sequences, tokens=tokens, context_tokens=context_tokens, pairs=pairs)

    def _steps_left(self) -> int:
        """Steps until an answer ends or blocks run out."""
        ending = self._ending
        while not self._is_ending(ending[0]):
            heappop(ending)
        room_tokens = int(self._cache.room * self.block_size)
        return max(1, min(ending[0][0] - self._steps_done, room_tokens // self._decoding))

    @staticmethod
    def _is_ending(entry: _Ending) -> bool:
        """Whether an entry still holds: its request may be gone, or have been thrown back since."""
        _, _, joined, member = entry
        return member.is_decoding and joined == member.joined

    def _ended_by(self, now: float) -> int:
        """Steps of the phase that have ended by `now`, the last one not counted."""
        if self._steps <= 1:
            return 0
        return min(int(self._pace.steps_within((now - self._begin_s) / self._slow_factor)), self._steps - 1)

    def _shorten(self, now: float) -> None:
        """Something happens: book the steps that have ended, and keep the one in progress."""
        if self._steps > 1:
            ended, begin_s = self._ended_by(now), self._begin_s
            self._begin_s = min(now, begin_s + self._slow_factor * self._pace.total_s(ended))
            self._end_s = max(now, begin_s + self._slow_factor * self._pace.total_s(ended + 1))
            self._book(ended)
            self._steps = 1

    def _book(self, steps: int) -> None:
        """So many steps are over: each gave all that decode one token."""
        tokens = steps * self._decoding
        self._steps_done += steps
        self._context_tokens += tokens
        self._own_tokens += tokens
        self._cache.private = self._own_tokens / self.block_size
        self._cache.make_room()
        self.counters.steps += steps
        self.counters.generation += tokens

    def _complete(self) -> list[Command]:
        """The phase is over: prefills went on, answers began, others end."""
        self._book(self._steps)
        self.counters.busy_s += self._end_s - self._begin_s
        done: list[_Member] = []
        for member, count in self._work:
            if member.is_live and member.number in self._running:
                member.left -= count
                if not member.left:
                    self._prefilling.remove(member)
                    self._sample(member, done)
        ending = self._ending
        while ending and (ending[0][0] <= self._steps_done or not self._is_ending(ending[0])):
            entry = heappop(ending)
            if self._is_ending(entry):
                done.append(entry[3])
        done.sort(key=lambda each: each.number)
        finished = [
            self._leave(
                each, "length" if each.event.output_tokens >= each.event.max_tokens > 0 else "stop", self._end_s
            )
            for each in done
        ]
        return [*self._tell_changes(), *finished]

    def _sample(self, member: _Member, done: list[_Member]) -> None:
        """A prefill is complete, so a token is sampled."""
        event, counters = member.event, self.counters
        if member.first_token_at is None:
            member.first_token_at = self._end_s
            counters.prompt += event.prompt_tokens
            counters.cached += member.cached
        if event.output_tokens:
            member.done += 1
            counters.generation += 1
        if member.done >= event.output_tokens:
            done.append(member)
            return
        member.is_decoding = True
        member.joined = self._steps_done
        self._decoding += 1
        self._context_tokens += member.prompt
        at = self._steps_done + event.output_tokens - member.done
        heappush(self._ending, (at, member.number, self._steps_done, member))

    def _tell_changes(self) -> list[Command]:
        if self._log is None:
            return []
        self._note_evicted()
        changes = self._log.take()
        return [CacheChanged(changes)] if changes else []

    def _note_evicted(self) -> None:
        if self._log is not None and self._cache.evicted:
            for block_hash in self._cache.evicted:
                self._log.remove(block_hash)
            self._cache.evicted.clear()
