"""The default profile against round-robin on three shapes of traffic, on embedded engines.

Both sides send the same bytes to fresh pools of four, seed by seed; every figure is the median over the seeds.
"""

import functools
from collections.abc import Callable

import numpy as np

from bench.bars.registry import Figure, bar
from bench.live import steady, void_of
from shoal.cli.demo import ROUND_ROBIN
from shoal.hosts.load import LoadReport
from shoal.workload import Plan, hot, multi_turn, zipf

Pair = tuple[LoadReport, LoadReport]
SHAPES: dict[str, Callable[[np.random.Generator], Plan]] = {
    # As in the lab in which the peers were compared: four caches of 102,400 characters, and lengths and popularity
    # chosen so that round-robin finds what it found there, 0.6 of the prompts on multi-turn and 0.47 on zipf.
    "multi-turn": lambda rng: multi_turn(
        rng, chats=32, turns=6, systems=8, system_chars=4_000, say_chars=(700, 1_300), reply_tokens=(16, 32)
    ),
    # Questions of 300 tokens and not of 15: else four engines answer 400 requests a second, which is more than two
    # cores can send and pass on, and the run measures them.
    "hot": lambda rng: hot(
        rng, requests=1_200, prompt_chars=6_000, say_chars=1_200, concurrency=48, reply_tokens=(8, 16)
    ),
    "zipf": lambda rng: zipf(
        rng, documents=40, document_chars=8_000, requests=400, exponent=0.8, concurrency=24, reply_tokens=(8, 16)
    ),
}


@functools.cache
def compare(seeds: int) -> dict[str, list[Pair]]:
    """Pairs (round-robin, default) per shape, one per seed."""
    pairs: dict[str, list[Pair]] = {name: [] for name in SHAPES}
    for seed in range(1, seeds + 1):
        for name, make in SHAPES.items():
            plan = make(np.random.default_rng(seed))
            pairs[name].append((steady(plan, ROUND_ROBIN), steady(plan)))
    return pairs


def _seeds(scale: float) -> int:
    return max(1, round(5 * scale))


def _figure(scale: float, shapes: tuple[str, ...], read: Callable[[LoadReport, LoadReport], float]) -> Figure:
    """The worst shape's median over the seeds."""
    pairs = compare(_seeds(scale))
    values = {name: [read(*pair) for pair in pairs[name]] for name in shapes}
    medians = {name: float(np.median(each)) for name, each in values.items()}
    runs = [run for name in shapes for pair in pairs[name] for run in pair]
    void = void_of(*runs)
    details = {"medians": medians, "values": values, "runs": _table(pairs, shapes)}
    return Figure(value=max(medians.values()), void=void, details=details)


def _table(pairs: dict[str, list[Pair]], shapes: tuple[str, ...]) -> dict[str, list[list[float]]]:
    """Per shape and seed: seconds, ttft p50 and p95 in ms, hit ratio, imbalance; round-robin first."""
    return {name: [[round(value, 3) for run in pair for value in _row(run)] for pair in pairs[name]] for name in shapes}


def _row(report: LoadReport) -> tuple[float, float, float, float, float]:
    return (
        report.duration_s, report.ttft_p50_s * 1e3, report.ttft_p95_s * 1e3, report.hit_ratio, report.imbalance,
    )  # fmt: skip


@bar("shapes.ttft-p50", "TTFT p50 over round-robin's, the worst of three shapes", at_most=1.05)
def _p50(scale: float) -> Figure:
    return _figure(scale, tuple(SHAPES), lambda rr, ours: ours.ttft_p50_s / rr.ttft_p50_s)


@bar("shapes.ttft-p95", "TTFT p95 over round-robin's, the worst of three shapes", at_most=1.05)
def _p95(scale: float) -> Figure:
    return _figure(scale, tuple(SHAPES), lambda rr, ours: ours.ttft_p95_s / rr.ttft_p95_s)


@bar("shapes.hot-imbalance", "requests of the busiest engine over the mean, one hot prompt", at_most=1.3)
def _imbalance(scale: float) -> Figure:
    return _figure(scale, ("hot",), lambda _, ours: ours.imbalance)


@bar("shapes.multi-turn-time", "total time over round-robin's, multi-turn", at_most=0.70)
def _multi_turn(scale: float) -> Figure:
    return _figure(scale, ("multi-turn",), lambda rr, ours: ours.duration_s / rr.duration_s)


@bar("shapes.zipf-time", "total time over round-robin's, zipf-shared documents", at_most=0.30)
def _zipf(scale: float) -> Figure:
    return _figure(scale, ("zipf",), lambda rr, ours: ours.duration_s / rr.duration_s)
