"""Metric families of several workers, as one.

Workers send families as JSON; here they are summed (counters, histograms), combined by their declared rule (gauges)
and written as Prometheus text.  Counters never fall when a worker dies: what it had counted stays in the sum.
"""

import math
from collections.abc import Iterable

import msgspec

Labels = tuple[tuple[str, str], ...]
SampleKey = tuple[str, Labels]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_CUMULATIVE = frozenset({"counter", "histogram", "summary"})


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One metric family.

    name: without the suffix of its samples.  type: counter, gauge, histogram, summary, info or untyped.
    merge: how gauges of several workers combine, `sum`, `max` or `last`; counters and histograms are always summed.
    samples: (suffix, labels, value), as `["_total", {"model": "m"}, 3.0]`.
    """

    name: str
    help: str = ""
    type: str = "untyped"
    merge: str = "sum"
    samples: list[tuple[str, dict[str, str], float | None]] = []


def merge(pages: Iterable[Iterable[Family]]) -> list[Family]:
    """Return one list of families over all pages, in order of first sight.  Later pages are newer for `last`."""
    heads: dict[str, Family] = {}
    values: dict[str, dict[SampleKey, float]] = {}
    for page in pages:
        for family in page:
            heads.setdefault(family.name, family)
            into = values.setdefault(family.name, {})
            rule = "sum" if family.type in _CUMULATIVE else family.merge
            for suffix, labels, value in family.samples:
                _combine(into, (suffix, tuple(sorted(labels.items()))), math.nan if value is None else value, rule)
    return [_with_samples(head, values[name]) for name, head in heads.items()]


def cumulative(page: Iterable[Family]) -> list[Family]:
    """Return only the families that count up for ever, as what a dead worker leaves behind."""
    return [family for family in page if family.type in _CUMULATIVE]


def text(families: Iterable[Family]) -> str:
    """Return the Prometheus text page of `families`."""
    lines: list[str] = []
    for family in families:
        name = family.name
        if family.type == "counter" and family.samples and all(sample[0] == "_total" for sample in family.samples):
            name = f"{name}_total"  # the text format of Prometheus names a counter with its suffix
        if family.help:
            lines.append(f"# HELP {name} {_escape_help(family.help)}")
        lines.append(f"# TYPE {name} {family.type}")
        for suffix, labels, value in family.samples:
            lines.append(f"{family.name}{suffix}{_labels(labels)} {_number(value)}")
    return "\n".join(lines) + "\n" if lines else ""


class WorkerCounts:
    """The last page of each worker, and the counters of those that are gone.

    A worker's page is kept under its incarnation (a name that no later process shares), so a silent worker still
    counts with what it last said, and a dead one leaves its counters in the sum.
    """

    __slots__ = ("_left", "_pages")

    def __init__(self) -> None:
        self._pages: dict[str, list[Family]] = {}
        self._left: list[Family] = []

    def saw(self, incarnation: str, page: list[Family]) -> None:
        """Take the page that a live worker just sent."""
        self._pages[incarnation] = page

    def lost(self, incarnation: str) -> None:
        """Keep the counters of a worker that is gone, drop its gauges."""
        page = self._pages.pop(incarnation, None)
        if page is not None:
            self._left = merge([self._left, cumulative(page)])

    def merged(self, silent: frozenset[str] = frozenset()) -> list[Family]:
        """Return all families as one.  silent: incarnations whose gauges are too old to be believed."""
        pages = [
            cumulative(page) if incarnation in silent else page for incarnation, page in sorted(self._pages.items())
        ]
        return merge([self._left, *pages])


def _combine(into: dict[SampleKey, float], key: SampleKey, value: float, rule: str) -> None:
    old = into.get(key)
    if old is None or math.isnan(old) or (rule == "last" and not math.isnan(value)):
        into[key] = value
    elif math.isnan(value) or rule == "last":
        pass  # one worker that does not know takes nothing from what another knows
    elif rule == "max":
        into[key] = max(old, value)
    else:
        into[key] = old + value


def _with_samples(head: Family, values: dict[SampleKey, float]) -> Family:
    samples: list[tuple[str, dict[str, str], float | None]] = [
        (suffix, dict(labels), value) for (suffix, labels), value in values.items()
    ]
    return msgspec.structs.replace(head, samples=samples)


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escape_label(value)}"' for key, value in labels.items()) + "}"


def _escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escape_help(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
