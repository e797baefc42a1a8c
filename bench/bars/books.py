"""Many requests of which many are cancelled: every gauge of work in flight comes back to nothing."""

import asyncio

import numpy as np
import uvloop

from bench.bars.registry import Figure, bar
from bench.ground import MODEL, Pool, backends, pool_of, sum_of
from bench.processes import rss_bytes
from shoal.hosts.load import run_load
from shoal.workload import unique

GAUGES = (
    "llm_d_epp_request_running",
    "llm_d_epp_inflight_requests",
    "llm_d_epp_inflight_tokens",
    "shoal_flights_open",
)
"""Every gauge of the router that counts work in flight."""


def in_flight(text: str) -> dict[str, float]:
    """Sums of those gauges on a metrics page, by name."""
    return {name: sum_of(text, name) for name in GAUGES}


@bar("books.cancel", "work in flight left after 100,000 requests, 30 % of them cancelled", at_most=0)
def _cancel(scale: float) -> Figure:
    return uvloop.run(_run(max(1_000, int(100_000 * scale))))


async def _run(requests: int) -> Figure:
    rng = np.random.default_rng(11)
    leaves = np.where(rng.random(requests) < 0.3, rng.uniform(0.0005, 0.06, requests), np.nan).tolist()
    plan = unique(rng, requests=requests, prompt_chars=600, concurrency=64)
    headers = {"x-bench-chunks": "2", "x-bench-wait-us": "10000", "x-bench-pace-us": "30000"}
    with backends(10) as addresses:
        async with pool_of(addresses) as pool:
            most: dict[str, float] = {}
            watching = asyncio.create_task(_watch(pool, most))
            report = await run_load(
                plan,
                pool.url,
                model=MODEL,
                headers=headers,
                leave_after_s=lambda i: leaves[i] if leaves[i] == leaves[i] else None,
            )
            watching.cancel()
            left = await _settled(pool)
            memory_mb = sum(rss_bytes(pid) for pid in pool.pickers) / 2**20
    flat = [name for name in GAUGES if not most.get(name)]
    void = ""
    if report.failed:
        void = f"{report.failed} requests failed: {report.errors}"
    elif flat:
        void = f"gauges that never rose: {flat}"
    details = {"most": most, "left": left, "errors": report.errors, "picker_rss_mb": memory_mb}
    return Figure(value=sum(abs(value) for value in left.values()), void=void, details=details)


async def _watch(pool: Pool, most: dict[str, float]) -> None:
    while True:
        for name, value in in_flight(await pool.metrics()).items():
            most[name] = max(most.get(name, 0.0), value)
        await asyncio.sleep(0.25)


async def _settled(pool: Pool, wait_s: float = 45.0) -> dict[str, float]:
    """The gauges once all are zero, or after `wait_s`: a record that never comes is given up after 30 s."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        left = in_flight(await pool.metrics())
        if not any(left.values()) or loop.time() > deadline:
            return left
        await asyncio.sleep(0.25)
