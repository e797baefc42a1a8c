"""The twin: how many requests a second of one core serves, the router's decisions included, and how near its fast
engines are to those that take every step.

Seconds are CPU time of this thread, which on a machine that does nothing else is wall time.  Answers have 300 tokens;
prompts are chats of four turns over shared system prompts of 2,000 tokens.
"""

import resource
import time
from collections.abc import Iterator

import numpy as np

from bench.bars.registry import Figure, bar
from shoal.engine import PROFILES, EngineConfig
from shoal.simulation import Cluster, ClusterConfig, NodeConfig, Session
from shoal.simulation.arrivals import Arrivals
from shoal.simulation.results import Result, summarise
from shoal.simulation.workloads import MultiTurn

_TURNS = 4
_REPLY_TOKENS = 300
_MEMORY_GIB = 4.0
_SEEDS = (7, 8, 9)
_FIGURES = (
    "ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s", "e2e_p50_s", "e2e_p95_s", "hit_ratio",
)  # fmt: skip


def chats(endpoints: int, requests: int, per_endpoint_s: float, seed: int = 7) -> Iterator[Session]:
    """Chats that come at random, so that each endpoint gets a request every `per_endpoint_s` on average."""
    rng = np.random.default_rng(seed)
    recipe = MultiTurn(
        sessions=max(1, requests // _TURNS),
        turns=(_TURNS, _TURNS),
        systems=2 * endpoints,
        reply_tokens=(_REPLY_TOKENS, _REPLY_TOKENS),
    )
    rate_per_s = endpoints / per_endpoint_s / _TURNS
    yield from Arrivals(kind="poisson", rate_per_s=rate_per_s).spread(recipe.make(rng), rng)


def fleet(endpoints: int, *, is_aggregate: bool, blocks: int = 0) -> Cluster:
    """So many H100 with a model of 8B behind the default profile."""
    engine = EngineConfig(profile=PROFILES["h100-8b"], num_blocks=blocks)
    nodes = (NodeConfig(id=f"e{n}", engine=engine, is_aggregate=is_aggregate) for n in range(endpoints))
    return Cluster(ClusterConfig(nodes=tuple(nodes), seed=1))


def _result(cluster: Cluster) -> Result:
    return summarise(cluster.samples, [node.id for node in cluster.config.nodes], cluster.loop.now)


def _speed(requests: int, *, is_aggregate: bool) -> Figure:
    cluster = fleet(100, is_aggregate=is_aggregate)
    began = time.thread_time()
    cluster.run(chats(100, requests, 1.0))
    spent = time.thread_time() - began
    result = _result(cluster)
    details = {
        "requests": result.requests,
        "failed": result.failed,
        "virtual_s": round(result.duration_s, 1),
        "ttft_p50_s": result.ttft_p50_s,
        "tpot_p50_s": result.tpot_p50_s,
        "hit_ratio": result.hit_ratio,
    }
    return Figure(value=result.requests / spent, details=details)


@bar("twin.speed-step", "requests simulated by a second of one core, 100 endpoints, 300 tokens each, step-level",
     unit="/s", at_least=1_500, part=6)  # fmt: skip
def _step(scale: float) -> Figure:
    return _speed(max(400, round(4_000 * scale)), is_aggregate=False)


@bar("twin.speed-aggregate", "the same with aggregate engines", unit="/s", at_least=2_500, part=6)
def _aggregate(scale: float) -> Figure:
    return _speed(max(400, round(4_000 * scale)), is_aggregate=True)


@bar("twin.aggregate-error", "aggregate against step-level engines: largest error of ttft, tpot, e2e and hit ratio",
     at_most=0.05, part=6)  # fmt: skip
def _error(scale: float) -> Figure:
    """Ten endpoints at loads from idle to saturated, with caches that overflow, and with memory that runs out.

    Figures are means over seeds: which requests wait for memory, and so a p95, hangs on chance in either engine.
    """
    errors: dict[str, float] = {}
    requests = max(400, round(2_000 * scale))
    for name, per_endpoint_s, blocks in (
        ("light", 1.0, 0),
        ("busy", 0.12, 0),
        ("full", 0.05, 0),
        ("evicting", 0.3, 2_000),
        ("preempting", 0.08, 1_200),
    ):
        means = []
        for is_aggregate in (False, True):
            rows = []
            for seed in _SEEDS:
                cluster = fleet(10, is_aggregate=is_aggregate, blocks=blocks)
                cluster.run(chats(10, requests, per_endpoint_s, seed))
                result = _result(cluster)
                rows.append([getattr(result, figure) for figure in _FIGURES])
            means.append(dict(zip(_FIGURES, np.mean(rows, axis=0).tolist(), strict=True)))
        step, aggregate = means
        for figure in _FIGURES:
            is_ratio = figure == "hit_ratio"
            gap = aggregate[figure] - step[figure]
            errors[f"{name}, {figure}"] = gap if is_ratio else gap / step[figure]
    worst = max(errors, key=lambda each: abs(errors[each]))
    return Figure(value=abs(errors[worst]), why=worst, details={name: round(each, 5) for name, each in errors.items()})


@bar("twin.million", "1,000 endpoints, one hour, a million requests, aggregate engines", unit="min", at_most=15, part=6)
def _million(scale: float) -> Figure:
    """A share of it at a smaller scale; the minutes are what the whole would take, the memory is that of the share."""
    requests = max(2_000, round(1_000_000 * scale))
    cluster = fleet(1_000, is_aggregate=True)
    began = time.thread_time()
    cluster.run(chats(1_000, requests, 3.6))
    minutes = (time.thread_time() - began) / 60
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    details = {
        "requests": len(cluster.samples),
        "failed": sum(sample.is_failed for sample in cluster.samples),
        "virtual_s": round(cluster.loop.now, 1),
        "minutes_spent": minutes,
        "resident_gib": gib,
    }
    void = f"it took {gib:.1f} GiB, more than {_MEMORY_GIB:g}" if gib > _MEMORY_GIB else ""
    return Figure(value=minutes * 1_000_000 / len(cluster.samples), void=void, details=details)
