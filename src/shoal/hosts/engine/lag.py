"""How late the event loop runs its timers: the honest sign that this process has too much to do."""

import asyncio
from collections import deque

_PERIOD_S = 0.02
_WINDOW_S = 10.0


class LoopLag:
    """Lateness of a timer that fires every 20 ms, over the last 10 s.  Resolution is the loop's 1 ms."""

    __slots__ = ("_due", "_lags", "_loop", "_timer")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lags: deque[float] = deque(maxlen=int(_WINDOW_S / _PERIOD_S))
        self._due = self._loop.time() + _PERIOD_S
        self._timer = self._loop.call_at(self._due, self._fire)

    def quantile_s(self, quantile: float) -> float:
        """Return the lateness in seconds that the share `quantile` of the timers did not exceed."""
        if not self._lags:
            return 0.0
        ordered = sorted(self._lags)
        return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]

    def close(self) -> None:
        """Stop measuring."""
        self._timer.cancel()

    def _fire(self) -> None:
        now = self._loop.time()
        self._lags.append(max(now - self._due, 0.0))
        self._due = now + _PERIOD_S
        self._timer = self._loop.call_at(self._due, self._fire)
