"""Many open streams at once: nothing passes unrouted, nothing overflows, and each costs little memory."""

import asyncio

import numpy as np
import uvloop

from bench.bars.registry import Figure, bar
from bench.ground import MODEL, Pool, backends, lift_file_limit, page, pool_of, sum_of
from bench.processes import rss_bytes
from shoal.hosts.load import Answer, Client
from shoal.workload import chat_body, unique

_RAMP_PER_S = 400.0
_HOLD_S = 10.0


@bar("router.streams-5000", "picker memory per open stream at 5,000 streams; none unrouted", unit="KB", at_most=40)
def _streams(scale: float) -> Figure:
    count = max(200, int(5_000 * scale))
    lift_file_limit(4 * count)
    return uvloop.run(_hold(count))


async def _hold(count: int) -> Figure:
    with backends(10) as addresses:
        async with pool_of(addresses) as pool:
            await _open(pool, 100, hold_s=0.1)
            before = _memory(pool)
            peak = {"bytes": before, "running": 0.0}
            watching = asyncio.create_task(_watch(pool, addresses, peak))
            answers = await _open(pool, count, hold_s=_HOLD_S)
            watching.cancel()
            unrouted = sum([sum_of(await page(f"http://{a}/metrics"), "bench:unrouted_total") for a in addresses])
    bad = [answer for answer in answers if answer.failure or answer.status != 200 or not answer.read().is_done]
    per_stream = (peak["bytes"] - before) / count / 1024
    is_clean = not bad and not unrouted and peak["running"] >= count
    details = {
        "open_at_once": peak["running"],
        "unrouted": unrouted,
        "failed": len(bad),
        "kinds": sorted({answer.failure or str(answer.status) for answer in bad}),
        "rss_before_mb": before / 2**20,
        "kb_per_stream": per_stream,
    }
    # A request lost or unrouted breaks the promise whatever the memory says.
    return Figure(value=per_stream if is_clean else float("inf"), details=details)


async def _open(pool: Pool, count: int, *, hold_s: float) -> list[Answer]:
    """Open `count` streams at a steady rate, the last of them while all others are still open."""
    plan = unique(np.random.default_rng(count), requests=count, prompt_chars=800)
    ramp_s = count / _RAMP_PER_S
    client = Client(pool.url, timeout_s=120.0)

    async def one(i: int) -> Answer:
        await asyncio.sleep(i / _RAMP_PER_S)
        # Two chunks: the head and the first at once, the last when everybody has been open together for a while.
        wait_us = int((ramp_s + hold_s - i / _RAMP_PER_S) * 1e6)
        headers = {"x-bench-chunks": "2", "x-bench-pace-us": str(wait_us)}
        return await client.post("/v1/chat/completions", chat_body(plan.chats[i], [], model=MODEL), headers=headers)

    try:
        return list(await asyncio.gather(*(one(i) for i in range(count))))
    finally:
        await client.close()


async def _watch(pool: Pool, addresses: list[str], peak: dict[str, float]) -> None:
    while True:
        await asyncio.sleep(0.5)
        peak["bytes"] = max(peak["bytes"], _memory(pool))
        running = sum([sum_of(await page(f"http://{a}/metrics"), "vllm:num_requests_running") for a in addresses])
        peak["running"] = max(peak["running"], running)


def _memory(pool: Pool) -> float:
    return float(sum(rss_bytes(pid) for pid in pool.pickers))
