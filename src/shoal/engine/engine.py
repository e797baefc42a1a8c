"""The engine as a machine: requests in, tokens out, one step after the other.

Owns the clock of steps and the counters; what runs in a step is the batcher's choice, how long it takes is
`steptime`'s.
"""

import msgspec

from shoal.engine.batcher import Batcher, Plan
from shoal.engine.blocks import BlockPool
from shoal.engine.commands import Command, ConfirmReset, Emit, Finish, Refuse
from shoal.engine.counters import Counters
from shoal.engine.events import Aborted, CacheReset, Event, PaceChanged, Submitted, Ticked
from shoal.engine.profiles import TINY, Profile
from shoal.engine.sequences import Sequence
from shoal.engine.steptime import StepTime
from shoal.kernel import ClockWentBack


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is; 0 means the profile's own value."""

    profile: Profile = TINY
    num_blocks: int = 0
    """KV blocks."""
    block_size: int = 0
    """Tokens a block."""
    max_num_seqs: int = 0
    """Sequences in one step."""
    max_num_batched_tokens: int = 0
    """New tokens in one step."""
    max_loras: int = 4
    """Different adapters in one step; requests for further ones are deferred."""
    is_priority_scheduling: bool = False
    """Whether a lower `priority` goes first; else first come, first served."""
    slow_factor: float = 1.0
    """Multiplies every step's time."""
    max_lag_s: float = 0.05
    """A late tick starts the next step where the last one ended, so lateness of timers does not add up; past
    this lag the lost time is lost."""


class Engine:
    """A `kernel.Machine` that models one inference engine.

    `deadline()` is the end of the step in progress.  A step costs O(sequences in it).
    """

    __slots__ = (
        "_batcher",
        "_config",
        "_end",
        "_last_now",
        "_last_submitted",
        "_number",
        "_plan",
        "_sequences",
        "_slow_factor",
        "_step_s",
        "_step_time",
        "block_size",
        "counters",
        "max_loras",
        "num_blocks",
    )

    def __init__(self, config: EngineConfig) -> None:
        profile = config.profile
        self.num_blocks = config.num_blocks or profile.num_blocks
        self.block_size = config.block_size or profile.block_size
        self.max_loras = config.max_loras
        self.counters = Counters()
        self._config = config
        self._batcher = Batcher(
            BlockPool(self.num_blocks),
            self.counters,
            block_size=self.block_size,
            max_seqs=config.max_num_seqs or profile.max_num_seqs,
            budget_tokens=config.max_num_batched_tokens or profile.max_num_batched_tokens,
            max_loras=config.max_loras,
        )
        self._step_time = StepTime(profile)
        self._slow_factor = config.slow_factor
        self._sequences: dict[str, Sequence] = {}
        self._number = 0
        self._plan: Plan | None = None
        self._step_s = 0.0
        self._end = 0.0
        self._last_now = float("-inf")
        self._last_submitted = float("-inf")

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply `event` at `now` and return what the host must do.  Raises ClockWentBack."""
        if now < self._last_now:
            raise ClockWentBack(now, self._last_now)
        self._last_now = now
        match event:
            case Ticked():
                return self._tick(now)
            case Submitted():
                return self._submit(event, now)
            case Aborted():
                return self._abort(event.request_id, now)
            case CacheReset():
                return [ConfirmReset(is_done=self._batcher.pool.reset())]
            case PaceChanged():
                self._slow_factor = event.slow_factor
        return []

    def deadline(self) -> float | None:
        """Return the end of the step in progress, None when the engine is idle."""
        return self._end if self._plan is not None else None

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._batcher.running)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, deferred ones included."""
        return self._batcher.num_waiting

    @property
    def num_deferred(self) -> int:
        """Those of the queue that only an adapter slot keeps waiting, as of the last step's start."""
        return min(self._batcher.num_deferred, self._batcher.num_waiting)

    @property
    def pool(self) -> BlockPool:
        """The KV cache, to be read only.  `pool.usage_ratio` counts blocks of running requests, as vLLM does."""
        return self._batcher.pool

    def adapters(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the LoRA names of the running and of the waiting sequences, each sorted."""
        running = {sequence.adapter for sequence in self._batcher.running if sequence.adapter}
        waiting = {sequence.adapter for sequence in self._batcher.waiting() if sequence.adapter}
        return tuple(sorted(running)), tuple(sorted(waiting))

    def _submit(self, event: Submitted, now: float) -> list[Command]:
        capacity = self.num_blocks * self.block_size
        total = event.prompt_tokens + max(event.output_tokens - 1, 0)
        if event.prompt_tokens < 1 or total > capacity:
            message = f"{event.prompt_tokens} prompt and {event.output_tokens} output tokens do not fit {capacity}"
            return [Refuse(request_id=event.request_id, message=message)]
        if event.request_id in self._sequences:
            return [Refuse(request_id=event.request_id, message=f"request id {event.request_id} is in use")]
        self._number += 1
        priority = event.priority if self._config.is_priority_scheduling else 0
        sequence = Sequence(event, (priority, self._number), now)
        self._sequences[event.request_id] = sequence
        self._batcher.enqueue(sequence)
        self._last_submitted = now
        if self._plan is None:
            self._begin(now)
        return []

    def _abort(self, request_id: str, now: float) -> list[Command]:
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return []
        self._batcher.remove(sequence)
        return [sequence.finish("abort", now)]

    def _tick(self, now: float) -> list[Command]:
        plan = self._plan
        if plan is None or now < self._end:
            return []
        commands = self._complete(plan, self._end)
        is_late = now - self._end > self._config.max_lag_s
        self._begin(now if is_late else max(self._end, min(now, self._last_submitted)))
        return commands

    def _begin(self, start: float) -> None:
        """Start the next step at `start`, or go idle."""
        plan = self._plan = self._batcher.plan(start)
        if plan is None:
            return
        self._step_s = self._slow_factor * self._step_time.seconds(
            sequences=len(plan.work), tokens=plan.tokens, context_tokens=plan.context_tokens, pairs=plan.pairs
        )
        self._end = start + self._step_s

    def _complete(self, plan: Plan, end: float) -> list[Command]:
        """Book what the step computed: prefill goes on, or a token is sampled, or the request is done."""
        counters = self.counters
        counters.steps += 1
        counters.busy_s += self._step_s
        tokens: list[tuple[str, int]] = []
        done: list[Sequence] = []
        for sequence, count in plan.work:
            if not sequence.is_live:
                continue
            sequence.computed += count
            if sequence.computed < sequence.num_tokens:
                continue
            if sequence.first_token_at is None:
                sequence.first_token_at = end
                counters.prompt += sequence.prompt_tokens
                counters.cached += sequence.cached_tokens
            if sequence.output_tokens:
                sequence.num_tokens += 1
                tokens.append((sequence.request_id, 1))
            if sequence.num_tokens - sequence.prompt_tokens >= sequence.output_tokens:
                done.append(sequence)
        counters.generation += len(tokens)
        commands: list[Command] = [Emit(tokens, plan.tokens)]
        if done:
            self._batcher.retire(done)
            commands += [self._finish(sequence, end) for sequence in done]
        return commands

    def _finish(self, sequence: Sequence, end: float) -> Finish:
        del self._sequences[sequence.request_id]
        is_limit = sequence.output_tokens >= sequence.max_tokens > 0
        return sequence.finish("length" if is_limit else "stop", end)
