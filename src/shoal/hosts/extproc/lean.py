"""The gRPC server for our own Envoy on a unix socket: what `service` offers, without grpc's cost per message.

Owns the transport, gRPC's framing of messages and the three methods that Envoy calls.  All that one read brings is
answered before the next, in few writes; HTTP/2 is `http2`'s, messages are `exchange`'s.
"""

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable
from typing import cast

from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from shoal.hosts.extproc import streams
from shoal.hosts.extproc.exchange import Exchange
from shoal.hosts.extproc.http2 import Connection, Opened, Received
from shoal.hosts.extproc.streams import HEALTH_SERVICES, LIVENESS, MESSAGE_OVERHEAD_BYTES
from shoal.hosts.picker import Picker

log = logging.getLogger("shoal.extproc")

# Status codes of gRPC.
OK, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 5, 8, 12, 13
PROCESS_PATH = f"/{streams.EXT_PROC}/Process"
RECORDS_PATH = f"/{streams.ACCESS_LOG}/StreamAccessLogs"
HEALTH_PATH = "/grpc.health.v1.Health/Check"

# One read may hold hundreds of requests; the first answers do not wait for the last.
MESSAGES_PER_WRITE = 32
WRITE_BUFFER_BYTES = 4 << 20
# The end of what the client has ended goes with the next answers, or alone after so long.
UNHURRIED_S = 0.005

_PREFIX = struct.Struct(">BI")


def _literal(name: bytes, value: bytes) -> bytes:
    """A header in HPACK without indexing and without Huffman coding (RFC 7541, section 6.2.2)."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


# 0x88 is `:status: 200` of the static table.
HEAD = b"\x88" + _literal(b"content-type", b"application/grpc")
TRAILERS = {
    code: _literal(b"grpc-status", str(code).encode())
    for code in (OK, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL)
}


class Failed(Exception):
    """A call ends with this gRPC status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Deframer:
    """Cuts a stream's data into gRPC messages: a flag, a length, that many bytes."""

    __slots__ = ("_max_bytes", "_needed_bytes", "_pieces", "_size")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[memoryview] = []
        self._size = 0
        self._needed_bytes = _PREFIX.size

    @property
    def is_between(self) -> bool:
        """Whether no message is under way."""
        return not self._pieces

    def feed(self, data: memoryview) -> list[memoryview]:
        """Return the messages that `data` completes; raises Failed for one that cannot be taken."""
        size = len(data)
        if not self._pieces and size >= _PREFIX.size:
            flag, length = _PREFIX.unpack_from(data)
            if size == length + _PREFIX.size and not flag and length <= self._max_bytes:
                return [data[_PREFIX.size :]]
        self._pieces.append(data)
        self._size += size
        return self._cut() if self._size >= self._needed_bytes else []

    def _cut(self) -> list[memoryview]:
        data = memoryview(b"".join(self._pieces))
        messages: list[memoryview] = []
        start = 0
        self._needed_bytes = _PREFIX.size
        while len(data) - start >= _PREFIX.size:
            flag, length = _PREFIX.unpack_from(data, start)
            if flag:
                raise Failed(UNIMPLEMENTED)
            if length > self._max_bytes:
                raise Failed(RESOURCE_EXHAUSTED)
            end = start + _PREFIX.size + length
            if end > len(data):
                self._needed_bytes = end - start
                break
            messages.append(data[start + _PREFIX.size : end])
            start = end
        self._pieces = [data[start:]] if start < len(data) else []
        self._size = len(data) - start
        return messages


class Call:
    """One call: what it does with a message, with the end of the client's half, and when it is gone."""

    __slots__ = ("deframer", "has_head")

    def __init__(self, max_bytes: int) -> None:
        self.deframer = Deframer(max_bytes)
        self.has_head = False

    def take(self, message: memoryview) -> list[bytes]:
        """Return the replies to one message."""
        raise NotImplementedError

    def finish(self) -> list[bytes]:
        """The client has said everything; return the last replies."""
        return []

    def gone(self) -> None:
        """The call is over, however; told once."""


class ProcessCall(Call):
    """One request's exchange."""

    __slots__ = ("_exchange", "_picker")

    def __init__(self, picker: Picker, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._picker = picker
        self._exchange = Exchange(picker)

    def take(self, message: memoryview) -> list[bytes]:
        """Ask the exchange."""
        return streams.receive(self._exchange, pb.ProcessingRequest.FromString(message), self._picker)

    def gone(self) -> None:
        """Release what the request holds."""
        self._exchange.end()


class RecordsCall(Call):
    """One stream of access-log records; one message is the answer to all of them."""

    __slots__ = ("_picker",)

    def __init__(self, picker: Picker, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._picker = picker

    def take(self, message: memoryview) -> list[bytes]:
        """Feed the router."""
        streams.take_records(self._picker, als_pb2.StreamAccessLogsMessage.FromString(message))
        return []

    def finish(self) -> list[bytes]:
        """The empty response."""
        return [b""]


class HealthCall(Call):
    """One question of Envoy's health check."""

    __slots__ = ("_is_serving", "_reply")

    def __init__(self, is_serving: bool, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._is_serving = is_serving
        self._reply: bytes | None = None

    def take(self, message: memoryview) -> list[bytes]:
        """Note the service that is asked for."""
        service = health_pb2.HealthCheckRequest.FromString(bytes(message)).service
        if service not in HEALTH_SERVICES:
            raise Failed(NOT_FOUND)
        is_good = self._is_serving or service == LIVENESS
        status = health_pb2.HealthCheckResponse.SERVING if is_good else health_pb2.HealthCheckResponse.NOT_SERVING
        self._reply = health_pb2.HealthCheckResponse(status=status).SerializeToString()
        return []

    def finish(self) -> list[bytes]:
        """Answer."""
        if self._reply is None:
            raise Failed(INTERNAL)
        return [self._reply]


class Peer(asyncio.Protocol):
    """One connection of Envoy."""

    def __init__(self, server: "LeanServer") -> None:
        self._server = server
        self._http2 = Connection()
        self._calls: dict[int, Call] = {}
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._server.joined(self)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Do everything that `data` asks for."""
        http2 = self._http2
        unwritten = 0
        for event in http2.receive(data):
            if type(event) is Received:
                self._on_data(event)
                unwritten += 1
                if unwritten == MESSAGES_PER_WRITE:
                    unwritten = 0
                    if http2.is_urgent:
                        self._flush()
            elif type(event) is Opened:
                self._on_opened(event)
            else:
                self._gone(event.stream_id)
        if http2.is_closed:
            log.warning("closing a connection of Envoy: %s", http2.why_closed)
        if http2.is_urgent:
            self._flush()
        elif self._timer is None:
            self._timer = self._server.loop.call_later(UNHURRIED_S, self._flush_late)

    def connection_lost(self, _: Exception | None) -> None:
        """End every call."""
        for stream_id in list(self._calls):
            self._gone(stream_id)
        self._server.lost(self)

    def pause_writing(self) -> None:
        """Envoy does not read: take no more of what would have to be answered."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Envoy reads again."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _flush(self) -> None:
        out = self._http2.take()
        if self._transport.is_closing():
            return
        if out:
            self._transport.write(out)
        if self._http2.is_closed or self._http2.has_left:
            self._transport.close()

    def _flush_late(self) -> None:
        self._timer = None
        self._flush()

    # ------------------------------------------------------------------ calls

    def _on_opened(self, event: Opened) -> None:
        call = self._server.call_of(event.path)
        if call is None:
            self._end(event.stream_id, None, UNIMPLEMENTED)
            return
        self._calls[event.stream_id] = call
        if event.is_end:
            self._finish(event.stream_id, call)

    def _on_data(self, event: Received) -> None:
        stream_id = event.stream_id
        call = self._calls.get(stream_id)
        if call is None:
            return
        try:
            for message in call.deframer.feed(event.data) if event.data else ():
                for reply in call.take(message):
                    self._reply(stream_id, call, reply)
        except Exception as error:
            self._fail(stream_id, call, error)
            return
        if event.is_end:
            self._finish(stream_id, call)
        elif type(call) is RecordsCall and self._server.is_draining:
            self.end_records()

    def _reply(self, stream_id: int, call: Call, message: bytes) -> None:
        if not call.has_head:
            call.has_head = True
            self._http2.send_headers(stream_id, HEAD)
        self._http2.send_data(stream_id, _PREFIX.pack(0, len(message)) + message)

    def _finish(self, stream_id: int, call: Call) -> None:
        try:
            if not call.deframer.is_between:
                raise Failed(INTERNAL)
            for reply in call.finish():
                self._reply(stream_id, call, reply)
        except Exception as error:
            self._fail(stream_id, call, error)
            return
        self._end(stream_id, call, OK)

    def _fail(self, stream_id: int, call: Call, error: Exception) -> None:
        if isinstance(error, Failed):
            status = error.status
        else:
            status = INTERNAL
            if isinstance(error, DecodeError) or not isinstance(call, ProcessCall):
                log.error("a call failed: %r", error)
        self._end(stream_id, call, status)

    def _end(self, stream_id: int, call: Call | None, status: int) -> None:
        has_head = call is not None and call.has_head
        self._http2.send_headers(stream_id, TRAILERS[status] if has_head else HEAD + TRAILERS[status], is_end=True)
        self._gone(stream_id)

    def _gone(self, stream_id: int) -> None:
        call = self._calls.pop(stream_id, None)
        if call is None:
            return
        try:
            call.gone()
        except Exception:
            log.exception("a request could not be ended")

    # ------------------------------------------------------------------ the end

    def end_records(self) -> None:
        """End the streams of records, so that Envoy opens them anew to our successor."""
        for stream_id, call in list(self._calls.items()):
            if type(call) is RecordsCall:
                self._finish(stream_id, call)
        self._flush()

    def leave(self) -> None:
        """Send Envoy's next requests elsewhere; the connection closes with its last call."""
        self._http2.leave()
        self._flush()

    def abort(self) -> None:
        """Cut what is left."""
        self._transport.abort()


class LeanServer:
    """The server of one worker; `start` it, `stop` it."""

    def __init__(self, picker: Picker, path: str) -> None:
        self.loop = asyncio.get_running_loop()
        self._picker = picker
        self._path = path
        self._is_serving = False
        self._is_stopping = False
        self._peers: dict[Peer, None] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._makers: dict[str, Callable[[], Call]] = {
            PROCESS_PATH: lambda: ProcessCall(picker, self._max_bytes),
            RECORDS_PATH: lambda: RecordsCall(picker, self._max_bytes),
            HEALTH_PATH: lambda: HealthCall(self._is_serving, self._max_bytes),
        }

    @property
    def _max_bytes(self) -> int:
        return self._picker.limits.max_body_bytes + MESSAGE_OVERHEAD_BYTES

    @property
    def is_draining(self) -> bool:
        """Whether another worker takes over."""
        return self._picker.draining.is_set()

    async def start(self) -> None:
        """Listen."""
        self._server = await self.loop.create_unix_server(lambda: Peer(self), self._path, backlog=4096)
        self._watch = asyncio.create_task(self._end_records())

    def set_serving(self, is_serving: bool) -> None:
        """What the health service says, except of liveness."""
        self._is_serving = is_serving

    async def stop(self, grace: float | None) -> None:
        """Take no new connections, send Envoy elsewhere, wait up to `grace` seconds for open calls, cut the rest.

        May be called again with a shorter grace while it waits.
        """
        self._is_stopping = True
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers):
            peer.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace or 0.0):
                await self._is_empty.wait()
        for peer in list(self._peers):
            peer.abort()
        await self._is_empty.wait()
        if self._watch is not None:
            self._watch.cancel()

    async def _end_records(self) -> None:
        await self._picker.draining.wait()
        for peer in list(self._peers):
            peer.end_records()

    # ------------------------------------------------------------------ for peers

    def call_of(self, path: str) -> Call | None:
        """A new call of the method at `path`, None for one that is not here."""
        make = self._makers.get(path)
        return None if make is None else make()

    def joined(self, peer: Peer) -> None:
        """A connection is open."""
        self._peers[peer] = None
        self._is_empty.clear()
        if self._is_stopping:
            peer.leave()

    def lost(self, peer: Peer) -> None:
        """A connection is closed."""
        self._peers.pop(peer, None)
        if not self._peers:
            self._is_empty.set()
