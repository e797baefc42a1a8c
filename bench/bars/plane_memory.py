"""What connections that do nothing cost the direct plane's memory: idle ones, and bodies that never come whole."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import uvloop

from bench.bars.registry import Figure, bar
from bench.ground import DIRECT, MODEL, Pool, backends, lift_file_limit, pool_of
from bench.processes import rss_bytes, total_cpu_s
from bench.prompts import Prompts
from bench.sender import Sent, send

_OPENING_AT_ONCE = 100
_SETTLE_S = 2.0
_WARM_REQUESTS = 3_000
_BODY_BYTES = 1 << 20
_BUFFER_BYTES = 128 << 20
# Of each connection beside the bodies: parsers, head, transport, the pieces that wait in its socket's name.
_CONNECTION_BYTES = 32 << 10
_LIMITED = """\
apiVersion: shoal.dev/v1alpha1
kind: Pool
limits:
  max_buffered_bytes: {bytes}
"""


class Held(asyncio.Protocol):
    """A connection that writes what it is given and then waits.  status: of the first answer, 0 before."""

    def __init__(self) -> None:
        self.status = 0
        self.is_open = False
        self._waiter: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but ancestry
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self.status = self.status or int(data[9:12])
        self._answered()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._answered()

    def write(self, data: bytes) -> None:
        """Send without waiting."""
        if self._transport is not None:
            self._transport.write(data)

    async def ask(self, request: bytes) -> None:
        """Send a request and wait for the beginning of its answer."""
        self._waiter = asyncio.get_running_loop().create_future()
        self.write(request)
        await self._waiter

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _answered(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def hold(url: str, count: int, first: Callable[[Held], object]) -> list[Held]:
    """Open `count` connections, a hundred at a time, and do `first` with each; what it returns is awaited if it can."""
    loop = asyncio.get_running_loop()
    parts = urlsplit(url)
    held: list[Held] = []

    async def open_some(share: range) -> None:
        for _ in share:
            connection = Held()
            await loop.create_connection(partial(_same, connection), parts.hostname or "127.0.0.1", parts.port or 80)
            held.append(connection)
            done = first(connection)
            if asyncio.iscoroutine(done):
                await done

    await asyncio.gather(*(open_some(range(i, count, _OPENING_AT_ONCE)) for i in range(_OPENING_AT_ONCE)))
    return held


def _same(connection: Held) -> Held:
    return connection


def _memory(pool: Pool) -> int:
    return sum(rss_bytes(pid) for pid in pool.routers)


@bar("direct.idle-10k", "worker memory per open idle connection, 10,000 of them", unit="KB", at_most=15, part=2)
def idle(scale: float, flags: Sequence[str] = DIRECT) -> Figure:
    """Connections that were never used, and ones that have had an answer; the dearer kind counts."""
    count = max(500, int(10_000 * scale))
    allowed = lift_file_limit(2 * count + 1_000)
    if allowed < count + 500:
        return Figure(value=float("nan"), void=f"a process may open {allowed} files here; raise the hard limit")
    return uvloop.run(_idle(count, flags))


async def _idle(count: int, flags: Sequence[str]) -> Figure:
    kinds: dict[str, float] = {}
    faults: list[str] = []
    cores: dict[str, float] = {}
    with backends(4) as addresses:
        for kind in ("fresh", "answered"):
            # A pool each: memory that one kind has freed would hide what the other takes.
            async with pool_of(addresses, flags) as pool:
                prompts = Prompts(urlsplit(pool.url).netloc, 1_000, unique=False)
                await send(pool.url, prompts, connections=16, requests=_WARM_REQUESTS)
                await asyncio.sleep(_SETTLE_S)
                before = _memory(pool)
                ask = _asking(prompts) if kind == "answered" else _nothing
                held = await hold(pool.url, count, ask)
                await asyncio.sleep(_SETTLE_S)
                kinds[kind] = (_memory(pool) - before) / count / 1024
                cores[kind] = await _cores(pool)
                closed = sum(not each.is_open for each in held)
                refused = sum(each.status not in (0, 200) for each in held)
                sent = await send(pool.url, prompts, connections=2, requests=50)
                if closed or refused or sent.errors:
                    faults.append(f"{kind}: {closed} closed, {refused} refused, {sent.errors or 'none'} failed beside")
                for each in held:
                    each.close()
    details = {"kb": kinds, "connections": count, "cores_while_idle": cores}
    value = float("inf") if faults else max(kinds.values())
    return Figure(value=value, why="; ".join(faults), details=details)


def _nothing(connection: Held) -> None:
    return None


def _asking(prompts: Prompts) -> Callable[[Held], object]:
    return lambda connection: connection.ask(b"".join(prompts.take()))


async def _cores(pool: Pool) -> float:
    before = total_cpu_s(pool.routers)
    await asyncio.sleep(1.0)
    return total_cpu_s(pool.routers) - before


@bar("direct.half-bodies", "worker memory under 1,000 half-sent 1 MB bodies over what may be", at_most=1.0, part=2)
def half_bodies(scale: float, flags: Sequence[str] = DIRECT) -> Figure:
    """What may be: `limits.max_buffered_bytes`, here 128 MiB, and 32 KB a connection; small requests still pass."""
    count = max(50, int(1_000 * scale))
    lift_file_limit(count + 500)
    return uvloop.run(_half(count, max(8 << 20, int(_BUFFER_BYTES * scale)), flags))


async def _half(count: int, limit_bytes: int, flags: Sequence[str]) -> Figure:
    with backends(4) as addresses:
        async with pool_of(addresses, flags, config=_LIMITED.format(bytes=limit_bytes)) as pool:
            host = urlsplit(pool.url).netloc
            small = Prompts(host, 1_000, unique=False)
            await send(pool.url, small, connections=16, requests=_WARM_REQUESTS)
            await asyncio.sleep(_SETTLE_S)
            before = _memory(pool)
            half = _half_request(host)
            held = await hold(pool.url, count, lambda connection: connection.write(half))
            beside = await send(pool.url, small, connections=4, requests=200)
            await asyncio.sleep(_SETTLE_S)
            growth = _memory(pool) - before
            statuses = {each.status for each in held}
            counts = {str(status): sum(each.status == status for each in held) for status in sorted(statuses)}
            is_open = sum(each.is_open for each in held)
            for each in held:
                each.close()
            await asyncio.sleep(_SETTLE_S)
            after = await _whole(pool, host)
    allowed = limit_bytes + count * _CONNECTION_BYTES
    faults = [f"small requests beside them: {beside.errors}"] if beside.errors else []
    faults += [f"whole bodies after they had gone: {after.errors}"] if after.errors else []
    details = {
        "growth_mb": growth / 2**20,
        "allowed_mb": allowed / 2**20,
        "statuses": counts,
        "open": is_open,
        "small_p50_ms": beside.p50_s * 1e3,
    }
    return Figure(value=float("inf") if faults else growth / allowed, why="; ".join(faults), details=details)


async def _whole(pool: Pool, host: str) -> Sent:
    """Send whole bodies of the same size: the bytes of those that left must have been given back."""
    return await send(pool.url, Prompts(host, _BODY_BYTES - 1_000), connections=2, requests=8)


def _half_request(host: str) -> bytes:
    opening = b'{"model":"%s","messages":[{"role":"user","content":"' % MODEL.encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\n" % host.encode()
    return head + b"content-length: %d\r\n\r\n%s" % (_BODY_BYTES, opening.ljust(_BODY_BYTES // 2, b"x"))
