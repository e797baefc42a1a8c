"""Memory stays bounded when clients send much and finish nothing."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from shoal.hosts.envoy.settings import Limits
from tests.hosts.envoy.envoy_rig import Rig

pytestmark = pytest.mark.e2e

MIB = 1 << 20
HEAP = 192 * MIB
SETUP = {"limits": Limits(heap_bytes=HEAP), "pickers": 1}


def _resident_bytes(pid: int | None) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


async def test_half_sent_bodies_cannot_take_all_memory_and_new_requests_are_told(live: Rig) -> None:
    head = b"POST /half HTTP/1.1\r\nhost: x\r\ncontent-length: 67000000\r\n\r\n"
    writers: list[asyncio.StreamWriter] = []
    peak = 0
    refused = None

    async def push(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                writer.write(bytes(MIB))
                await writer.drain()

    for _ in range(16):
        _, writer = await live.raw(head)
        writers.append(writer)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(push(writer), 2)
        peak = max(peak, _resident_bytes(live.envoy.pid))
        answer = await live.send("/x", live.engines[0].address)
        if answer.status == 503:
            refused = answer
    # 16 x 40 MiB were sent.
    assert peak < HEAP * 2.5
    assert refused is not None
    assert refused.error["code"] == "engine_unavailable"
    for writer in writers:
        writer.close()
    async with asyncio.timeout(20):
        while (await live.send("/x", live.engines[0].address)).status != 200:
            await asyncio.sleep(0.1)
