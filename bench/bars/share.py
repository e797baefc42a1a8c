"""Two pickers against one, on the same bytes: what sharing keeps, and how soon a killed one is back in the picture."""

import asyncio
import functools
import os
import signal
from collections.abc import Callable, Sequence

import numpy as np
import uvloop

from bench.bars.registry import Figure, bar
from bench.bars.shapes import SHAPES
from bench.ground import pool_of_engines, sum_of
from bench.live import ENGINES, steady, void_of
from shoal.hosts.load import LoadReport, Sample, run_load
from shoal.workload import Plan, multi_turn, zipf

_TWO = ("--workers", "2")
_SETTLE_S = 15.0
_DIP_POINTS = 5.0
_WINDOW_S = 1.0


def _chats(rng: np.random.Generator) -> Plan:
    """The multi-turn shape, five times as long: what one chat that moves costs is a twentieth of a point here."""
    return multi_turn(
        rng, chats=160, turns=6, systems=8, system_chars=4_000, say_chars=(700, 1_300), reply_tokens=(16, 32)
    )


@functools.cache
def _pairs(make: Callable[[np.random.Generator], Plan], seeds: int) -> list[tuple[LoadReport, LoadReport]]:
    """(one picker, two pickers) per seed."""
    plans = [make(np.random.default_rng(seed)) for seed in range(1, seeds + 1)]
    return [(steady(plan), steady(plan, flags=_TWO)) for plan in plans]


def _figure(values: Sequence[float], reports: Sequence[LoadReport], **details: object) -> Figure:
    return Figure(
        value=float(np.median(values)),
        void=void_of(*reports),
        details={"values": [round(each, 4) for each in values], **details},
    )


@bar("share.hit-ratio", "hit ratio that two pickers lose against one, multi-turn", unit="pts", at_most=2.0, part=3)
def _hit_ratio(scale: float) -> Figure:
    pairs = _pairs(_chats, max(1, round(5 * scale)))
    lost = [100.0 * (one.hit_ratio - two.hit_ratio) for one, two in pairs]
    return _figure(lost, [run for pair in pairs for run in pair], one=[one.hit_ratio for one, _ in pairs])


@bar("share.imbalance", "busiest engine over the mean, two pickers against one, hot prompt", at_most=1.1, part=3)
def _imbalance(scale: float) -> Figure:
    pairs = _pairs(SHAPES["hot"], max(1, round(5 * scale)))
    ratios = [two.imbalance / one.imbalance for one, two in pairs]
    return _figure(ratios, [run for pair in pairs for run in pair], one=[one.imbalance for one, _ in pairs])


@bar("share.restart", "until the hit ratio is back after kill -9 of one of two pickers", unit="s", at_most=5.0, part=3)
def _restart(scale: float) -> Figure:
    plan = zipf(
        np.random.default_rng(31),
        documents=40,
        document_chars=8_000,
        requests=max(500, int(2_000 * scale)),
        exponent=0.8,
        concurrency=24,
        reply_tokens=(8, 16),
    )
    return uvloop.run(_killed_midway(plan))


async def _killed_midway(plan: Plan) -> Figure:
    """Kill one of two pickers in the middle of a plan; look at the hit ratio, and at what is left in flight."""
    samples: list[Sample] = []
    halfway = asyncio.Event()
    loop = asyncio.get_running_loop()

    def progress(done: int, planned: int) -> None:
        if done >= planned // 2:
            halfway.set()

    async with pool_of_engines(ENGINES, _TWO) as pool:
        model = await pool.stage.model()
        began = loop.time()
        load = asyncio.create_task(run_load(plan, pool.url, model=model, progress=progress, samples=samples))
        await halfway.wait()
        killed_s = loop.time() - began
        os.kill(pool.pickers[-1], signal.SIGKILL)
        report = await load
        left = float("inf")
        until = loop.time() + _SETTLE_S
        while left and loop.time() < until:
            await asyncio.sleep(0.25)
            page = await pool.metrics()
            left = sum(sum_of(page, name) for name in ("shoal_sharing_bookings", "llm_d_epp_inflight_requests"))
    before = [each for each in samples if killed_s / 2 <= each.at_s < killed_s - 0.5]
    usual = _hits(before)
    windows = _windows(samples, killed_s)
    low = [at for at, ratio in windows if ratio < usual - _DIP_POINTS / 100.0]
    failed = sum(count for kind, count in report.errors.items())
    # A window that is low is over at its end; what is still in flight when all has ended never comes back.
    value = float("inf") if left or failed else max(low) + _WINDOW_S if low else 0.0
    earlier = _windows([each for each in samples if each.at_s < killed_s], killed_s / 2)
    details = {"usual": usual, "earlier": earlier, "windows": windows, "left_in_flight": left, "errors": report.errors}
    void = "" if len(windows) >= 3 and len(before) >= 50 else "the load ended too soon to judge"
    return Figure(value=value, void=void, details=details)


def _hits(samples: Sequence[Sample]) -> float:
    return sum(each.cached_tokens for each in samples) / max(1, sum(each.prompt_tokens for each in samples))


def _windows(samples: Sequence[Sample], from_s: float) -> list[tuple[float, float]]:
    """(seconds after `from_s`, hit ratio) of each window in which enough was asked."""
    found = []
    last_s = max(each.at_s for each in samples)
    for number in range(int((last_s - from_s) / _WINDOW_S)):
        at_s = from_s + number * _WINDOW_S
        inside = [each for each in samples if at_s <= each.at_s < at_s + _WINDOW_S]
        if len(inside) >= 10:
            found.append((number * _WINDOW_S, round(_hits(inside), 4)))
    return found
