"""A small HTTP/1.1 client on raw asyncio protocols, with a pool of kept-alive connections.

It knows just what a load generator needs: POST and GET, lengths and chunked bodies, and the time at which each
part came.  It follows no redirects, decodes no content, and never retries: an error is a measurement.
"""

import asyncio
import ssl
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

from shoal.hosts.load.answer import Answer


class Client:
    """Sends requests to one base URL.  headers: sent with every request, as (name, value)."""

    def __init__(self, url: str, *, headers: dict[str, str] | None = None, timeout_s: float = 300.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        self._host = parts.hostname or "127.0.0.1"
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._fixed = _lines({"host": parts.netloc, **(headers or {})})
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def get(self, path: str) -> Answer:
        """Send a GET and return the answer, with its `failure` set when it failed."""
        return await self._exchange(b"GET", path, b"", b"", None)

    async def post(
        self, path: str, body: bytes, *, headers: dict[str, str] | None = None, leave_after_s: float | None = None
    ) -> Answer:
        """Send JSON `body` and return the answer; after `leave_after_s` the connection is dropped (`left`)."""
        extra = _lines(headers) if headers else b""
        lines = b"%scontent-type: application/json\r\ncontent-length: %d\r\n" % (extra, len(body))
        return await self._exchange(b"POST", path, lines, body, leave_after_s)

    async def close(self) -> None:
        """Drop every connection."""
        for connection in list(self._open):
            connection.drop()
        self._idle.clear()
        await asyncio.sleep(0)

    async def _exchange(self, verb: bytes, path: str, lines: bytes, body: bytes, leave_after_s: float | None) -> Answer:
        loop = asyncio.get_running_loop()
        target = (self._prefix + path).encode()
        head = b"%s %s HTTP/1.1\r\n%s%s\r\n" % (verb, target, self._fixed, lines)
        answer = Answer(perf_counter())
        connection = await self._connection(answer)
        if connection is None:
            return answer
        leaves = leave_after_s is not None and leave_after_s < self._timeout_s
        wait_s = leave_after_s if leave_after_s is not None and leaves else self._timeout_s
        timer = loop.call_later(wait_s, connection.give_up, "left" if leaves else "timeout")
        try:
            await connection.send(head, body, answer)
        except asyncio.CancelledError:
            connection.give_up("left")
            raise
        finally:
            timer.cancel()
        answer.ended_s = answer.ended_s or perf_counter()
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.drop()
        return answer

    async def _connection(self, answer: Answer) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(loop, self._open), self._host, self._port, ssl=self._tls
            )
        except OSError:
            answer.failure = "connect"
            answer.ended_s = perf_counter()
            return None
        return connection


class _Connection(asyncio.Protocol):
    """One connection: parses one answer at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, everyone: "set[_Connection]") -> None:
        self._loop = loop
        self._everyone = everyone
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._answer = Answer(0.0)
        self._buffer = bytearray()
        self._left = 0
        self._mode = "head"
        self.is_reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but ancestry
        self.is_reusable = True
        self._everyone.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        self._everyone.discard(self)
        if self._waiter is not None and self._mode == "until-close" and exc is None:
            self._finish("")
        else:
            self._finish("cut" if self._answer.status else "connect")

    def drop(self) -> None:
        """Close at once, without a goodbye."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def give_up(self, failure: str) -> None:
        """End the answer that is under way as `failure`, and the connection with it."""
        self._finish(failure)
        self.drop()

    async def send(self, head: bytes, body: bytes, answer: Answer) -> None:
        """Write a request and wait until its answer has ended, well or not."""
        if self._transport is None or self._transport.is_closing():
            answer.failure = "connect"
            return
        self._answer = answer
        self._mode = "head"
        self._buffer.clear()
        self._waiter = self._loop.create_future()
        if len(body) < 65_536:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        await self._waiter

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        answer.pieces += 1
        if self._mode == "head":
            self._buffer += data
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            data = bytes(self._buffer[end + 4 :])
            self._read_head(bytes(self._buffer[:end]))
            self._buffer.clear()
            if self._waiter is None or (not data and self._mode != "length"):
                return
        if data and not answer.first_s:
            answer.first_s = perf_counter()
        if self._mode == "chunked":
            self._buffer += data
            self._read_chunks()
            return
        answer.body += data
        if self._mode == "length" and len(answer.body) >= self._left:
            self._finish("")

    def _read_head(self, head: bytes) -> None:
        answer = self._answer
        answer.head = head
        answer.head_s = perf_counter()
        answer.status = int(head[9:12])
        if answer.header("connection") == "close":
            self.is_reusable = False
        length = answer.header("content-length")
        if answer.header("transfer-encoding") == "chunked":
            self._mode = "chunked"
        elif length:
            self._mode, self._left = "length", int(length)
        else:
            self._mode = "until-close"
            self.is_reusable = False

    def _read_chunks(self) -> None:
        buffer = self._buffer
        at = 0
        while True:
            end = buffer.find(b"\r\n", at)
            if end < 0:
                break
            size = int(buffer[at:end].split(b";", 1)[0], 16)
            stop = end + 2 + size
            if len(buffer) < stop + 2:
                break
            self._answer.body += buffer[end + 2 : stop]
            at = stop + 2
            if size == 0:
                self._finish("")
                return
        del buffer[:at]

    def _finish(self, failure: str) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        if failure:
            self.is_reusable = False
        self._answer.failure = failure
        self._answer.ended_s = perf_counter()
        waiter.set_result(None)


def _lines(headers: dict[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")
