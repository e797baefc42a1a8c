"""What a request costs the picker, through a real Envoy, with everything on that is on by default."""

import asyncio
import json
from collections.abc import Sequence

import numpy as np
import uvloop

from bench.bars.registry import Figure, bar
from bench.ground import MODEL, Pool, backends, pool_of
from bench.processes import total_cpu_s
from shoal.hosts.load import LoadReport, run_load
from shoal.workload import unique

_IDLE_S = 2.0
# 1,000 chunks each: 4,000 chunks a second through Envoy.
_STREAM_RATE_PER_S = 4.0


async def cpu_per_request(
    pool: Pool,
    *,
    requests: int,
    prompt_chars: int,
    concurrency: int,
    chunks: int = 0,
    seed: int = 1,
    rate_per_s: float = 0.0,
) -> tuple[float, LoadReport]:
    """Return picker CPU seconds per request, and the report.

    Unique prompts.  chunks: makes the answers streams of so many chunks.  rate_per_s: 0 for a closed loop.  A tenth of
    the requests go first, unmeasured.
    """
    headers = {"x-bench-chunks": str(chunks)} if chunks else None
    warm, plan = (
        unique(np.random.default_rng(seed + i), requests=n, prompt_chars=prompt_chars, concurrency=concurrency)
        for i, n in enumerate((max(concurrency, requests // 10), requests))
    )
    for each in (warm, plan):
        before = total_cpu_s(pool.pickers)
        arrivals = (np.arange(each.requests) / rate_per_s).tolist() if rate_per_s else None
        report = await run_load(each, pool.url, model=MODEL, stream=bool(chunks), headers=headers, arrivals=arrivals)
        await asyncio.sleep(0.3)  # the records of the last requests come after their ends
        spent = total_cpu_s(pool.pickers) - before
    return spent / requests, report


async def idle_cpu(pool: Pool) -> float:
    """Return the CPU seconds per second that the picker uses while nobody asks for anything."""
    before = total_cpu_s(pool.pickers)
    await asyncio.sleep(_IDLE_S)
    return (total_cpu_s(pool.pickers) - before) / _IDLE_S


def figure_of(per_request_s: float, report: LoadReport, **details: object) -> Figure:
    """The figure in microseconds; void when requests failed."""
    void = f"{report.failed} of {report.requests} failed: {report.errors}" if report.failed else ""
    seen = {"requests": report.requests, "requests_per_s": report.requests_per_s, "e2e_p50_s": report.e2e_p50_s}
    return Figure(value=per_request_s * 1e6, void=void, details={**seen, **details})


async def _one(count: int, requests: int, prompt_chars: int, concurrency: int, flags: Sequence[str] = ()) -> Figure:
    with backends(count) as addresses:
        async with pool_of(addresses, flags) as pool:
            spent, report = await cpu_per_request(
                pool, requests=requests, prompt_chars=prompt_chars, concurrency=concurrency
            )
            return figure_of(spent, report, idle_cpu_ratio=await idle_cpu(pool))


def small(scale: float, flags: Sequence[str] = ()) -> Figure:
    """A small request, 10 endpoints."""
    return uvloop.run(_one(10, max(200, int(8_000 * scale)), 1_000, 16, flags))


def large(scale: float, flags: Sequence[str] = ()) -> Figure:
    """A request of 400 KB, 100 endpoints."""
    return uvloop.run(_one(100, max(50, int(1_500 * scale)), 400_000, 4, flags))


@bar("router.cpu-small", "picker CPU of a small request, 10 endpoints, unique prompts", unit="us", at_most=450)
def _small(scale: float) -> Figure:
    return small(scale)


@bar("router.cpu-400k", "picker CPU of a 400 KB request, 100 endpoints, unique prompts", unit="us", at_most=2_500)
def _large(scale: float) -> Figure:
    return large(scale)


@bar("router.cpu-stream", "picker CPU of a 1,000-chunk answer over that of a 10-chunk one", at_most=1.1)
def _stream(scale: float) -> Figure:
    async def both() -> Figure:
        with backends(4) as addresses:
            async with pool_of(addresses) as pool:
                spent: dict[int, list[float]] = {10: [], 1_000: []}
                for _ in range(3):
                    for chunks in spent:
                        # At one and the same rate: how often the picker is woken, and what it does between requests,
                        # costs the same in both.
                        took, report = await cpu_per_request(
                            pool,
                            requests=max(24, int(120 * scale)),
                            prompt_chars=1_000,
                            concurrency=4,
                            chunks=chunks,
                            rate_per_s=_STREAM_RATE_PER_S,
                        )
                        if report.failed:
                            return Figure(value=float("nan"), void=f"requests failed: {json.dumps(report.errors)}")
                        spent[chunks].append(took)
                low, high = (float(np.median(spent[chunks])) for chunks in spent)
                return Figure(value=high / low, details={"us_10_chunks": low * 1e6, "us_1000_chunks": high * 1e6})

    return uvloop.run(both())
