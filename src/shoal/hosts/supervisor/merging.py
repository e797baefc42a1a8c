"""Metric families of several workers, as one.

Workers send families as JSON; here they are summed (counters, histograms), combined by their declared rule (gauges)
and written as Prometheus text.  Counters never fall when a worker dies: what it had counted stays in the sum.
"""

import math
from collections.abc import Iterable

import msgspec

from shoal import measures

Labels = tuple[tuple[str, str], ...]
SampleKey = tuple[str, Labels]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_CUMULATIVE = frozenset({"counter", "histogram", "summary"})


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One metric family as a worker sends it: unlike `measures.Family` its values may be null, as JSON writes NaN.

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
    return measures.render(
        measures.Family(each.name, each.help, each.type, each.merge, [_sample(*sample) for sample in each.samples])
        for each in families
    )


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


def _sample(suffix: str, labels: dict[str, str], value: float | None) -> measures.Sample:
    return measures.Sample(suffix, labels, math.nan if value is None else value)
