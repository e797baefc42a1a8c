"""A very cheap stand-in for many engines: one process, one loop, a listening port per endpoint.

It looks at no prompt: what it answers is told by request headers, so that a 400 KB body costs it a few reads.  For
real engine behaviour use `shoal engine`.

    x-bench-chunks       a stream of so many chunks; without it the answer is plain JSON
    x-bench-pace-us      between two chunks, by a clock that does not drift
    x-bench-wait-us      before the head
    x-bench-head-first   1: the head goes out before that wait, as a streaming engine sends it before its prefill; of a
                         plain answer some of its body too
    x-bench-stamp        1: each chunk says when it was written, in `t`, seconds of this machine's monotonic clock

    python -m bench.backend --count 100 --model shoal      # prints {"addresses": [...], "pid": ...}
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from heapq import heappop, heappush
from time import perf_counter
from typing import cast

import uvloop

from shoal.hosts.engine.lag import LoopLag

_MODELS = (
    '{"object":"list","data":[{"id":"%s","object":"model","owned_by":"vllm","root":"%s","parent":null,'
    '"max_model_len":1000000}]}'
)
_PLAIN = (
    '{"id":"chatcmpl-bench","object":"chat.completion","created":1,"model":"%s","choices":[{"index":0,"message":'
    '{"role":"assistant","content":"ok"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":%d,'
    '"total_tokens":%d,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":0}}}'
)
_CHUNK = (
    'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1,"model":"%s","choices":[{"index":0,'
    '"delta":{"content":" ok"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_STAMPED = (
    b'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1,"model":"%s","t":%.6f,"choices":'
    b'[{"index":0,"delta":{"content":" ok"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_LAST = (
    'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1,"model":"%s","choices":[],"usage":'
    '{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
    "data: [DONE]\n\n"
)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n%s\r\n"
)

# What uvloop rounds a timer to, so that nobody is called late for being due a moment after the others.
_ROUNDING_S = 0.0005
_NEVER = float("inf")


class Site:
    """One endpoint: its address and what it has seen.  lag: of the loop that serves it and all others."""

    __slots__ = ("aborted", "aborted_at_s", "address", "lag", "model", "running", "total", "unrouted")

    def __init__(self, model: str, lag: LoopLag) -> None:
        self.model = model
        self.lag = lag
        self.address = ""
        self.running = 0
        self.total = 0
        self.aborted = 0
        self.aborted_at_s = 0.0
        self.unrouted = 0

    def metrics(self) -> bytes:
        """The page a scraper reads, with vLLM's names."""
        label = f'{{engine="0",model_name="{self.model}"}}'
        return (
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{label} {self.running}.0\n"
            f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{label} 0.0\n"
            f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{label} 0.0\n"
            f"# TYPE bench:requests counter\nbench:requests_total {self.total}.0\n"
            f"# TYPE bench:aborted counter\nbench:aborted_total {self.aborted}.0\n"
            f"# TYPE bench:aborted_at_seconds gauge\nbench:aborted_at_seconds {self.aborted_at_s:.6f}\n"
            f"# TYPE bench:unrouted counter\nbench:unrouted_total {self.unrouted}.0\n"
            "# TYPE shoal_engine_loop_lag_seconds gauge\n"
            f'shoal_engine_loop_lag_seconds{{quantile="0.99"}} {self.lag.quantile_s(0.99):.6f}\n'
        ).encode()


class Pace:
    """Calls back at given times, to within the half millisecond that the loop's timers round to.

    One timer for all streams: on a busy machine one for each chunk comes later and costs more, and what is measured is
    the router, not its engines.
    """

    __slots__ = ("_armed_s", "_count", "_due", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._armed_s = _NEVER
        self._timer: asyncio.TimerHandle | None = None

    def at(self, due_s: float, call: Callable[[], None]) -> None:
        """Have `call` called at this time of `perf_counter`."""
        self._count += 1
        heappush(self._due, (due_s, self._count, call))
        if due_s < self._armed_s:
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_s = self._due[0][0]
        self._timer = self._loop.call_later(max(0.0, self._armed_s - perf_counter()), self._tick)

    def _tick(self) -> None:
        due, self._timer = self._due, None
        self._armed_s = 0.0  # while they are called nobody need arm it
        now = perf_counter() + _ROUNDING_S
        while due and due[0][0] <= now:
            heappop(due)[2]()
        self._armed_s = _NEVER
        if due:
            self._arm()


class Door(asyncio.Protocol):
    """One connection: reads requests, answers each when its body is complete."""

    def __init__(self, site: Site, loop: asyncio.AbstractEventLoop, pace: Pace) -> None:
        self._site = site
        self._loop = loop
        self._pace = pace
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._buffer = bytearray()
        self._missing = -1
        self._is_open = False
        self._chunk = self._stamped = self._last = b""
        self._left = 0
        self._due_s = self._pace_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but ancestry

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._is_open:
            self._site.running -= 1
            self._site.aborted += 1
            self._site.aborted_at_s = perf_counter()
            self._is_open = False

    def data_received(self, data: bytes) -> None:
        if self._missing > 0:
            self._missing -= len(data)
            if self._missing <= 0:
                self._answer()
            return
        self._buffer += data
        if not self._head:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head = bytes(self._buffer[:end]).lower()
            del self._buffer[: end + 4]
        if b"\r\ntransfer-encoding: chunked" in self._head:
            if self._buffer.endswith(b"0\r\n\r\n"):
                self._answer()
            return
        self._missing = self._number(b"content-length") - len(self._buffer)
        self._buffer.clear()
        if self._missing <= 0:
            self._answer()

    def _number(self, name: bytes) -> int:
        at = self._head.find(b"\r\n" + name + b": ")
        return int(self._head[at + len(name) + 4 :].split(b"\r\n", 1)[0]) if at >= 0 else 0

    def _answer(self) -> None:
        self._missing = -1
        self._buffer.clear()
        site, head = self._site, self._head
        if head.startswith(b"post"):
            site.total += 1
            site.running += 1
            self._is_open = True
            if b"\r\nx-gateway-destination-endpoint: " + site.address.encode() not in head:
                site.unrouted += 1
            wait_us = self._number(b"x-bench-wait-us")
            if wait_us and self._number(b"x-bench-head-first"):
                self._serve_late(wait_us / 1e6)
            elif wait_us:
                self._loop.call_later(wait_us / 1e6, self._serve)
            else:
                self._serve()
            return
        path = head.split(b" ", 2)[1]
        page = site.metrics() if path == b"/metrics" else b""
        if path == b"/v1/models":
            page = (_MODELS % (site.model, site.model)).encode()
        self._plain(page, b"text/plain" if path == b"/metrics" else b"application/json")

    def _plain(self, page: bytes, kind: bytes) -> None:
        self._head = b""
        if self._transport is not None:
            self._transport.write(_answer_of(page, kind))

    def _serve_late(self, wait_s: float) -> None:
        """Begin the answer, and go on with it after a while."""
        if self._number(b"x-bench-chunks"):
            self._open_stream()
            self._loop.call_later(wait_s, self._serve_stream)
            return
        assert self._transport is not None
        answer = _answer_of(self._plain_page(), b"application/json")
        begun = len(answer) * 2 // 3
        self._transport.write(answer[:begun])
        self._loop.call_later(wait_s, self._end_plain, answer[begun:])

    def _end_plain(self, rest: bytes) -> None:
        self._head = b""
        self._done()
        if self._transport is not None:
            self._transport.write(rest)

    def _serve(self) -> None:
        if self._transport is None:
            return
        if self._number(b"x-bench-chunks"):
            self._open_stream()
            self._serve_stream()
            return
        page = self._plain_page()
        self._done()
        self._plain(page, b"application/json")

    def _plain_page(self) -> bytes:
        prompt = self._number(b"content-length") // 4
        return (_PLAIN % (self._site.model, prompt, prompt + 8)).encode()

    def _open_stream(self) -> None:
        assert self._transport is not None
        self._transport.write(_STREAM_HEAD % (b"x-bench-served: %s\r\n" % self._site.address.encode()))

    def _serve_stream(self) -> None:
        self._left = chunks = self._number(b"x-bench-chunks")
        self._pace_s = self._number(b"x-bench-pace-us") / 1e6
        prompt = self._number(b"content-length") // 4
        model = self._site.model
        self._chunk = _framed((_CHUNK % model).encode())
        self._stamped = _STAMPED.replace(b"%s", model.encode()) if self._number(b"x-bench-stamp") else b""
        self._last = _framed((_LAST % (model, prompt, prompt + chunks, chunks)).encode()) + b"0\r\n\r\n"
        self._due_s = perf_counter()
        self._stream()

    def _stream(self) -> None:
        transport = self._transport
        if transport is None:
            return
        transport.write(_framed(self._stamped % perf_counter()) if self._stamped else self._chunk)
        self._left -= 1
        if not self._left:
            self._head = b""
            self._done()
            transport.write(self._last)
        elif self._pace_s:
            self._due_s += self._pace_s
            self._pace.at(self._due_s, self._stream)
        else:
            self._loop.call_soon(self._stream)

    def _done(self) -> None:
        if self._is_open:
            self._site.running -= 1
            self._is_open = False


def _answer_of(page: bytes, kind: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(page), page)


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def serve(count: int, model: str) -> AsyncIterator[list[Site]]:
    """Open `count` endpoints on free ports of 127.0.0.1 for as long as the context lasts."""
    loop = asyncio.get_running_loop()
    lag = LoopLag()
    pace = Pace(loop)
    sites = [Site(model, lag) for _ in range(count)]
    servers = []
    for site in sites:
        server = await loop.create_server(partial(Door, site, loop, pace), "127.0.0.1", 0, backlog=4096)
        site.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        servers.append(server)
    try:
        yield sites
    finally:
        for server in servers:
            server.close()
        lag.close()
        await asyncio.sleep(0)


async def _run(count: int, model: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serve(count, model) as sites:
        print(json.dumps({"pid": os.getpid(), "addresses": [site.address for site in sites]}), flush=True)
        await stop.wait()


def main(argv: list[str] | None = None) -> int:
    """Run the backend until it is told to stop."""
    parser = argparse.ArgumentParser(prog="bench.backend", description=__doc__)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--model", default="shoal")
    args = parser.parse_args(argv)
    uvloop.run(_run(args.count, args.model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
