"""Small runs to say something of."""

import numpy as np

from shoal.pool import Signals
from shoal.simulation import Run, Sample, Timeline
from shoal.simulation.results import columns, summarise


def made(
    policy: str = "default",
    seed: int = 1,
    load: float | None = None,
    *,
    slower: float = 1.0,
    is_partial: bool = False,
    slo_s: float = float("nan"),
) -> Run:
    """A run of 60 requests of two tenants on three endpoints, whose times are `slower` times as long."""
    rng = np.random.default_rng(seed)
    samples = []
    for n in range(60):
        ttft_s = float(rng.gamma(2.0, 0.05)) * slower
        endpoint, tenant = f"e{n % 3}", "acme" if n % 4 else "<b>zeta"
        cached = 640 if n % 2 else 0
        ended_s = ttft_s + 2.0
        samples.append(
            Sample(n * 0.5, ttft_s, 0.02, ended_s, 1000, cached, 100, endpoint, tenant, False, f"s{n}", slo_s)
        )
    samples.append(Sample(30.0, float("nan"), float("nan"), 0.1, 500, 0, 0, "", "acme", True, "s60"))
    timeline = Timeline(["e0", "e1", "e2"])
    for look in range(40):
        if timeline.wants():
            timeline.tick(look * 1.0, look % 3)
            for n in range(3 if look < 20 else 2):
                timeline.see(
                    f"e{n}",
                    Signals(
                        running=float(n + look % 5),
                        waiting=float(look % 2),
                        kv_usage_ratio=0.1 * n,
                        prefix_query_tokens=1000.0 * look,
                        prefix_hit_tokens=400.0 * look,
                    ),
                )
    requests = columns(samples)
    result = summarise(requests, ["e0", "e1", "e2"], 32.0, timeline=timeline, is_partial=is_partial)
    return Run(policy, load, seed, result, requests, timeline)
