"""Metric families that cost little to count and merge across processes.

Owns counters, gauges and histograms with capped label sets, their plain form (which travels between processes) and the
Prometheus text of it.  What is counted is `fold`.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

# Distinct label sets of one family; a client can invent model names and tenants.
MAX_LABEL_SETS = 1000
OTHER = "other"
# Values of one series that wait to be counted together.
MAX_GATHERED = 256


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One line of a family.  suffix: "", `_bucket`, `_sum`, `_count` or `_total`."""

    suffix: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True):
    """One family in plain form.  merge: how several workers' samples become one: `sum`, `max` or `last`."""

    name: str
    help: str
    type: str
    merge: str
    samples: list[Sample]


class _Labelled:
    __slots__ = ("help", "labels", "merge", "name")
    type = ""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), merge: str = "sum") -> None:
        self.name = name
        self.help = text
        self.labels = tuple(labels)
        self.merge = merge

    def _family(self, samples: list[Sample]) -> Family:
        return Family(self.name, self.help, self.type, self.merge, samples)


class Counter(_Labelled):
    """A count that only rises, by label values."""

    __slots__ = ("_values",)
    type = "counter"

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, text, labels)
        self._values: dict[tuple[str, ...], float] = {}

    def add(self, key: tuple[str, ...] = (), amount: float = 1.0) -> None:
        """Add `amount` for these label values (in the order of `labels`)."""
        values = self._values
        if key in values:
            values[key] += amount
            return
        if len(values) >= MAX_LABEL_SETS:
            key = (OTHER,) * len(key)
        values[key] = values.get(key, 0.0) + amount

    def stand_at(self, value: float, key: tuple[str, ...] = ()) -> None:
        """Take over a count that is kept elsewhere."""
        self._values[key] = value

    def family(self) -> Family:
        """The plain form now."""
        items = self._values or ({(): 0.0} if not self.labels else {})
        return self._family(
            [Sample("_total", dict(zip(self.labels, key, strict=True)), value) for key, value in items.items()]
        )


class Gauge(_Labelled):
    """A figure that stands until set again."""

    __slots__ = ("_values",)
    type = "gauge"

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), merge: str = "sum") -> None:
        super().__init__(name, text, labels, merge)
        self._values: dict[tuple[str, ...], float] = {}

    def set(self, value: float, key: tuple[str, ...] = ()) -> None:
        """Set the figure for these label values."""
        self._values[key] = value

    def clear(self) -> None:
        """Forget every label set, before they are set anew."""
        self._values = {}

    def family(self) -> Family:
        """The plain form now."""
        return self._family(
            [Sample("", dict(zip(self.labels, key, strict=True)), value) for key, value in self._values.items()]
        )


class Series:
    """Values of one label set.  gathered: those not yet counted; append to it, the family counts them when it is read.

    Counting many values at once costs a tenth of counting each as it comes; `Histogram.settle` bounds how many wait.
    """

    __slots__ = ("counts", "gathered", "total")

    def __init__(self, buckets: int) -> None:
        self.gathered: list[float] = []
        self.counts: npt.NDArray[np.int64] = np.zeros(buckets, np.int64)
        self.total = 0.0

    def settle(self, bounds: npt.NDArray[np.float64]) -> None:
        """Count what was gathered."""
        if self.gathered:
            values = np.array(self.gathered, np.float64)
            self.gathered.clear()
            self.counts += np.bincount(bounds.searchsorted(values), minlength=len(self.counts))
            self.total += float(values.sum())


class Histogram(_Labelled):
    """Counts by upper bound, with their sum."""

    __slots__ = ("_bounds", "_series")
    type = "histogram"

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        super().__init__(name, text, labels)
        self._bounds = np.array(bounds, np.float64)
        self._series: dict[tuple[str, ...], Series] = {}

    def series(self, key: tuple[str, ...] = ()) -> Series:
        """The series of these label values, that of all others once there are too many."""
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= MAX_LABEL_SETS:
                key = (OTHER,) * len(key)
            series = self._series.setdefault(key, Series(len(self._bounds) + 1))
        return series

    def observe(self, value: float, key: tuple[str, ...] = ()) -> None:
        """Count one value for these label values."""
        series = self.series(key)
        series.gathered.append(value)
        if len(series.gathered) >= MAX_GATHERED:
            series.settle(self._bounds)

    def settle(self) -> None:
        """Count what all series have gathered."""
        for series in self._series.values():
            series.settle(self._bounds)

    def family(self) -> Family:
        """The plain form now: cumulative buckets, sum and count."""
        self.settle()
        samples = []
        for key, series in self._series.items():
            labels = dict(zip(self.labels, key, strict=True))
            running = series.counts.cumsum().tolist()
            if not running[-1]:
                continue
            for bound, count in zip((*self._bounds.tolist(), float("inf")), running, strict=True):
                le = "+Inf" if bound == float("inf") else repr(bound)
                samples.append(Sample("_bucket", {**labels, "le": le}, float(count)))
            samples.append(Sample("_sum", labels, series.total))
            samples.append(Sample("_count", labels, float(running[-1])))
        return self._family(samples)


def render(families: Iterable[Family]) -> str:
    """Return the Prometheus text format (version 0.0.4) of the families."""
    lines: list[str] = []
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.type}"]
        for sample in family.samples:
            labels = ",".join(f'{key}="{_escape(value)}"' for key, value in sample.labels.items())
            lines.append(f"{family.name}{sample.suffix}{{{labels}}} {_number(sample.value)}")
    return "\n".join(lines).replace("{} ", " ") + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
