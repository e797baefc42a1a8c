"""A closed loop of raw connections: the client for figures in which the router must be the dear part.

It reads of an answer only what says whether it is one: the status, its length or its last chunk, `[DONE]` at the end
of a stream.  It costs about a tenth of `shoal.hosts.load`, which keeps and reads every answer.
"""

import asyncio
from collections import Counter
from time import perf_counter
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import numpy as np

from bench.prompts import Prompts

_TAIL = 32
_TIMEOUT_S = 60.0
# A lane that failed so often is given up, so that a router that is gone does not spin the client.
_FAILURES_PER_LANE = 20


class Sent(NamedTuple):
    """What became of the requests.

    errors: by kind: `status-NNN`, `cut`, `connect`, `timeout`, `unfinished` (a stream without `[DONE]`).  latencies_s:
    of the good ones, from the request's writing to the end of its answer.
    """

    ok: int
    errors: dict[str, int]
    duration_s: float
    latencies_s: list[float]

    @property
    def failed(self) -> int:
        """Requests without a good answer."""
        return sum(self.errors.values())

    @property
    def p50_s(self) -> float:
        """Median latency, infinity without any."""
        return float(np.median(self.latencies_s)) if self.latencies_s else float("inf")


async def send(
    url: str,
    prompts: Prompts,
    *,
    connections: int,
    seconds: float = float("inf"),
    requests: float = float("inf"),
) -> Sent:
    """Keep one request in flight on each connection until `seconds` are over or `requests` were begun."""
    run = _Run(prompts, seconds, requests)
    parts = urlsplit(url)
    lanes = [_Lane(run) for _ in range(connections)]
    run.open_lanes = connections
    began = perf_counter()
    run.until_s = began + seconds
    for lane in lanes:
        lane.connect(parts.hostname or "127.0.0.1", parts.port or 80)
    try:
        async with asyncio.timeout(_TIMEOUT_S + (seconds if seconds < float("inf") else _TIMEOUT_S)):
            await run.done
    except TimeoutError:
        run.errors["timeout"] += sum(lane.is_waiting for lane in lanes)
    finally:
        for lane in lanes:
            lane.close()
        await asyncio.sleep(0)
    return Sent(len(run.latencies_s), dict(run.errors), perf_counter() - began, run.latencies_s)


class _Run:
    """What all lanes share."""

    __slots__ = ("done", "errors", "latencies_s", "left", "open_lanes", "prompts", "until_s")

    def __init__(self, prompts: Prompts, seconds: float, requests: float) -> None:
        self.prompts = prompts
        self.left = requests
        self.until_s = seconds
        self.open_lanes = 0
        self.errors: Counter[str] = Counter()
        self.latencies_s: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def lane_ended(self) -> None:
        self.open_lanes -= 1
        if not self.open_lanes and not self.done.done():
            self.done.set_result(None)


class _Lane(asyncio.Protocol):
    """One connection, made anew when the other side closes it."""

    def __init__(self, run: _Run) -> None:
        self.is_waiting = False
        self._run = run
        self._transport: asyncio.Transport | None = None
        self._address = ("", 0)
        self._failures = 0
        self._is_over = False
        self._closes = False
        self._head = b""
        self._tail = b""
        self._status = 0
        self._missing = -1
        self._is_stream = False

    def connect(self, host: str, port: int) -> None:
        """Open the connection; the first request follows by itself."""
        self._address = (host, port)
        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.create_connection(lambda: self, host, port))
        task.add_done_callback(self._connected)

    def close(self) -> None:
        """Drop the connection, and whatever is under way on it."""
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but ancestry
        self._closes = False
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._is_over:
            return
        if self.is_waiting:
            self._fail("cut")
        self._again()

    def data_received(self, data: bytes) -> None:
        if not self._status:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            data = self._head[end + 4 :]
            self._read_head(self._head[:end].lower())
        if self._missing >= 0:
            self._missing -= len(data)
            if self._missing <= 0:
                self._answered(is_whole=True)
            return
        self._tail = (self._tail + data)[-_TAIL:]
        if self._tail.endswith(b"\r\n0\r\n\r\n"):
            self._answered(is_whole=not self._is_stream or b"[DONE]" in self._tail)

    def _read_head(self, head: bytes) -> None:
        self._status = int(head[9:12])
        at = head.find(b"\r\ncontent-length:")
        if at >= 0:
            self._missing = int(head[at + 17 :].split(b"\r\n", 1)[0])
        self._is_stream = b"text/event-stream" in head
        self._closes = b"\r\nconnection: close" in head

    def _answered(self, *, is_whole: bool) -> None:
        run = self._run
        if self._status == 200 and is_whole:
            run.latencies_s.append(perf_counter() - self._began_s)
        else:
            self._fail("unfinished" if self._status == 200 else f"status-{self._status}")
        self.is_waiting = False
        if self._closes:
            if self._transport is not None:
                self._transport.abort()
            return
        self._next()

    def _next(self) -> None:
        run = self._run
        self._began_s = perf_counter()
        if self._is_over or run.left <= 0 or self._began_s >= run.until_s or self._transport is None:
            if not self._is_over:
                self._is_over = True
                run.lane_ended()
            return
        run.left -= 1
        self._head = self._tail = b""
        self._status = 0
        self._missing = -1
        self.is_waiting = True
        pieces = run.prompts.take()
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        else:
            self._transport.writelines(pieces)

    def _connected(self, task: "asyncio.Task[object]") -> None:
        if task.cancelled() or self._is_over:
            return
        if task.exception() is not None:
            self._fail("connect")
            self._again()

    def _fail(self, kind: str) -> None:
        self.is_waiting = False
        self._failures += 1
        self._run.errors[kind] += 1

    def _again(self) -> None:
        if self._failures > _FAILURES_PER_LANE or perf_counter() >= self._run.until_s or self._run.left <= 0:
            self._is_over = True
            self._run.lane_ended()
            return
        asyncio.get_running_loop().call_later(0.01, self.connect, *self._address)
