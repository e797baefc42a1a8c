"""How fast a queue is being emptied: a rate that forgets, for honest words to those who are turned away."""

import math

WINDOW_S = 10.0
"""A departure counts to 1/e after this time."""
MAX_WAIT_S = 600.0


class DrainRate:
    """Departures per second, of late."""

    __slots__ = ("_at", "_began", "_count")

    def __init__(self) -> None:
        self._count = 0.0
        self._at = 0.0
        self._began: float | None = None

    def left(self, now: float) -> None:
        """Note that one has gone to an endpoint."""
        if self._began is None:
            self._began = self._at = now
        self._count = self._count * math.exp((self._at - now) / WINDOW_S) + 1.0
        self._at = now

    def per_s(self, now: float) -> float:
        """The rate now, 0.0 while nothing is known."""
        if self._began is None:
            return 0.0
        count = self._count * math.exp((self._at - now) / WINDOW_S)
        # What was seen of a window that is not over yet; of less than a second nothing can be said.
        seen_s = WINDOW_S * -math.expm1(-max(1.0, now - self._began) / WINDOW_S)
        return count / seen_s

    def wait_s(self, ahead: int, now: float) -> float | None:
        """Seconds until `ahead` requests have gone, None while no rate is known."""
        rate = self.per_s(now)
        return min((ahead + 1) / rate, MAX_WAIT_S) if rate > 1e-3 else None
