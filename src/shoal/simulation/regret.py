"""What a run cost, and how far that is from the best that anybody knows of for the same arrivals.

Owns the figure that policies are ranked by.  The clairvoyant part of the reference is `clairvoyant`'s.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.simulation.results import Run

Floats = npt.NDArray[np.float64]

REFERENCE = "clairvoyant reference"
"""Stands where a run has its policy; nobody can deploy it."""

NEVER_S = 1e9
"""The time to first token of a request that failed, or that nobody sent because its session had ended before."""


class Scale(NamedTuple):
    """The lowest p50 and p95 of the time to first token that any policy has on these arrivals, in seconds."""

    p50_s: float
    p95_s: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Scale":
        """Return the scale of runs with the same arrivals; the reference does not count."""
        count = most_requests(runs)
        found = np.array([quantiles(waits(run, count)) for run in runs if run.policy != REFERENCE])
        return cls(*found.min(axis=0).tolist())

    def cost(self, waits_s: Floats) -> float:
        """Return the mean of p50 and p95, each over the lowest: 1 for a policy that is the best in both."""
        p50_s, p95_s = quantiles(waits_s)
        return (p50_s / self.p50_s + p95_s / self.p95_s) / 2


def waits(run: Run, count: int) -> Floats:
    """Return the times to first token of `count` requests, in seconds; NEVER_S for those that got none."""
    answered_s = run.requests.ttft_s[~run.requests.is_failed]
    return np.concatenate((answered_s, np.full(count - len(answered_s), NEVER_S)))


def quantiles(waits_s: Floats) -> tuple[float, float]:
    """Return p50 and p95."""
    p50, p95 = np.percentile(waits_s, (50, 95)).tolist()
    return p50, p95


def most_requests(runs: Sequence[Run]) -> int:
    """Return how many requests the run with most of them has."""
    return max(len(run.requests) for run in runs)


def with_regret(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with their regret, and each reference as the best run of its load and seed.

    A run of REFERENCE is what the search for it found; where a policy was better, that one's run is the reference.
    Without one that is whole, runs of that load and seed stay as they are.
    """
    groups: dict[tuple[float | None, int], list[int]] = defaultdict(list)
    for place, run in enumerate(runs):
        groups[run.load, run.seed].append(place)
    judged = list(runs)
    for places in groups.values():
        own = [runs[place] for place in places]
        if any(run.policy == REFERENCE and not run.result.is_partial for run in own):
            for place, run in zip(places, _judged(own), strict=True):
                judged[place] = run
    return judged


def _judged(runs: Sequence[Run]) -> list[Run]:
    scale, count = Scale.of(runs), most_requests(runs)
    best = min(runs, key=lambda run: scale.cost(waits(run, count)))
    lowest = scale.cost(waits(best, count))
    known = [best._replace(policy=REFERENCE) if run.policy == REFERENCE else run for run in runs]
    regrets = [scale.cost(waits(run, count)) / lowest - 1.0 for run in known]
    return [
        run._replace(result=msgspec.structs.replace(run.result, regret_ratio=regret))
        for run, regret in zip(known, regrets, strict=True)
    ]
