"""The demo's traffic: cache-aware against round-robin at 1.2 times what round-robin can carry.

Round-robin's saturation is what it completes in a closed loop of 32 chats.  TTFT is compared in an open loop that
offers 1.2 times that, where waiting shows.  Throughput is compared between the closed loops, since an open loop of
1.2 can never complete more than 1.2.
"""

import functools

import numpy as np
import uvloop

from bench.bars.registry import Figure, bar
from bench.bars.shapes import Run, run_once
from shoal.cli.demo import ROUND_ROBIN, traffic
from shoal.workload import poisson_arrivals

_CHATS = 32
_TURNS = 6
_OVER = 1.2


@functools.cache
def _closed(scale: float) -> tuple[Run, Run]:
    plan = traffic(1, chats=_CHATS, turns=max(2, round(_TURNS * scale)))
    round_robin, ours = (uvloop.run(run_once(plan, config)) for config in (ROUND_ROBIN, ""))
    return round_robin, ours


def _void(*runs: Run) -> str:
    failed = sum(run.report.failed for run in runs)
    lag_ms = max(run.report.lag_p99_s for run in runs) * 1e3
    return f"{failed} requests failed" if failed else f"loop lag p99 {lag_ms:.1f} ms" if lag_ms > 5.0 else ""


@bar("demo.ttft", "TTFT p50 over round-robin's, demo traffic at 1.2 x its saturation", at_most=0.15)
def _ttft(scale: float) -> Figure:
    saturated, _ = _closed(scale)
    turns = max(2, round(_TURNS * scale))
    chats_per_s = _OVER * saturated.report.requests_per_s / turns
    plan = traffic(2, chats=2 * _CHATS, turns=turns)
    arrivals = poisson_arrivals(np.random.default_rng(2), count=len(plan.chats), rate_per_s=chats_per_s).tolist()
    round_robin, ours = (uvloop.run(run_once(plan, config, arrivals=arrivals)) for config in (ROUND_ROBIN, ""))
    details = {
        "saturation_requests_per_s": saturated.report.requests_per_s,
        "round_robin_ms": round_robin.report.ttft_p50_s * 1e3,
        "ours_ms": ours.report.ttft_p50_s * 1e3,
        "hit_ratios": [round_robin.report.hit_ratio, ours.report.hit_ratio],
    }
    void = _void(saturated, round_robin, ours)
    if void:
        _closed.cache_clear()
    return Figure(value=ours.report.ttft_p50_s / round_robin.report.ttft_p50_s, void=void, details=details)


@bar("demo.throughput", "output tokens/s over round-robin's, demo traffic, both saturated", at_least=2.0)
def _throughput(scale: float) -> Figure:
    round_robin, ours = _closed(scale)
    void = _void(round_robin, ours)
    if void:
        _closed.cache_clear()
    details = {
        "round_robin_tokens_per_s": round_robin.report.output_tokens_per_s,
        "ours_tokens_per_s": ours.report.output_tokens_per_s,
        "imbalance": [round_robin.imbalance, ours.imbalance],
        "lag_p99_ms": [round_robin.report.lag_p99_s * 1e3, ours.report.lag_p99_s * 1e3],
    }
    value = ours.report.output_tokens_per_s / round_robin.report.output_tokens_per_s
    return Figure(value=value, void=void, details=details)
