"""The demo's traffic: cache-aware against round-robin at 1.2 times what round-robin can carry.

Round-robin's saturation is what it completes in a closed loop of 32 chats.  TTFT is compared in an open loop that
offers 1.2 times that, where waiting shows.  Throughput is compared between the closed loops, since an open loop of
1.2 can never complete more than 1.2.
"""

import functools
import subprocess
import sys
import time

import numpy as np

from bench.bars.registry import Figure, bar
from bench.bars.shapes import Pair
from bench.live import steady, void_of
from shoal.cli.demo import ROUND_ROBIN, traffic
from shoal.workload import poisson_arrivals

_CHATS = 32
_TURNS = 8
_OVER = 1.2
_GIVE_UP_S = 600.0


@functools.cache
def _closed(scale: float) -> Pair:
    plan = traffic(1, chats=_CHATS, turns=max(2, round(_TURNS * scale)))
    return steady(plan, ROUND_ROBIN), steady(plan, "")


@bar("demo.ttft", "TTFT p50 over round-robin's, demo traffic at 1.2 x its saturation", at_most=0.15)
def _ttft(scale: float) -> Figure:
    saturated, _ = _closed(scale)
    turns = max(2, round(_TURNS * scale))
    chats_per_s = _OVER * saturated.requests_per_s / turns
    plan = traffic(2, chats=2 * _CHATS, turns=turns)
    arrivals = poisson_arrivals(np.random.default_rng(2), count=len(plan.chats), rate_per_s=chats_per_s).tolist()
    round_robin, ours = (steady(plan, config, arrivals=arrivals) for config in (ROUND_ROBIN, ""))
    details = {
        "saturation_requests_per_s": saturated.requests_per_s,
        "round_robin_ms": round_robin.ttft_p50_s * 1e3,
        "ours_ms": ours.ttft_p50_s * 1e3,
        "hit_ratios": [round_robin.hit_ratio, ours.hit_ratio],
    }
    void = void_of(saturated, round_robin, ours)
    return Figure(value=ours.ttft_p50_s / round_robin.ttft_p50_s, void=void, details=details)


@bar("demo.throughput", "output tokens/s over round-robin's, demo traffic, both saturated", at_least=2.0)
def _throughput(scale: float) -> Figure:
    round_robin, ours = _closed(scale)
    void = void_of(round_robin, ours)
    details = {
        "round_robin_tokens_per_s": round_robin.output_tokens_per_s,
        "ours_tokens_per_s": ours.output_tokens_per_s,
        "imbalance": [round_robin.imbalance, ours.imbalance],
        "lag_p99_ms": [round_robin.lag_p99_s * 1e3, ours.lag_p99_s * 1e3],
    }
    value = ours.output_tokens_per_s / round_robin.output_tokens_per_s
    return Figure(value=value, void=void, details=details)


@bar("demo.seconds", "all of `shoal demo`, as it is typed", unit="s", at_most=90)
def seconds(scale: float, chats: int = _CHATS) -> Figure:
    """From the command to its end, as a newcomer waits for it: both pools, all chats, the table."""
    turns = max(2, round(_TURNS * scale))
    command = [sys.executable, "-m", "shoal.cli", "demo", "--chats", str(chats), "--turns", str(turns)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=_GIVE_UP_S, check=False)
    took_s = time.monotonic() - began
    details = {"chats": chats, "turns": turns, "seconds": took_s, "status": done.returncode}
    if done.returncode:
        said = (done.stdout + done.stderr).splitlines()[-3:]
        return Figure(value=float("inf"), why=" | ".join(said)[:300], details=details)
    return Figure(value=took_s, details=details)
