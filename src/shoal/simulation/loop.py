"""Virtual time: what is to happen, in order.

Owns the order alone: ties break by rank, then by the order in which things were planned, so a run is the same every
time.  What happens is the callers'.
"""

import heapq
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from shoal.kernel import ClockWentBack


class Rank(IntEnum):
    """What goes first of things at the same time: the world, then engines, then their news, then clients."""

    WORLD = 0
    ENGINE = 1
    NEWS = 2
    CLIENT = 3


class Loop:
    """A heap of calls in time.  now: seconds since the start."""

    __slots__ = ("_calls", "_count", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time: float, rank: Rank, call: Callable[..., None], *arguments: Any) -> None:
        """Have `call` made at `time`.  Raises ClockWentBack for a time that is over."""
        if time < self.now:
            raise ClockWentBack(time, self.now)
        self._count += 1
        heapq.heappush(self._calls, (time, rank, self._count, call, arguments))

    def after(self, delay_s: float, rank: Rank, call: Callable[..., None], *arguments: Any) -> None:
        """Have `call` made `delay_s` from now.  Raises ClockWentBack for a delay below 0."""
        if delay_s < 0.0:
            raise ClockWentBack(self.now + delay_s, self.now)
        self._count += 1
        heapq.heappush(self._calls, (self.now + delay_s, rank, self._count, call, arguments))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Make the calls in order until nothing is planned or `is_over`."""
        calls, pop = self._calls, heapq.heappop
        while calls and not is_over():
            self.now, _, _, call, arguments = pop(calls)
            call(*arguments)
