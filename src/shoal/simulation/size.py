"""How many engines an SLO takes: the search for the smallest fleet, one count after the other.

Owns the search and what meets an SLO.  Whoever runs it runs the experiments.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shoal.kernel import ConfigError
from shoal.simulation.experiment import Experiment
from shoal.simulation.results import Result

FIGURES = tuple(
    field.removesuffix("_s")
    for field in Result.__struct_fields__
    if field.startswith(("ttft_", "tpot_", "e2e_")) and field.endswith("_s")
)
"""What an SLO may be about."""

_SAME = 0.05


class Slo(NamedTuple):
    """A promise.  figure: one of FIGURES.  limit_s: it may not be above that in any run."""

    figure: str
    limit_s: float

    def of(self, results: Sequence[Result]) -> float:
        """Return the worst figure of runs, in seconds."""
        return float(max(getattr(result, f"{self.figure}_s") for result in results))


class Search:
    """The smallest count of engines that meets all of `slos`, at most `most`.

    Counts double until one meets them, then the gap is halved: more engines are taken to be no worse.  tried: results
    by count.
    """

    __slots__ = ("_most", "_slos", "tried")

    def __init__(self, slos: Sequence[Slo], most: int) -> None:
        self._slos = slos
        self._most = most
        self.tried: dict[int, Sequence[Result]] = {}

    def next(self) -> int | None:
        """Return the count to try next, None when the search is over."""
        low, high = self._bounds()
        if high is None:
            return None if low >= self._most else min(self._most, max(1, 2 * low))
        return None if high - low <= 1 else (low + high) // 2

    def tell(self, count: int, results: Sequence[Result]) -> None:
        """Take the runs of a count, one per seed."""
        self.tried[count] = results

    @property
    def found(self) -> int | None:
        """The smallest count that is known to meet them, None when there is none."""
        return self._bounds()[1]

    def missed(self, count: int) -> list[str]:
        """Return what a count did not keep, in words."""
        results = self.tried[count]
        failed = max(result.failed for result in results)
        said = [f"{failed:,} requests failed"] if failed else []
        return said + [
            f"{slo.figure} is {slo.of(results):.3g} s, not {slo.limit_s:g} s"
            for slo in self._slos
            if slo.of(results) > slo.limit_s
        ]

    def why_none(self) -> str:
        """Return why no count meets them."""
        last = max(self.tried)
        said = f"with {last} engines {', '.join(self.missed(last))}"
        half = self.tried.get(last // 2)
        missed = [slo for slo in self._slos if slo.of(self.tried[last]) > slo.limit_s]
        if half and missed and all(slo.of(self.tried[last]) > (1 - _SAME) * slo.of(half) for slo in missed):
            return f"{said}; half as many are no slower, so it is not for want of engines: a faster profile is needed"
        return f"{said}; try --most above {last}"

    def _bounds(self) -> tuple[int, int | None]:
        """Return the largest count below which none meets them, and the smallest that does."""
        met = [count for count in self.tried if not self.missed(count)]
        high = min(met) if met else None
        return max((count for count in self.tried if high is None or count < high), default=0), high


def check_sizable(experiment: Experiment, source: str) -> None:
    """Raise ConfigError for what no fleet can be sized by."""
    if experiment.incidents:
        raise ConfigError("incidents: name engines that smaller fleets do not have; leave them out", source=source)
    if len(experiment.fleet) > 1 and not all(group.cost_per_hour for group in experiment.fleet):
        raise ConfigError("fleet: to compare groups each needs cost_per_hour, of one engine", source=source)


def sized(experiment: Experiment, group: int, count: int) -> Experiment:
    """Return the experiment with `count` engines of one of its groups, and no others."""
    chosen = msgspec.structs.replace(experiment.fleet[group], count=count)
    return msgspec.structs.replace(experiment, fleet=(chosen,))
