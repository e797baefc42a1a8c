"""What the default profile is worth beside round-robin on coding agents, in virtual time: the two figures by which this
field judges a router.

Agents come at random to four H100 with a model of 8B; they share a system prompt, and contexts grow with each tool's
result.  Round-robin saturates at the lowest rate at which fewer than `KEPT_RATIO` as many agents finish as begin: from
there on they become ever more.  Rates are `STEP_RATIO` apart, figures means over seeds of the time after the pool
has filled, and the same on every machine.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.bars.registry import Figure, bar
from shoal.simulation import Sample, read_experiment, run_experiment

_ROUND_ROBIN = (Path(__file__).parents[2] / "examples" / "policies" / "round-robin.yaml").read_text()
_DEFAULT = ""
_SEEDS = (101, 102, 103)
KEPT_RATIO = 0.9
STEP_RATIO = 1.05
_LOWEST_PER_S = 0.4
# Agents come all the time and stay for about a minute, so the pool is as full as it gets behind the first third.
_SPAN_S = 900.0
_FULL_S = 300.0
_EXPERIMENT = """\
fleet:
- {{count: 4, profile: h100-8b}}
workload: {{shape: agents, sessions: {sessions}, turns: [8, 20]}}
arrivals: {{kind: poisson, rate_per_s: {per_s}}}
"""


class Served(NamedTuple):
    """A policy at a load.  per_s: agents that begin.  kept_ratio: agents that finish over those that begin."""

    per_s: float
    kept_ratio: float
    requests_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float


def judged(per_s: float, runs: Sequence[Sequence[Sample]]) -> Served:
    """Return what came of a load between `_FULL_S` and `_SPAN_S`; times are means over the runs."""
    begun = finished = ended = 0
    waits_s = []
    for samples in runs:
        talks: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for sample in samples:
            talks[sample.session].append((sample.arrived_s, sample.arrived_s + sample.duration_s))
        begun += sum(_is_full(min(begin for begin, _ in talk)) for talk in talks.values())
        finished += sum(_is_full(max(end for _, end in talk)) for talk in talks.values())
        ended += sum(_is_full(end) for talk in talks.values() for _, end in talk)
        own_s = [sample.ttft_s for sample in samples if _is_full(sample.arrived_s) and not sample.is_failed]
        waits_s.append(np.percentile(own_s, (50, 95)))
    p50_s, p95_s = np.mean(waits_s, axis=0).tolist()
    return Served(per_s, finished / begun, ended / len(runs) / (_SPAN_S - _FULL_S), p50_s, p95_s)


def _is_full(at_s: float) -> bool:
    return _FULL_S <= at_s < _SPAN_S


@cache
def served(router: str, seeds: tuple[int, ...], step: int) -> Served:
    """Run a policy at the load of a step.  router: text of its configuration."""
    per_s = _LOWEST_PER_S * STEP_RATIO**step
    experiment = read_experiment(_EXPERIMENT.format(sessions=round(per_s * _SPAN_S), per_s=per_s), "headline")
    return judged(per_s, [run_experiment(experiment, seed, router=router)[1] for seed in seeds])


@cache
def saturated(seeds: tuple[int, ...]) -> int:
    """Return the step at which round-robin saturates."""
    return first(lambda step: served(_ROUND_ROBIN, seeds, step).kept_ratio < KEPT_RATIO, 0)


def first(is_over: Callable[[int], bool], at: int) -> int:
    """Return the lowest step from `at` on that is over, taking all above one that is over to be so."""
    low, width = at - 1, 4
    while not is_over(high := low + width):
        low, width = high, 2 * width
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_over(middle) else (middle, high)
    return high


@bar("twin.headline-ttft", "median ttft of coding agents over round-robin's, at the load where that saturates",
     at_most=0.15, part=6)  # fmt: skip
def _ttft(scale: float) -> Figure:
    seeds = _seeds(scale)
    step = saturated(seeds)
    plain, ours = served(_ROUND_ROBIN, seeds, step), served(_DEFAULT, seeds, step)
    return Figure(value=ours.ttft_p50_s / plain.ttft_p50_s, details=_told(plain, ours))


@bar("twin.headline-throughput", "requests per second of coding agents over round-robin's, at the p95 of ttft that it "
     "has where it saturates", at_least=2.4, part=6)  # fmt: skip
def _throughput(scale: float) -> Figure:
    seeds = _seeds(scale)
    step = saturated(seeds)
    plain = served(_ROUND_ROBIN, seeds, step)
    over = first(lambda step: served(_DEFAULT, seeds, step).ttft_p95_s > plain.ttft_p95_s, step)
    ours = served(_DEFAULT, seeds, over - 1)
    return Figure(value=ours.requests_per_s / plain.requests_per_s, details=_told(plain, ours))


def _told(plain: Served, ours: Served) -> dict[str, Any]:
    return {"round_robin": plain._asdict(), "ours": ours._asdict()}


def _seeds(scale: float) -> tuple[int, ...]:
    return _SEEDS[: max(1, round(scale * len(_SEEDS)))]
