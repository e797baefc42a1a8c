"""How many engines an SLO takes: the search for the cheapest fleet, one after the other.

Owns the search, which groups of engines make a fleet, and what meets an SLO.  Whoever runs it runs the experiments.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.engine import find_profile
from shoal.kernel import ConfigError
from shoal.simulation.experiment import Experiment
from shoal.simulation.handover import Handover, Role
from shoal.simulation.results import Result

Counts = tuple[int, ...]
"""Engines of each group of a fleet."""

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
    """The cheapest counts of engines that meet all of `slos`, each at most `most`.

    costs: of an engine of each group of the fleet.  All counts double until the SLOs are met; then that fleet is tried
    next which, whatever comes of it, leaves the fewest that may still be the cheapest.  More engines of a group are
    taken to be no worse.  tried: results by counts.
    """

    __slots__ = ("_cost", "_most", "_slos", "tried")

    def __init__(self, slos: Sequence[Slo], most: int, costs: Sequence[float] = (1.0,)) -> None:
        self._slos = slos
        self._most = most
        axes = np.meshgrid(*(np.arange(1, most + 1) * cost for cost in costs), indexing="ij")
        self._cost: npt.NDArray[np.float64] = np.sum(axes, axis=0)
        self.tried: dict[Counts, Sequence[Result]] = {}

    def next(self) -> Counts | None:
        """Return the counts to try next, None when the search is over."""
        if self.found is None:
            count = max((min(counts) for counts in self.tried), default=0)
            return None if count >= self._most else (min(self._most, max(1, 2 * count)),) * self._cost.ndim
        open_ = self._open()
        if not open_.any():
            return None
        costs = np.sort(self._cost[open_])
        if_met = len(costs) - np.searchsorted(costs, self._cost, "left")
        if_missed = open_.astype(np.int64)
        for axis in range(open_.ndim):
            if_missed = np.cumsum(if_missed, axis=axis)
        gone = np.where(open_, np.minimum(if_met, if_missed), -1)
        return tuple(int(place) + 1 for place in np.unravel_index(int(gone.argmax()), gone.shape))

    def tell(self, counts: Counts, results: Sequence[Result]) -> None:
        """Take the runs of a fleet, one per seed."""
        self.tried[counts] = results

    @property
    def found(self) -> Counts | None:
        """The cheapest counts that are known to meet the SLOs, None when there are none."""
        met = [counts for counts in self.tried if not self.missed(counts)]
        return min(met, key=self.cost, default=None)

    def cost(self, counts: Counts) -> float:
        """Return what so many engines cost, in the unit of the costs."""
        return float(self._cost[self._place(counts)])

    def missed(self, counts: Counts) -> list[str]:
        """Return what a fleet that was tried did not keep, in words."""
        results = self.tried[counts]
        failed = max(result.failed for result in results)
        said = [f"{failed:,} requests failed"] if failed else []
        return said + [
            f"{slo.figure} is {slo.of(results):.3g} s, not {slo.limit_s:g} s"
            for slo in self._slos
            if slo.of(results) > slo.limit_s
        ]

    def less(self) -> Counts | None:
        """Return the nearest fleet that was tried and missed, with fewer engines of a group than was found."""
        found = self.found
        fewer = [
            counts
            for counts in self.tried
            if found is not None and self.missed(counts) and any(a < b for a, b in zip(counts, found, strict=True))
        ]
        return max(fewer, key=lambda counts: (self.cost(counts), counts), default=None)

    def why_none(self) -> str:
        """Return why no counts meet them."""
        last = max(self.tried)
        said = f"with {shown(last)} engines {', '.join(self.missed(last))}"
        half = self.tried.get(tuple(count // 2 for count in last))
        missed = [slo for slo in self._slos if slo.of(self.tried[last]) > slo.limit_s]
        if half and missed and all(slo.of(self.tried[last]) > (1 - _SAME) * slo.of(half) for slo in missed):
            return f"{said}; half as many are no slower, so it is not for want of engines: a faster profile is needed"
        return f"{said}; try --most above {max(last)}"

    def _open(self) -> npt.NDArray[np.bool_]:
        """Which fleets may be cheaper than what was found, and meet the SLOs for all that is known."""
        found = self.found
        open_ = np.ones_like(self._cost, np.bool_) if found is None else self._cost < self.cost(found)
        for counts in self.tried:
            if self.missed(counts):
                open_[tuple(slice(0, count) for count in counts)] = False
        return open_

    @staticmethod
    def _place(counts: Counts) -> tuple[int, ...]:
        return tuple(count - 1 for count in counts)


def shown(counts: Counts) -> str:
    """Return counts as people read them: `4`, or `2 + 6` of a fleet of two groups."""
    return " + ".join(f"{count}" for count in counts)


def check_sizable(experiment: Experiment, source: str) -> None:
    """Raise ConfigError for what no fleet can be sized by."""
    if experiment.incidents:
        raise ConfigError("incidents: name engines that smaller fleets do not have; leave them out", source=source)
    if len(experiment.fleet) > 1 and not all(group.cost_per_hour for group in experiment.fleet):
        raise ConfigError("fleet: to compare groups each needs cost_per_hour, of one engine", source=source)


def kinds(experiment: Experiment) -> list[tuple[int, ...]]:
    """Return the fleets to choose from, as places of groups: each kind alone, and each that prefills with each that
    decodes."""
    roles = [group.role for group in experiment.fleet]
    alone = [(place,) for place, role in enumerate(roles) if role is Role.BOTH]
    return alone + [
        (prefill, decode)
        for prefill, first in enumerate(roles)
        for decode, second in enumerate(roles)
        if (first, second) == (Role.PREFILL, Role.DECODE)
    ]


def named(experiment: Experiment, groups: tuple[int, ...]) -> str:
    """Return a kind of fleet in words."""
    chosen = [experiment.fleet[place] for place in groups]
    names = [find_profile(group.profile).name for group in chosen]
    if len(chosen) == 1:
        return names[0]
    return " + ".join(f"{name} {group.role}" for name, group in zip(names, chosen, strict=True))


def sized(experiment: Experiment, groups: tuple[int, ...], counts: Counts) -> Experiment:
    """Return the experiment with so many engines of some of its groups, and no others."""
    fleet = tuple(
        msgspec.structs.replace(experiment.fleet[place], count=count)
        for place, count in zip(groups, counts, strict=True)
    )
    handover = experiment.handover if len(groups) > 1 else Handover()
    return msgspec.structs.replace(experiment, fleet=fleet, handover=handover)
