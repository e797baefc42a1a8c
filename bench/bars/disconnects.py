"""Clients that leave: how long until their engine knows, before and after its first byte, streaming and not."""

import asyncio
import math
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple
from urllib.parse import urlsplit

import uvloop

from bench.bars.registry import Figure, bar
from bench.ground import DIRECT, backends, page, pool_of, sum_of
from bench.prompts import Prompts

_TRIES = 10
_PROMPT_CHARS = 2_000
# An answer that nobody cuts short goes on for longer than any try is waited for.
_ANSWER_US = 120_000_000
_PACE_US = 20_000
_WAIT_S = 30.0
# What an engine wrote has reached the router by then; Envoy holds a plain answer back until its end.
_SETTLE_S = 0.05


class Leaving(NamedTuple):
    """When a client goes.  headers: what makes the engine answer so.  is_heard: it has read of the answer's body."""

    name: str
    is_streaming: bool
    headers: dict[str, str]
    is_heard: bool = False


_WAIT = {"x-bench-wait-us": str(_ANSWER_US)}
_CHUNKS = {"x-bench-chunks": str(_ANSWER_US // _PACE_US), "x-bench-pace-us": str(_PACE_US)}
CASES = (
    Leaving("stream, before its first byte", True, _CHUNKS | _WAIT | {"x-bench-head-first": "1"}),
    Leaving("stream, after its first byte", True, _CHUNKS, is_heard=True),
    Leaving("plain, before its first byte", False, _WAIT),
    Leaving("plain, after its first byte", False, _WAIT | {"x-bench-head-first": "1"}),
)


@bar("router.disconnect", "seconds from a client's close until its engine knows, slowest of four cases", unit="s",
     at_most=1.0)  # fmt: skip
def behind_envoy(scale: float) -> Figure:
    """Through Envoy."""
    return uvloop.run(_leave(max(1, round(_TRIES * scale)), ()))


@bar("direct.disconnect", "the same in the direct plane", unit="s", at_most=1.0, part=2)
def direct(scale: float) -> Figure:
    """Without Envoy."""
    return uvloop.run(_leave(max(1, round(_TRIES * scale)), DIRECT))


async def _leave(tries: int, flags: Sequence[str]) -> Figure:
    """Try every case so often, in turn; one client at a time, so that each end is that of its request."""
    took: dict[str, list[float]] = {case.name: [] for case in CASES}
    with backends(1) as (address,):
        async with pool_of([address], flags) as pool:
            for _ in range(tries):
                for case in CASES:
                    took[case.name].append(await _once(case, pool.url, address))
    slowest = {name: max(seconds) for name, seconds in took.items()}
    name = max(slowest, key=slowest.__getitem__)
    details = {"tries": tries, "slowest_ms": {each: round(s * 1e3, 1) for each, s in slowest.items()}}
    return Figure(value=slowest[name], why=f"slowest: {name}", details=details)


async def _once(case: Leaving, url: str, address: str) -> float:
    """Seconds from one client's close to the end of its request at the engine, infinity when that did not come."""
    before = sum_of(await _counts(address), "bench:aborted_total")
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        prompts = Prompts(parts.netloc, _PROMPT_CHARS, stream=case.is_streaming, headers=case.headers)
        writer.writelines(prompts.take())
        async with asyncio.timeout(_WAIT_S):
            while not sum_of(await _counts(address), "vllm:num_requests_running"):
                await asyncio.sleep(0.01)
            if case.is_heard:
                await reader.readuntil(b"data: ")
        await asyncio.sleep(_SETTLE_S)
    finally:
        left_at = perf_counter()
        writer.close()
    deadline = left_at + _WAIT_S
    while perf_counter() < deadline:
        seen = await _counts(address)
        if sum_of(seen, "bench:aborted_total") > before:
            # By the one clock of the machine, so that it does not matter how often one looks.
            return sum_of(seen, "bench:aborted_at_seconds") - left_at
        await asyncio.sleep(0.01)
    return math.inf


async def _counts(address: str) -> str:
    return await page(f"http://{address}/metrics")
