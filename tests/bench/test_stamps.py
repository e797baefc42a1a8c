"""A gap that a router adds is seen as that, and one that the engine made is not."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from bench.backend import serve
from bench.stamps import Gaps, watch


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, address: str, stall_s: float) -> None:
    """Pass a stream on, and stand still once in a while."""
    host, _, port = address.rpartition(":")
    there, back = await asyncio.open_connection(host, int(port))
    back.write(await reader.readuntil(b"\r\n\r\n") + await reader.read(65_536))
    count = 0
    while data := await there.read(65_536):
        count += 1
        if stall_s and count % 10 == 0:
            await asyncio.sleep(stall_s)
        writer.write(data)
        if data.endswith(b"\r\n0\r\n\r\n"):
            break
    await writer.drain()
    writer.close()
    back.close()


@asynccontextmanager
async def front(stall_s: float):  # type: ignore[no-untyped-def]
    async with serve(1, "m") as sites:
        act = partial(relay, address=sites[0].address, stall_s=stall_s)
        async with await asyncio.start_server(act, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def seen(stall_s: float, pace_s: float) -> Gaps:
    async def run() -> Gaps:
        async with front(stall_s) as url:
            gaps = await watch([url], streams=4, pace_s=pace_s, seconds=1.5)
        await asyncio.sleep(0.05)
        return gaps

    return asyncio.run(run())


def test_a_router_that_stands_still_adds_its_stop_to_a_gap() -> None:
    gaps = seen(0.2, 0.02)
    assert gaps.missing == 0
    assert len(gaps.added_s) > 100
    assert gaps.quantile_ms(1.0) > 150.0


def test_gaps_of_the_engine_are_not_added_ones() -> None:
    gaps = seen(0.0, 0.1)
    assert gaps.missing == 0
    # Each gap is 100 ms; what a busy machine adds to some of them is less at the median.
    assert abs(gaps.quantile_ms(0.5)) < 50.0


def test_a_stream_that_breaks_off_misses_chunks() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, address: str) -> None:
        host, _, port = address.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        back.write(await reader.readuntil(b"\r\n\r\n") + await reader.read(65_536))
        for _ in range(10):
            writer.write(await there.read(65_536))
            await writer.drain()
        writer.close()
        back.close()

    async def run(act: Callable[..., Awaitable[None]]) -> Gaps:
        async with serve(1, "m") as sites:
            made = partial(act, address=sites[0].address)
            async with await asyncio.start_server(made, "127.0.0.1", 0) as server:
                url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                gaps = await watch([url], streams=2, pace_s=0.02, seconds=1.5)
            await asyncio.sleep(0.05)
            return gaps

    assert asyncio.run(run(cut)).missing > 50
