"""The engine as a machine: requests in, tokens out, one step after the other.

Owns the clock of steps, the counters, and what an operator's pause or reset does; what runs in a step is the batcher's
choice, how long it takes is `steptime`'s.
"""

from shoal.engine.batcher import Batcher, Plan
from shoal.engine.blocks import BlockPool
from shoal.engine.cache import KvCache, Lower
from shoal.engine.changes import CacheChanged
from shoal.engine.commands import Command, ConfirmPause, ConfirmReset, Emit, Finish, Refuse
from shoal.engine.config import EngineConfig
from shoal.engine.counters import Counters
from shoal.engine.events import (
    Aborted,
    CacheReset,
    Event,
    PaceChanged,
    Paused,
    PauseMode,
    Resumed,
    Submitted,
    Ticked,
)
from shoal.engine.hosttier import HostTier
from shoal.engine.pausing import Pausing
from shoal.engine.sequences import Sequence
from shoal.engine.steptime import StepTime
from shoal.engine.strides import Stride, reach
from shoal.kernel import ClockWentBack


class Engine:
    """A `kernel.Machine` that models one inference engine.

    `deadline()` is the end of the step in progress.  A step costs O(sequences in it).  is_streaming: whether each step
    says whom it gave tokens; otherwise there is no `Emit`, and decode steps with nothing between them are taken at
    once, with the same results.  store: that other engines read and write, too.  step_time: in the place of the
    profile's.
    """

    __slots__ = (
        "_asked_reset",
        "_batcher",
        "_cache",
        "_config",
        "_end",
        "_is_streaming",
        "_last_now",
        "_last_submitted",
        "_number",
        "_pausing",
        "_plan",
        "_sequences",
        "_slow_factor",
        "_step_s",
        "_step_time",
        "_stride",
        "block_size",
        "counters",
        "max_loras",
        "num_blocks",
    )

    def __init__(
        self,
        config: EngineConfig,
        *,
        is_streaming: bool = True,
        store: HostTier | None = None,
        step_time: StepTime | None = None,
    ) -> None:
        profile = config.profile
        self.num_blocks = config.num_blocks or profile.num_blocks
        self.block_size = config.block_size or profile.block_size
        self.max_loras = config.max_loras
        self.counters = Counters()
        self._config = config
        self._cache = KvCache(
            BlockPool(self.num_blocks),
            self.block_size,
            lower=_lower(config, self.block_size, store),
            policy=config.host_policy,
            has_log=config.has_cache_events,
            is_describing=config.is_describing_host_blocks,
        )
        self._batcher = Batcher(
            self._cache,
            self.counters,
            block_size=self.block_size,
            max_seqs=config.max_num_seqs or profile.max_num_seqs,
            budget_tokens=config.max_num_batched_tokens or profile.max_num_batched_tokens,
            max_loras=config.max_loras,
        )
        self._step_time = step_time or StepTime(profile, config.speculation)
        self._pausing = Pausing()
        self._asked_reset: CacheReset | None = None
        self._slow_factor = config.slow_factor
        self._sequences: dict[str, Sequence] = {}
        self._number = 0
        self._plan: Plan | None = None
        self._is_streaming = is_streaming
        self._stride: Stride | None = None
        self._step_s = 0.0
        self._end = 0.0
        self._last_now = float("-inf")
        self._last_submitted = float("-inf")

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply `event` at `now` and return what the host must do.  Raises ClockWentBack."""
        if now < self._last_now:
            raise ClockWentBack(now, self._last_now)
        self._last_now = now
        if isinstance(event, Ticked):
            return self._tick(now)
        self._interrupt(now)
        match event:
            case Submitted():
                return self._submit(event, now)
            case Aborted():
                return self._abort(event.request_id, now)
            case CacheReset():
                return self._ask_reset(event)
            case Paused():
                return self._pause(event, now)
            case Resumed():
                return self._resume(now)
            case PaceChanged():
                self._slow_factor = event.slow_factor
        return []

    def usage_ratio(self, now: float) -> float:
        """Return the share of KV blocks that requests hold at `now`, 0 to 1."""
        held = self.pool.num_held + (self._stride.count_blocks(now) if self._stride is not None else 0)
        return held / self.num_blocks

    def deadline(self) -> float | None:
        """Return the end of the step in progress, or of the last one that is taken at once; None when idle."""
        return self._end if self._plan is not None else None

    @property
    def step_s(self) -> float:
        """Seconds of the step in progress, 0 when idle; after an event only, as until then many may be in progress."""
        return self._step_s if self._plan is not None else 0.0

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._batcher.running)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, deferred ones included."""
        return self._batcher.num_waiting + len(self._pausing.parked)

    @property
    def num_deferred(self) -> int:
        """Those of the queue that only an adapter slot keeps waiting, as of the last step's start."""
        return min(self._batcher.num_deferred, self._batcher.num_waiting)

    @property
    def pool(self) -> BlockPool:
        """The KV cache, to be read only.  `pool.usage_ratio` counts blocks of running requests, as vLLM does."""
        return self._cache.pool

    @property
    def host(self) -> HostTier | None:
        """The host tier, to be read only."""
        return self._cache.host

    @property
    def is_paused(self) -> bool:
        """Whether a pause is on, complete or not."""
        return self._pausing.asked is not None

    def adapters(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the LoRA names of the running and of the waiting sequences, each sorted."""
        running = {sequence.adapter for sequence in self._batcher.running if sequence.adapter}
        waiting = {sequence.adapter for sequence in self._batcher.waiting() if sequence.adapter}
        return tuple(sorted(running)), tuple(sorted(waiting))

    def has_begun(self, request_id: str) -> bool:
        """Whether a request has its first token, or is not here."""
        sequence = self._sequences.get(request_id)
        return sequence is None or sequence.first_token_at is not None

    def held_tokens(self, hashes: tuple[int, ...]) -> int:
        """Return how many tokens from the beginning of blocks with these hashes are in the GPU's cache."""
        return len(self.pool.match(hashes, len(hashes))) * self.block_size

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
        self._last_submitted = now
        if self._pausing.is_parking:
            self._pausing.parked.append(sequence)
            return []
        self._batcher.enqueue(sequence)
        if self._plan is None:
            self._begin(now)
        return []

    def _abort(self, request_id: str, now: float) -> list[Command]:
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return []
        if sequence in self._pausing.parked:
            self._pausing.parked.remove(sequence)
        else:
            self._batcher.remove(sequence)
        return [sequence.finish("abort", now)]

    def _tick(self, now: float) -> list[Command]:
        plan = self._plan
        if plan is None or now < self._end:
            return []
        self._interrupt(self._end)
        commands = self._complete(plan, self._end)
        if self._asked_reset is not None or self._pausing.asked is not None:
            commands += self._between_steps()
        is_late = now - self._end > self._config.max_lag_s
        self._begin(now if is_late else max(self._end, min(now, self._last_submitted)))
        return commands

    def _begin(self, start: float) -> None:
        """Start the next step at `start`, or go idle."""
        plan = self._plan = self._batcher.plan(start) if self._pausing.may_begin else None
        if plan is None:
            return
        compute_s = self._step_time.seconds(
            sequences=len(plan.work), tokens=plan.tokens, context_tokens=plan.context_tokens, pairs=plan.pairs
        )
        self._step_s = self._slow_factor * (compute_s + plan.load_s)
        self._end = start + self._step_s
        if plan.is_steady and not self._is_streaming:
            self._stretch(plan, start)

    def _stretch(self, plan: Plan, start: float) -> None:
        """Take as many steps like `plan` at once as follow each other."""
        steps = reach(plan, self._cache, self.block_size)
        if steps > 1:
            ends = self._step_time.ends(
                start,
                steps,
                self._slow_factor,
                sequences=len(plan.work),
                context_tokens=plan.context_tokens,
                pairs=plan.pairs,
            )
            self._stride = Stride(plan, self._cache, self.block_size, start, ends)
            self._end = ends[-1]

    def _interrupt(self, now: float) -> None:
        """Something happens: of the steps taken at once only those stay that have begun."""
        stride = self._stride
        if stride is not None:
            steps, begin_s, self._end = stride.apply(now)
            self.counters.steps += steps
            self.counters.generation += steps * len(stride.work)
            self.counters.busy_s += begin_s - stride.start
            self._step_s = self._end - begin_s
            self._stride = None

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
                counters.loaded += sequence.loaded_tokens
            if sequence.output_tokens:
                sequence.num_tokens += 1
                tokens.append((sequence.request_id, 1))
            if sequence.num_tokens - sequence.prompt_tokens >= sequence.output_tokens:
                done.append(sequence)
        counters.generation += len(tokens)
        commands = self._tell_changes()
        if self._is_streaming:
            commands.append(Emit(tokens, plan.tokens))
        if done:
            self._batcher.retire(done)
            commands += [self._finish(sequence, end) for sequence in done]
        return commands

    def _finish(self, sequence: Sequence, end: float) -> Finish:
        del self._sequences[sequence.request_id]
        is_limit = sequence.output_tokens >= sequence.max_tokens > 0
        return sequence.finish("length" if is_limit else "stop", end)

    def _tell_changes(self) -> list[Command]:
        changes = self._cache.take_changes()
        return [CacheChanged(changes)] if changes else []

    def _ask_reset(self, event: CacheReset) -> list[Command]:
        """Empty the cache now, or at the end of the step when running requests must give way first."""
        if not event.is_forced:
            return self._reset(event)
        if self._plan is not None:
            self._asked_reset = event
            return []
        self._batcher.preempt_all()
        return self._reset(event)

    def _reset(self, event: CacheReset) -> list[Command]:
        is_done = self._cache.reset(event.is_all)
        commands: list[Command] = [ConfirmReset(is_done=is_done, is_forced=event.is_forced)]
        if is_done and self._config.is_clearing_at_once:
            commands += self._tell_changes()
        return commands

    def _pause(self, event: Paused, now: float) -> list[Command]:
        """Begin a pause; it is complete at once unless a step or requests have to end first."""
        self._pausing.ask(event)
        commands: list[Command] = []
        if event.mode is PauseMode.ABORT:
            for request_id in list(self._sequences):
                commands += self._abort(request_id, now)
        if event.mode is PauseMode.ABORT or self._plan is None:
            commands += self._settle()
        return commands

    def _between_steps(self) -> list[Command]:
        """Do what was asked for while the step ran."""
        commands: list[Command] = []
        if self._asked_reset is not None:
            self._batcher.preempt_all()
            commands += self._reset(self._asked_reset)
            self._asked_reset = None
        if self._pausing.asked is not None and not self._pausing.is_settled:
            commands += self._settle()
        return commands

    def _settle(self) -> list[Command]:
        """Complete the pause if nothing stands in its way."""
        pausing = self._pausing
        pause = pausing.asked
        if pause is None or (pausing.is_parking and len(self._sequences) > len(pausing.parked)):
            return []
        pausing.is_settled = True
        for sequence in pausing.unpark():
            self._batcher.enqueue(sequence)
        commands: list[Command] = [ConfirmPause()]
        if pause.is_clearing:
            self._batcher.preempt_all()
            commands += [each for each in self._reset(CacheReset()) if not isinstance(each, ConfirmReset)]
        return commands

    def _resume(self, now: float) -> list[Command]:
        """Go on with what waits."""
        pausing = self._pausing
        is_open = pausing.asked is not None and not pausing.is_settled
        for sequence in pausing.end():
            self._batcher.enqueue(sequence)
        if self._plan is None:
            self._begin(now)
        return [ConfirmPause()] if is_open else []


def _lower(config: EngineConfig, block_size: int, store: HostTier | None) -> Lower:
    """Return the tiers below the GPU."""
    profile = config.profile
    block_bytes = (profile.stored_bytes_per_token or profile.kv_bytes_per_token) * block_size
    return Lower(
        host=HostTier(config.host_blocks) if config.host_blocks else None,
        host_s=block_bytes / config.host_bytes_per_s,
        disk=HostTier(config.disk_blocks) if config.disk_blocks and config.host_blocks else None,
        disk_s=block_bytes / config.disk_bytes_per_s,
        store=store,
        store_s=block_bytes / config.store_bytes_per_s,
    )
