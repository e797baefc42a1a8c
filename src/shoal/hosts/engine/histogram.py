"""A Prometheus histogram that costs one bisection to feed, and nothing to show again unchanged."""

from bisect import bisect_left


class Histogram:
    """Counts in buckets with the upper `bounds`, and the sum of what was observed.

    name, labels: as they stand in the text format; labels are never empty.
    """

    __slots__ = ("_bounds", "_counts", "_name", "_prefixes", "_shown", "_total")

    def __init__(self, name: str, labels: str, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._name = name
        self._prefixes = [f'{name}_bucket{{le="{bound}",{labels}}} ' for bound in (*map(float, bounds), "+Inf")]
        self._prefixes += [f"{name}_count{{{labels}}} ", f"{name}_sum{{{labels}}} "]
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._shown = ""

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times
        self._shown = ""

    def lines(self) -> str:
        """Return the sample lines in Prometheus text format."""
        if not self._shown:
            values: list[float] = []
            count = 0
            for add in self._counts:
                count += add
                values.append(count)
            values += (count, self._total)
            self._shown = "".join(
                [f"{prefix}{float(value)}\n" for prefix, value in zip(self._prefixes, values, strict=True)]
            )
        return self._shown
