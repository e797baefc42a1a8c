"""Runs an engine machine in real time on the event loop.

Owns the machine's clock and the way from request ids to sinks.  The loop's timers have a resolution of a
millisecond, so a step may be ticked up to that early: the machine is then told its own deadline as the time.
"""

import asyncio
from collections.abc import Sequence

from shoal.engine import (
    Aborted,
    CacheReset,
    ConfirmReset,
    Emit,
    Engine,
    Event,
    Finish,
    PaceChanged,
    Refuse,
    Submitted,
    Ticked,
)
from shoal.hosts.engine.errors import bad_request
from shoal.hosts.engine.generation import Sink
from shoal.hosts.engine.meter import Meter

_EARLY_S = 0.001


class EngineDriver:
    """The one that feeds `engine` and carries out its commands."""

    __slots__ = ("_engine", "_loop", "_meter", "_now", "_sinks", "_timer")

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self._engine = engine
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time()
        self._sinks: dict[str, Sink] = {}
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, event: Submitted, sink: Sink) -> None:
        """Start a generation; its sink hears of every step until `end` or `abort`.

        Raises ApiError when the engine can never serve it.
        """
        self._sinks[event.request_id] = sink
        for command in self._feed(event):
            if isinstance(command, Refuse):
                del self._sinks[event.request_id]
                raise bad_request(command.message)

    def abort(self, request_id: str) -> None:
        """End a generation whose client left."""
        self._sinks.pop(request_id, None)
        self._feed(Aborted(request_id=request_id))

    def reset_cache(self) -> bool:
        """Empty the prefix cache if nobody uses it, and say whether that was done."""
        return any(isinstance(command, ConfirmReset) and command.is_done for command in self._feed(CacheReset()))

    def change_pace(self, slow_factor: float) -> None:
        """Make steps take `slow_factor` times their model time."""
        self._feed(PaceChanged(slow_factor=slow_factor))

    def close(self) -> None:
        """Stop ticking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _feed(self, event: Event) -> Sequence[object]:
        self._now = max(self._loop.time(), self._now)
        commands = self._engine.handle(event, self._now)
        if commands:
            self._carry_out(commands)
        self._arm()
        return commands

    def _arm(self) -> None:
        if self._timer is None and (deadline := self._engine.deadline()) is not None:
            self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        deadline = self._engine.deadline()
        if deadline is not None:
            self._now = max(self._loop.time(), self._now)
            if deadline - self._now < _EARLY_S:
                self._now = max(self._now, deadline)
                self._carry_out(self._engine.handle(Ticked(), self._now))
        self._arm()

    def _carry_out(self, commands: Sequence[object]) -> None:
        sinks = self._sinks
        for command in commands:
            if isinstance(command, Emit):
                self._meter.observe_step(command.step_tokens)
                for request_id, count in command.tokens:
                    sink = sinks.get(request_id)
                    if sink is not None:
                        sink.advance(count)
            elif isinstance(command, Finish):
                sink = sinks.pop(command.request_id, None)
                if sink is not None:
                    sink.generation.finish = command
                    self._meter.observe_finish(command, sink.generation.limit)
                    sink.end()
