"""Tenants that crowd a pool in virtual time: who sends what, when, and what came of it.

Owns the traffic and its figures; what is promised of them is in `bench.bars.flow`.  Everything is drawn from seeds, so
a figure is the same on every machine.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from shoal.engine import PROFILES, EngineConfig
from shoal.simulation.cluster import Cluster, ClusterConfig
from shoal.simulation.nodes import NodeConfig
from shoal.simulation.prompts import Prompt
from shoal.simulation.results import Sample
from shoal.simulation.sessions import Session, Turn


class Tenant(NamedTuple):
    """One tenant's traffic.  per_s: requests per second, at random times; 0 for all of `burst` at `begins_s`."""

    name: str
    per_s: float
    prompt_tokens: int
    output_tokens: int
    begins_s: float = 0.0
    burst: int = 0


def traffic(tenants: list[Tenant], duration_s: float, seed: int) -> list[Session]:
    """Return every request as a session of its own, by arrival; sizes vary by half around the tenant's."""
    made = []
    for number, tenant in enumerate(tenants):
        rng = np.random.default_rng([seed, number])
        if tenant.burst:
            times = tenant.begins_s + 1e-4 * np.arange(tenant.burst)
        else:
            count = rng.poisson(tenant.per_s * duration_s)
            times = tenant.begins_s + np.sort(rng.random(count)) * duration_s
        for place, at in enumerate(times.tolist()):
            prompt = max(1, round(tenant.prompt_tokens * (0.5 + rng.random())))
            output = max(1, round(tenant.output_tokens * (0.5 + rng.random())))
            turn = partial(_once, int(rng.integers(1, 2**62)), prompt, output)
            made.append(Session(f"{tenant.name}-{place}", turn, at, tenant.name))
    return sorted(made, key=lambda session: session.arrives_s or 0.0)


def _once(content: int, prompt: int, output: int) -> Iterator[Turn]:
    yield Turn(Prompt.empty(0).extend(content, prompt), output)


def run(
    tenants: list[Tenant],
    duration_s: float,
    *,
    config: str = "",
    engines: int = 2,
    profile: str = "h100-8b",
    step_tokens: int = 2048,
    seed: int = 1,
) -> Cluster:
    """Run the traffic and let what was sent come to its end."""
    engine = EngineConfig(profile=PROFILES[profile], max_num_batched_tokens=step_tokens)
    nodes = tuple(NodeConfig(id=f"e{number}", engine=engine) for number in range(engines))
    cluster = Cluster(ClusterConfig(nodes=nodes, router=config, seed=seed))
    cluster.run(traffic(tenants, duration_s, seed))
    return cluster


def tokens_between(samples: list[Sample], begin_s: float, end_s: float) -> dict[str, float]:
    """Tokens that were computed for each tenant's requests that ended in the window."""
    found: dict[str, float] = {}
    for each in samples:
        if not each.is_failed and begin_s <= each.arrived_s + each.duration_s < end_s:
            tokens = each.prompt_tokens - each.cached_tokens + each.output_tokens
            found[each.tenant] = found.get(each.tenant, 0.0) + tokens
    return found


def ttft_s(samples: list[Sample], tenant: str, percent: float, begin_s: float, end_s: float) -> float:
    """The percentile of the time to first token of a tenant's requests that arrived in the window."""
    values = [
        each.ttft_s
        for each in samples
        if each.tenant == tenant and begin_s <= each.arrived_s < end_s and each.ttft_s == each.ttft_s
    ]
    return float(np.percentile(values, percent)) if values else float("nan")
