"""How fast the twin is: requests that it serves in a second of one core, the router's decisions included.

Seconds are CPU time of this thread, which on a machine that does nothing else is wall time.  Every answer has 300
tokens; prompts are chats of some turns over shared system prompts.
"""

import resource
import time

import numpy as np

from bench.bars.registry import Figure, bar
from shoal.engine import PROFILES, EngineConfig
from shoal.simulation import Cluster, ClusterConfig, NodeConfig
from shoal.simulation.results import summarise
from shoal.simulation.workloads import Arrivals, MultiTurn

_REPLY_TOKENS = 300
_REQUESTS = 4_000


def _run(endpoints: int, requests: int, per_endpoint_s: float) -> tuple[Cluster, float]:
    """Serve so many requests, one a `per_endpoint_s` on each endpoint; returns the cluster and its seconds."""
    engine = EngineConfig(profile=PROFILES["h100-8b"])
    nodes = tuple(NodeConfig(id=f"e{n}", engine=engine) for n in range(endpoints))
    rng = np.random.default_rng(7)
    turns = 4
    recipe = MultiTurn(
        sessions=max(1, requests // turns), turns=(turns, turns), systems=2 * endpoints,
        reply_tokens=(_REPLY_TOKENS, _REPLY_TOKENS),
    )  # fmt: skip
    rate = endpoints / per_endpoint_s / turns
    sessions = Arrivals(kind="poisson", rate_per_s=rate).spread(recipe.make(rng), rng)
    cluster = Cluster(ClusterConfig(nodes=nodes, seed=1))
    began = time.thread_time()
    cluster.run(sessions)
    return cluster, time.thread_time() - began


def _figure(endpoints: int, requests: int, per_endpoint_s: float) -> Figure:
    cluster, spent = _run(endpoints, requests, per_endpoint_s)
    result = summarise(cluster.samples, [node.id for node in cluster.config.nodes], cluster.loop.now)
    details = {
        "requests": result.requests,
        "failed": result.failed,
        "virtual_s": round(result.duration_s, 1),
        "ttft_p50_s": result.ttft_p50_s,
        "tpot_p50_s": result.tpot_p50_s,
        "hit_ratio": result.hit_ratio,
        "resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    return Figure(value=result.requests / spent, details=details)


@bar("twin.speed-step", "requests simulated by a second of one core, 100 endpoints, 300 tokens each, step-level",
     unit="/s", at_least=1_500, part=6)  # fmt: skip
def _step(scale: float) -> Figure:
    return _figure(100, max(400, round(_REQUESTS * scale)), 1.0)
