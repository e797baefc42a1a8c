"""Runs an engine machine in real time on the event loop.

Owns the machine's clock and the way from request ids to sinks.  The loop's timers have a resolution of a
millisecond, so a step may be ticked up to that early: the machine is then told its own deadline as the time.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from shoal.engine import (
    Aborted,
    Emit,
    Engine,
    Event,
    Finish,
    PaceChanged,
    Refuse,
    Submitted,
    Ticked,
)
from shoal.engine.changes import CacheChanged, Change
from shoal.engine.commands import ConfirmPause, ConfirmReset
from shoal.engine.events import CacheReset, Paused, PauseMode, Resumed
from shoal.hosts.engine.errors import bad_request
from shoal.hosts.engine.generation import Sink
from shoal.hosts.engine.meter import Meter

_EARLY_S = 0.001
ValueT = TypeVar("ValueT")


class EngineDriver:
    """The one that feeds `engine` and carries out its commands.  publish: hears of each change of the cache."""

    __slots__ = ("_engine", "_loop", "_meter", "_now", "_pauses", "_publish", "_resets", "_sinks", "_timer")

    def __init__(self, engine: Engine, meter: Meter, publish: Callable[[list[Change]], None] = lambda _: None) -> None:
        self._engine = engine
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time()
        self._publish = publish
        self._sinks: dict[str, Sink] = {}
        self._resets: list[asyncio.Future[bool]] = []
        self._pauses: list[asyncio.Future[None]] = []
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
        """End a generation whose client left; nothing happens when it is not here."""
        if self._sinks.pop(request_id, None) is not None:
            self._feed(Aborted(request_id=request_id))

    def cancel(self, is_meant: Callable[[str], bool]) -> None:
        """End the generations whose id `is_meant`; their clients get what there is, with the reason `abort`."""
        for request_id in [each for each in self._sinks if is_meant(each)]:
            self._feed(Aborted(request_id=request_id))

    async def reset_cache(self, *, is_forced: bool = False, is_all: bool = False) -> bool:
        """Empty the prefix cache, and say whether that was done; see `CacheReset`."""
        event = CacheReset(is_forced=is_forced, is_all=is_all)
        if not is_forced:
            return any(isinstance(command, ConfirmReset) and command.is_done for command in self._feed(event))
        done: asyncio.Future[bool] = self._loop.create_future()
        self._resets.append(done)
        self._feed(event)
        return await done

    async def pause(self, mode: PauseMode, *, is_clearing: bool) -> None:
        """Pause, and return when nothing runs any more or the pause was ended."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._pauses.append(done)
        self._feed(Paused(mode=mode, is_clearing=is_clearing))
        await done

    def resume(self) -> None:
        """End a pause."""
        self._feed(Resumed())

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
                    sink.generation.close(command)
                    self._meter.observe_finish(command, sink.generation.limit)
                    sink.end()
            elif isinstance(command, CacheChanged):
                self._publish(command.changes)
            elif isinstance(command, ConfirmReset) and command.is_forced:
                _resolve(self._resets, command.is_done)
            elif isinstance(command, ConfirmPause):
                _resolve(self._pauses, None)


def _resolve(waiting: list[asyncio.Future[ValueT]], value: ValueT) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(value)
    waiting.clear()
