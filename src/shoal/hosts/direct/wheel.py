"""One coarse timer for all connections: none costs a timer of its own per request.

Owns when a connection is looked at.  What is due then is the connection's business.
"""

import asyncio
from time import monotonic
from typing import Protocol

TICK_S = 0.1
SLOTS = 64
"""A connection is looked at no later than after all slots, however far off its time is: what is closed meanwhile is not
held longer than that."""

NEVER = float("inf")


class Timed(Protocol):
    """Something with a time.  due: when to call `on_due`, in seconds of the monotonic clock; NEVER for not at all.

    visit: the wheel's own note, 0 at first.
    """

    due: float
    visit: int

    def on_due(self, now: float) -> None:
        """The time has come; set another `due`, or NEVER, first."""


class Wheel:
    """The timer; `close` it.  Times are late by a tick at most."""

    __slots__ = ("_at", "_loop", "_slots", "_timer", "now")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = monotonic()
        self._loop = loop
        self._at = 1
        self._slots: list[list[Timed]] = [[] for _ in range(SLOTS)]
        self._timer: asyncio.TimerHandle | None = loop.call_later(TICK_S, self._tick)

    @property
    def horizon(self) -> float:
        """Before this time everything that is watched is looked at anyway."""
        return self.now + (SLOTS - 2) * TICK_S

    def watch(self, timed: Timed) -> None:
        """Look after `timed` from now on.  Needed once, and again whenever its `due` was set to an earlier time."""
        due = timed.due
        if due == NEVER:
            return
        ahead = (due - self.now) / TICK_S
        visit = self._at + (SLOTS - 1 if ahead >= SLOTS - 2 else max(1, int(ahead) + 1))
        if timed.visit > self._at and timed.visit <= visit:
            return
        timed.visit = visit
        self._slots[visit % SLOTS].append(timed)

    def _tick(self) -> None:
        self.now = now = monotonic()
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._at = at = self._at + 1
        slot = at % SLOTS
        found, self._slots[slot] = self._slots[slot], []
        for timed in found:
            if timed.visit != at:
                continue
            timed.visit = 0
            if timed.due <= now:
                timed.on_due(now)
            self.watch(timed)

    def close(self) -> None:
        """Stop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
