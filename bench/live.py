"""One live run of a plan on a fresh pool of embedded engines, repeated while it is void.

Owns what makes a run mean nothing: a request that failed, or a loop that ran late, the generator's or an engine's.
Where others use the machine as well that happens to one run in five, so each run stands for itself: a void one is
repeated, not the whole bar.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.ground import Pool, pool_of_engines
from shoal.hosts.load import LoadReport, Sample, run_load
from shoal.workload import Plan

ENGINES = 4
_TRIES = 4
_FRESH_S = 30.0


async def run_once(
    plan: Plan,
    config: str = "",
    *,
    arrivals: Sequence[float] | None = None,
    flags: Sequence[str] = (),
    samples: list[Sample] | None = None,
    is_exact: bool = False,
) -> LoadReport:
    """Send a plan to a fresh pool; config: text of a configuration, "" for the default profile.

    samples: filled with each request as it ends.  is_exact: begin when what every engine's cache holds is known.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as directory:
        if config:
            path = Path(directory) / "config.yaml"
            path.write_text(config)
            flags = (*flags, "--config", str(path))
        async with pool_of_engines(ENGINES, flags) as pool:
            if is_exact:
                await until_fresh(pool)
            report = await run_load(plan, pool.url, model=await pool.stage.model(), arrivals=arrivals, samples=samples)
            return await pool.stage.complete(report)


def steady(
    plan: Plan,
    config: str = "",
    *,
    arrivals: Sequence[float] | None = None,
    flags: Sequence[str] = (),
    is_exact: bool = False,
) -> LoadReport:
    """Run a plan, again while the run is void: up to four times, and then the last one is returned."""
    for _ in range(_TRIES):
        report = uvloop.run(run_once(plan, config, arrivals=arrivals, flags=flags, is_exact=is_exact))
        if not void_of(report):
            break
    return report


def void_of(*reports: LoadReport) -> str:
    """Why runs mean nothing, "" when they do."""
    failed = sum(report.failed for report in reports)
    lags = [max(report.lag_p99_s, report.engine_lag_p99_s) * 1e3 for report in reports if report.is_void]
    return f"{failed} requests failed" if failed else f"loop lag p99 {max(lags):.1f} ms" if lags else ""


async def until_fresh(pool: Pool) -> None:
    """Wait until what every engine's cache holds is known; raises TimeoutError when it is not within 30 s."""
    async with asyncio.timeout(_FRESH_S):
        while True:
            picture = await pool.stage.picture()
            if picture.endpoints and all(endpoint.cache == "fresh" for endpoint in picture.endpoints):
                return
            await asyncio.sleep(0.1)
