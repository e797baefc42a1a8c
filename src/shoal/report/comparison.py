"""Policies side by side: means over seeds with their intervals, and differences pair by pair.

Owns which figures are shown and how they are compared.  Every policy has the same arrivals with the same seed, so that
differences are taken seed by seed: what the seeds differ in falls out.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.simulation import Result, Run

Z_95 = 1.959964
# Student's t for a two-sided 95 % interval of the mean of 2 to 10 values; beyond that its expansion is good to 0.001.
_T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


class Figure(NamedTuple):
    """One figure of a run.  better: -1 when less is better, 1 when more is, 0 when neither."""

    key: str
    title: str
    read: Callable[[Result], float]
    digits: int
    better: int


FIGURES: tuple[Figure, ...] = (
    Figure("ttft_p50", "TTFT p50 ms", lambda run: run.ttft_p50_s * 1e3, 0, -1),
    Figure("ttft_p95", "TTFT p95 ms", lambda run: run.ttft_p95_s * 1e3, 0, -1),
    Figure("ttft_p99", "TTFT p99 ms", lambda run: run.ttft_p99_s * 1e3, 0, -1),
    Figure("tpot_p50", "TPOT p50 ms", lambda run: run.tpot_p50_s * 1e3, 2, -1),
    Figure("tpot_p95", "TPOT p95 ms", lambda run: run.tpot_p95_s * 1e3, 2, -1),
    Figure("e2e_p50", "e2e p50 s", lambda run: run.e2e_p50_s, 2, -1),
    Figure("e2e_p95", "e2e p95 s", lambda run: run.e2e_p95_s, 2, -1),
    Figure("hit", "hit %", lambda run: run.hit_ratio * 100, 1, 1),
    Figure("imbalance", "imbalance", lambda run: run.imbalance, 2, 0),
    Figure("handed", "handed over %", lambda run: run.prefilled_elsewhere / max(1, run.requests) * 100, 1, 0),
    Figure("tokens", "tokens/s", lambda run: run.output_tokens_per_s, 0, 1),
    Figure("requests", "requests/s", lambda run: run.requests_per_s, 2, 1),
    Figure("slo", "SLO met %", lambda run: run.slo_ratio * 100, 1, 1),
    Figure("regret", "regret %", lambda run: math.nan if run.regret_ratio is None else run.regret_ratio * 100, 1, 0),
    Figure("failed", "failed", lambda run: float(run.failed), 0, -1),
)


def told(runs: Sequence[Run]) -> tuple[Figure, ...]:
    """Return the figures that say something of these runs.

    SLOs where a client has one, regret with a reference, what was handed over where an engine prefilled for another.
    """
    absent = set()
    if not any(run.result.slo_requests for run in runs):
        absent.add("slo")
    if all(run.result.regret_ratio is None for run in runs):
        absent.add("regret")
    if not any(run.result.prefilled_elsewhere for run in runs):
        absent.add("handed")
    return tuple(figure for figure in FIGURES if figure.key not in absent)


class Cell(NamedTuple):
    """A figure over the seeds.  half: half the width of the 95 % interval of its mean, NaN with one seed.

    change: relative to the first policy at the same load, seed by seed, 0.1 for a tenth more; change_half as `half`.
    Both are NaN for the first policy itself and where that one's figure is 0.
    """

    mean: float
    half: float
    change: float
    change_half: float

    @property
    def is_clear(self) -> bool:
        """Whether the change is more than what seeds alone could be; never with one seed."""
        return abs(self.change) > self.change_half


class Row(NamedTuple):
    """One policy at one load.  cells: by the key of the figure.  requests: of all its runs."""

    policy: str
    load: float | None
    seeds: int
    requests: int
    cells: dict[str, Cell]


def compare(runs: Sequence[Run], figures: Sequence[Figure] = FIGURES) -> list[Row]:
    """Return a row per policy and load, in the order of their first runs.

    Runs that were cut short are left out, unless there is no other.
    """
    whole = [run for run in runs if not run.result.is_partial] or list(runs)
    groups: dict[tuple[str, float | None], dict[int, Result]] = {}
    for run in whole:
        groups.setdefault((run.policy, run.load), {})[run.seed] = run.result
    first = whole[0].policy if whole else ""
    rows = []
    for (policy, load), results in groups.items():
        against = groups.get((first, load), {}) if policy != first else {}
        cells = {figure.key: _cell(figure, results, against) for figure in figures}
        requests = sum(result.requests for result in results.values())
        rows.append(Row(policy, load, len(results), requests, cells))
    return rows


def short(policy: str) -> str:
    """Return a policy's name without its folder and ending."""
    return policy.rsplit("/", 1)[-1].removesuffix(".yaml")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval, NaN for fewer than two values."""
    count = len(values)
    if not count:
        return math.nan, math.nan
    mean = math.fsum(values) / count
    if count < 2:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, t_95(count) * math.sqrt(variance / count)


def t_95(count: int) -> float:
    """Return Student's t for a two-sided 95 % interval of the mean of `count` values, 2 or more."""
    if count - 2 < len(_T_95):
        return _T_95[count - 2]
    z, left = Z_95, 1.0 / (count - 1)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + left * (first + left * (second + left * third))


def _cell(figure: Figure, results: dict[int, Result], against: dict[int, Result]) -> Cell:
    values = [figure.read(result) for result in results.values()]
    # A seed of which the reference is not known has no regret.
    mean, half = interval([value for value in values if not math.isnan(value)])
    pairs = [(figure.read(result), figure.read(against[seed])) for seed, result in results.items() if seed in against]
    if not pairs or any(base == 0 for _, base in pairs):
        return Cell(mean, half, math.nan, math.nan)
    return Cell(mean, half, *interval([value / base - 1.0 for value, base in pairs]))
