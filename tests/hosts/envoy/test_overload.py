"""Memory stays bounded when clients send much and finish nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shoal.hosts.envoy.settings import Limits
from tests.hosts.envoy.envoy_rig import Answer, Rig

pytestmark = pytest.mark.e2e

MIB = 1 << 20
HEAP = 192 * MIB
SETUP = {"limits": Limits(heap_bytes=HEAP), "pickers": 1}
UPLOADS, SENT = 16, 40
HEAD = b"POST /half HTTP/1.1\r\nhost: x\r\ncontent-length: 67000000\r\n\r\n"
# Envoy looks every 50 ms, and a busy machine has it look later: what comes in between is on top.
BOUND = HEAP * 1.6


def _own_bytes(pid: int | None) -> int:
    """What a process has written to, without the pages of its program."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


async def _push(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        for _ in range(SENT):
            writer.write(bytes(MIB))
            await writer.drain()


@asynccontextmanager
async def _peak(live: Rig) -> AsyncIterator[list[int]]:
    """The most that Envoy had while the block ran."""
    found = [0]

    async def watch() -> None:
        while True:
            found[0] = max(found[0], _own_bytes(live.envoy.pid))
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    try:
        yield found
    finally:
        watching.cancel()


async def _small(live: Rig) -> Answer:
    return await live.send("/x", live.engines[0].address)


async def _recovered(live: Rig, writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.close()
    async with asyncio.timeout(20):
        while (await _small(live)).status != 200:
            await asyncio.sleep(0.1)


async def test_half_sent_bodies_cannot_take_all_memory_and_new_requests_are_told(live: Rig) -> None:
    writers: list[asyncio.StreamWriter] = []
    refused: list[Answer] = []
    async with _peak(live) as peak:
        for _ in range(UPLOADS):
            _, writer = await live.raw(HEAD)
            writers.append(writer)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_push(writer), 0.5)
            answer = await _small(live)
            if answer.status != 200:
                refused.append(answer)
    assert peak[0] < BOUND
    assert refused
    assert {(answer.status, answer.error["code"]) for answer in refused} <= {
        (503, "engine_unavailable"),
        (503, "overloaded"),
    }
    await _recovered(live, writers)


async def test_uploads_that_were_let_in_while_they_were_small_are_ended_when_together_they_are_too_large(
    live: Rig,
) -> None:
    writers = [(await live.raw(HEAD + bytes(1000)))[1] for _ in range(UPLOADS)]
    async with asyncio.timeout(20):
        while await live.envoy.admin.gauge("http.public.downstream_rq_active") != UPLOADS:
            await asyncio.sleep(0.05)
    async with _peak(live) as peak:
        await asyncio.gather(*(asyncio.wait_for(_push(writer), 20) for writer in writers), return_exceptions=True)
    assert UPLOADS * SENT * MIB > 2 * BOUND
    assert peak[0] < BOUND
    await _recovered(live, writers)
