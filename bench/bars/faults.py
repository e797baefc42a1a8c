"""Processes that die under load: who notices, for how long, and whether it mends itself."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import numpy as np
import uvloop

from bench.bars.registry import Figure, bar
from bench.ground import Pool, pool_of_engines
from shoal.hosts.load import LoadReport, run_load
from shoal.workload import Plan, multi_turn

_ENGINES = 4
_BACK_WITHIN_S = 30.0


def _load(scale: float, seed: int) -> Plan:
    return multi_turn(
        np.random.default_rng(seed),
        chats=max(48, int(160 * scale)),
        turns=4,
        systems=8,
        system_chars=4_000,
        reply_tokens=(24, 64),
        concurrency=24,
    )


async def _under_load(
    scale: float, seed: int, strike: Callable[[Pool], Awaitable[dict[str, float]]]
) -> tuple[LoadReport, dict[str, float]]:
    """Run the load, strike a third into it, and return the report with what the strike found."""
    plan = _load(scale, seed)
    halfway = asyncio.Event()

    def progress(done: int, planned: int) -> None:
        if done >= planned // 3:
            halfway.set()

    async with pool_of_engines(_ENGINES) as pool:
        load = asyncio.create_task(
            run_load(plan, pool.url, model=await pool.stage.model(), progress=progress, timeout_s=60.0)
        )
        await halfway.wait()
        found = await strike(pool)
        return await load, found


async def _until(is_true: Callable[[], Awaitable[bool]], wait_s: float, period_s: float = 0.05) -> float:
    """Seconds until `is_true`, infinity when `wait_s` was not enough."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while loop.time() - began < wait_s:
        if await is_true():
            return loop.time() - began
        await asyncio.sleep(period_s)
    return float("inf")


@bar("kill.engine", "requests that fail for another reason than their cut stream, when an engine is killed", at_most=0)
def _kill_engine(scale: float) -> Figure:
    async def strike(pool: Pool) -> dict[str, float]:
        os.kill(pool.engines[0], signal.SIGKILL)

        async def is_back() -> bool:
            picture = await pool.stage.picture()
            # Half-open: it is offered, and the next request decides.
            return sum(each.state in ("ready", "half-open") for each in picture.endpoints) == _ENGINES

        await asyncio.sleep(0.5)
        return {"back_after_s": await _until(is_back, _BACK_WITHIN_S)}

    report, found = uvloop.run(_under_load(scale, 21, strike))
    cut = report.errors.get("cut", 0)
    # At most the streams that ran on the killed engine are cut: a quarter of what is in flight, with some slack.
    wrong = sum(count for kind, count in report.errors.items() if kind not in ("cut", "skipped", "left"))
    wrong += max(0, cut - 24) + (0 if found["back_after_s"] < float("inf") else 1)
    return Figure(value=float(wrong), details={**found, "errors": report.errors, "cut": cut})


@bar("kill.picker", "seconds until the picker routes again after kill -9, with no request lost", unit="s", at_most=2.0)
def _kill_picker(scale: float) -> Figure:
    async def strike(pool: Pool) -> dict[str, float]:
        old = pool.pickers
        for pid in old:
            os.kill(pid, signal.SIGKILL)

        async def routes_again() -> bool:
            new = [pid for pid in pool.pickers if pid not in old]
            if not new:
                return False
            picture = await pool.stage.picture()
            return bool(picture.workers) and not picture.is_partial and picture.requests_total > 0

        return {"back_after_s": await _until(routes_again, _BACK_WITHIN_S)}

    report, found = uvloop.run(_under_load(scale, 22, strike))
    value = found["back_after_s"] if not report.failed else float("inf")
    return Figure(value=value, details={**found, "errors": report.errors})


@bar("restart.imbalance", "requests of the busiest engine over the mean after the picker restarts", at_most=1.5)
def _restart(scale: float) -> Figure:
    async def strike(pool: Pool) -> dict[str, float]:
        for pid in pool.pickers:
            os.kill(pid, signal.SIGKILL)

        async def has_enough() -> bool:
            picture = await pool.stage.picture()
            return picture.requests_total >= 60 and not picture.is_partial

        await asyncio.sleep(0.3)
        waited = await _until(has_enough, _BACK_WITHIN_S)
        # A new worker counts from zero, so its totals are the requests since the restart.
        counts = list((await pool.served()).values())
        return {"imbalance": max(counts) * len(counts) / max(1, sum(counts)), "requests": sum(counts), "s": waited}

    report, found = uvloop.run(_under_load(2 * scale, 23, strike))
    void = "" if found["requests"] >= 60 else "the load ended before the restart could be judged"
    return Figure(value=found["imbalance"], void=void, details={**found, "errors": report.errors})
