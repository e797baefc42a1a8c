"""What the direct plane adds to the times that a client sees: to a request by itself, and between two chunks."""

from collections.abc import Sequence
from urllib.parse import urlsplit

import numpy as np
import uvloop

from bench.bars.registry import Figure, bar
from bench.cost import failures
from bench.ground import DIRECT, Pool, backends, pool_of
from bench.prompts import Prompts
from bench.sender import Sent, send
from bench.stamps import Gaps, watch

_ROUNDS = 3
_SINGLE_S = 1.5
_STREAMS = 200
_SECONDS = 5.0
_BUSY = 0.6
_BUSY_RANGE = (0.45, 0.80)
# One chunk per 20 ms and stream, to begin the search with; and no more than cheap engines and a client can do.
_FIRST_PACE_S = 0.020
_MOST_CHUNKS_PER_S = 60_000.0
_SEARCHES = 4
_SEARCH_S = 1.5
_CONTROL_LIMIT_MS = 2.5


@bar("direct.latency-1", "added latency of a small request by itself, p50", unit="ms", at_most=0.25, part=2)
def single(scale: float, flags: Sequence[str] = DIRECT) -> Figure:
    """One connection, small prompts, the engine asked directly and through the router in turn."""

    async def both() -> Figure:
        rows: list[tuple[Sent, Sent]] = []
        with backends(4) as addresses:
            async with pool_of(addresses, flags) as pool:
                for turn in range(_ROUNDS + 1):
                    pair = [
                        await send(url, Prompts(urlsplit(url).netloc, 1_000), connections=1, seconds=_SINGLE_S * scale)
                        for url in (f"http://{addresses[0]}", pool.url)
                    ]
                    if turn:
                        rows.append((pair[0], pair[1]))
        added = [(routed.p50_s - bare.p50_s) * 1e3 for bare, routed in rows]
        details = {"p50_ms": [[round(each.p50_s * 1e3, 3) for each in row] for row in rows], "added_ms": added}
        void = failures(*(each for row in rows for each in row))
        return Figure(value=float(np.median(added)), void=void, details=details)

    return uvloop.run(both())


@bar("direct.gap-p99", "gap added between chunks, p99, 200 streams at 60 % of a core", unit="ms", at_most=5.0, part=2)
def gaps(scale: float, flags: Sequence[str] = DIRECT, streams: int = _STREAMS) -> Figure:
    """Streams as fast as keep the router 60 % busy, through it and, as a control, past it."""

    async def both() -> Figure:
        with backends(4) as addresses:
            bare = [f"http://{address}" for address in addresses]
            async with pool_of(addresses, flags) as pool:
                pace_s = await _pace(pool, streams)
                seconds = max(1.0, _SECONDS * scale)
                rows: list[tuple[Gaps, Gaps]] = []
                for _ in range(_ROUNDS):
                    control = await watch(bare, streams=streams, pace_s=pace_s, seconds=seconds)
                    routed = await _routed(pool, streams, pace_s, seconds)
                    rows.append((control, routed))
                    pace_s = _pace_after(routed, streams)
        return _figure(rows)

    return uvloop.run(both())


async def _routed(pool: Pool, streams: int, pace_s: float, seconds: float) -> Gaps:
    return await watch([pool.url], streams=streams, pace_s=pace_s, seconds=seconds, pids=lambda: pool.routers)


async def _pace(pool: Pool, streams: int) -> float:
    """Find the pace at which the router uses as much of a core as is wanted."""
    pace_s = _FIRST_PACE_S
    for _ in range(_SEARCHES):
        pace_s = _pace_after(await _routed(pool, streams, pace_s, _SEARCH_S), streams)
    return pace_s


def _pace_after(seen: Gaps, streams: int) -> float:
    """The pace that would have made the router as busy as is wanted, at the cost of a chunk that was seen."""
    per_chunk_s = max(seen.cores, 0.01) / max(seen.chunks_per_s, 1.0)
    return max(streams * per_chunk_s / _BUSY, streams / _MOST_CHUNKS_PER_S)


def _figure(rows: Sequence[tuple[Gaps, Gaps]]) -> Figure:
    controls, routed = zip(*rows, strict=True)
    control_ms = float(np.median([each.quantile_ms(0.99) for each in controls]))
    cores = float(np.median([each.cores for each in routed]))
    missing = sum(each.missing for each in (*controls, *routed))
    low, high = _BUSY_RANGE
    void = ""
    if missing:
        void = f"{missing} chunks did not come"
    elif control_ms > _CONTROL_LIMIT_MS:
        void = f"without any router the p99 is {control_ms:.1f} ms already"
    elif not low <= cores <= high:
        void = f"the router used {cores:.2f} cores and not {_BUSY}"
    details = {
        "control_p99_ms": [round(each.quantile_ms(0.99), 3) for each in controls],
        "p50_p99_max_ms": [[round(each.quantile_ms(q), 3) for q in (0.5, 0.99, 1.0)] for each in routed],
        "cores": [round(each.cores, 2) for each in routed],
        "chunks_per_s": [round(each.chunks_per_s) for each in routed],
    }
    return Figure(value=float(np.median([each.quantile_ms(0.99) for each in routed])), void=void, details=details)
