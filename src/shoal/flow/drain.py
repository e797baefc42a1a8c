"""How fast something is being emptied: a rate that forgets, for honest words to those who are turned away."""

import math
from collections import deque

WINDOW_S = 10.0
"""A departure counts to 1/e after this time."""
MAX_WAIT_S = 600.0
_KEPT, _FEW = 8, 4.0
"""Where fewer than so many are in a window, the latest ones say how often they go."""


class DrainRate:
    """Departures per second, of late."""

    __slots__ = ("_at", "_began", "_count", "_latest")

    def __init__(self) -> None:
        self._count = 0.0
        self._at = 0.0
        self._began: float | None = None
        self._latest: deque[float] = deque(maxlen=_KEPT)

    def left(self, now: float) -> None:
        """Note that one has gone."""
        if self._began is None:
            self._began = self._at = now
        self._count = self._count * math.exp((self._at - now) / WINDOW_S) + 1.0
        self._at = now
        self._latest.append(now)

    def woke(self, now: float) -> None:
        """Note that somebody waits again: of a longer silence, in which nobody did, only a window counts."""
        idle_s = now - self._at - WINDOW_S
        if idle_s > 0.0 and self._began is not None:
            self._began += idle_s
            self._at += idle_s
            self._latest = deque([at + idle_s for at in self._latest], maxlen=_KEPT)

    def per_s(self, now: float) -> float:
        """The rate now, 0.0 while nothing is known."""
        if self._began is None:
            return 0.0
        count = self._count * math.exp((self._at - now) / WINDOW_S)
        silent_s = now - self._latest[0]
        if count < _FEW and silent_s > WINDOW_S:
            # Of those that go so seldom a window sees too few.
            return len(self._latest) / silent_s
        # What was seen of a window that is not over yet; of less than a second nothing can be said.
        seen_s = WINDOW_S * -math.expm1(-max(1.0, now - self._began) / WINDOW_S)
        return count / seen_s

    def wait_s(self, ahead: int, now: float) -> float | None:
        """Seconds until `ahead` requests have gone and one more, None while no rate is known."""
        rate = self.per_s(now)
        return min((ahead + 1) / rate, MAX_WAIT_S) if rate > 0.0 else None
