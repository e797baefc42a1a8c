"""Exact caches against the estimate, on engines whose caches are far smaller than what is asked about.

Both sides are our default scorer on the same bytes and fresh pools of four; every figure is the median over the seeds.
"""

import asyncio
import functools
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import uvloop

from bench.bars.registry import Figure, bar
from bench.ground import Pool, pool_of_engines
from bench.live import ENGINES, steady, until_fresh, void_of
from shoal.hosts.load import Client, LoadReport, run_load
from shoal.wire import read_signals
from shoal.workload import Plan, multi_turn

# 44,800 tokens in all four, where the chats ask about five times as many.
SMALL_CACHE = ("--engine-arg=--blocks=700", "--engine-arg=--block-size=16")
PRECISE = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: token-producer
  parameters: {engine: {}}
- type: precise-prefix-cache-producer
- type: expected-wait-scorer
"""
Pair = tuple[LoadReport, LoadReport]


def _plan(seed: int, scale: float) -> Plan:
    return multi_turn(
        np.random.default_rng(seed),
        chats=max(48, int(120 * scale)),
        turns=6,
        systems=24,
        system_chars=6_000,
        say_chars=(700, 1_300),
        reply_tokens=(16, 32),
        think_s=0.3,
        concurrency=32,
    )


@functools.cache
def compare(seeds: int, scale: float) -> list[Pair]:
    """Pairs (estimated, exact), one per seed."""
    pairs = []
    for seed in range(1, seeds + 1):
        plan = _plan(seed, scale)
        pairs.append((steady(plan, flags=SMALL_CACHE), steady(plan, PRECISE, flags=SMALL_CACHE, is_exact=True)))
    return pairs


def _pairs(scale: float) -> list[Pair]:
    return compare(max(1, round(3 * scale)), scale)


def _table(pairs: list[Pair]) -> list[list[float]]:
    """Per seed: hit ratio, ttft p50 and p95 in ms, seconds; the estimate first."""
    return [
        [
            round(value, 3)
            for run in pair
            for value in (run.hit_ratio, run.ttft_p50_s * 1e3, run.ttft_p95_s * 1e3, run.duration_s)
        ]
        for pair in pairs
    ]


@bar("exact.hit-ratio", "hit ratio over the estimate's, caches far too small", at_least=1.0, part=3)
def _hit_ratio(scale: float) -> Figure:
    pairs = _pairs(scale)
    ratios = [exact.hit_ratio / estimated.hit_ratio for estimated, exact in pairs]
    void = void_of(*[run for pair in pairs for run in pair])
    return Figure(value=float(np.median(ratios)), void=void, details={"ratios": ratios, "runs": _table(pairs)})


@bar("exact.ttft", "TTFT p50 over the estimate's, caches far too small", at_most=1.0, part=3)
def _ttft(scale: float) -> Figure:
    pairs = _pairs(scale)
    ratios = [exact.ttft_p50_s / estimated.ttft_p50_s for estimated, exact in pairs]
    void = void_of(*[run for pair in pairs for run in pair])
    return Figure(value=float(np.median(ratios)), void=void, details={"ratios": ratios, "runs": _table(pairs)})


@bar("exact.restart", "hit ratio from 5 s after a picker's kill over that before it", at_least=0.95, part=3)
def _restart(scale: float) -> Figure:
    before, after = uvloop.run(_killed(scale))
    return Figure(value=after / before if before else 0.0, details={"before": before, "after": after})


async def _killed(scale: float) -> tuple[float, float]:
    """Kill the only picker 17 s into a load; return the hit ratios of the 5 s before it and of 5 to 10 s after it."""
    plan = multi_turn(
        np.random.default_rng(1),
        chats=max(200, int(400 * scale)),
        turns=8,
        systems=24,
        system_chars=6_000,
        think_s=0.5,
        concurrency=32,
    )
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as directory:
        path = Path(directory) / "config.yaml"
        path.write_text(PRECISE)
        async with pool_of_engines(ENGINES, ("--config", str(path))) as pool:
            await until_fresh(pool)
            load = asyncio.create_task(run_load(plan, pool.url, model=await pool.stage.model(), timeout_s=60.0))
            await asyncio.sleep(12.0)
            marks = [await _tokens(pool)]
            await asyncio.sleep(5.0)
            marks.append(await _tokens(pool))
            for pid in pool.pickers:
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(5.0)
            marks.append(await _tokens(pool))
            await asyncio.sleep(5.0)
            marks.append(await _tokens(pool))
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    ratios = [(b[1] - a[1]) / max(1.0, b[0] - a[0]) for a, b in ((marks[0], marks[1]), (marks[2], marks[3]))]
    return ratios[0], ratios[1]


async def _tokens(pool: Pool) -> tuple[float, float]:
    """(prompt tokens looked up, found) by all engines since their start."""
    asked = found = 0.0
    for endpoint in (await pool.stage.picture()).endpoints:
        client = Client(f"http://{endpoint.address}", timeout_s=5.0)
        try:
            signals = read_signals("shoal", bytes((await client.get("/metrics")).body))
        finally:
            await client.close()
        asked += signals.prefix_query_tokens or 0.0
        found += signals.prefix_hit_tokens or 0.0
    return asked, found
