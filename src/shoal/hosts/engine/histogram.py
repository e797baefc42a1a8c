"""A Prometheus histogram that costs one bisection to feed."""

from bisect import bisect_left


class Histogram:
    """Counts in buckets with the upper `bounds`, and the sum of what was observed."""

    __slots__ = ("_bounds", "_counts", "_names", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._names = [str(float(bound)) for bound in bounds] + ["+Inf"]
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return (le, cumulative count) up to +Inf."""
        count = 0
        out = []
        for name, add in zip(self._names, self._counts, strict=True):
            count += add
            out.append((name, float(count)))
        return out
