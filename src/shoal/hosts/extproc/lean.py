"""The gRPC server for our own Envoy on a unix socket: what `service` offers, without grpc's cost per message.

Owns the transport, gRPC's framing of messages and the three methods that Envoy calls.  All that one read brings is
answered before the next, in few writes; HTTP/2 is `http2`'s, messages are `exchange`'s.
"""

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from shoal.hosts.envoy.recordform import parse_records
from shoal.hosts.extproc import streams
from shoal.hosts.extproc.exchange import Exchange
from shoal.hosts.extproc.http2 import Connection, Opened, Received
from shoal.hosts.extproc.requests import Message, joined, read_body
from shoal.hosts.extproc.streams import HEALTH_SERVICES, LIVENESS, MESSAGE_OVERHEAD_BYTES
from shoal.hosts.picker import Picker
from shoal.routing.commands import Cut, Evict
from shoal.routing.events import Kept

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
_PREFIX_BYTES = _PREFIX.size
_unpack_prefix = _PREFIX.unpack_from


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
        self._needed_bytes = _PREFIX_BYTES

    @property
    def is_between(self) -> bool:
        """Whether no message is under way."""
        return not self._pieces

    def feed(self, data: memoryview) -> list[Message]:
        """Return the messages that `data` completes; raises Failed for one that cannot be taken."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size < self._needed_bytes:
            return []
        pieces = self._pieces
        if len(pieces[0]) >= _PREFIX_BYTES:
            self._needed_bytes = _PREFIX_BYTES + self._length(pieces[0], 0)
            if self._size == self._needed_bytes:
                # A long message whose parts need not be put together here.
                self._pieces, self._size, self._needed_bytes = [], 0, _PREFIX_BYTES
                return [[pieces[0][_PREFIX_BYTES:], *pieces[1:]]]
            if self._size < self._needed_bytes:
                return []
        return self._cut()

    def _length(self, data: memoryview, start: int) -> int:
        flag, length = _unpack_prefix(data, start)
        if flag:
            raise Failed(UNIMPLEMENTED)
        if length > self._max_bytes:
            raise Failed(RESOURCE_EXHAUSTED)
        return int(length)

    def _cut(self) -> list[Message]:
        data = memoryview(b"".join(self._pieces))
        messages: list[Message] = []
        start = 0
        self._needed_bytes = _PREFIX_BYTES
        while len(data) - start >= _PREFIX_BYTES:
            end = start + _PREFIX_BYTES + self._length(data, start)
            if end > len(data):
                self._needed_bytes = end - start
                break
            messages.append([data[start + _PREFIX_BYTES : end]])
            start = end
        self._pieces = [data[start:]] if start < len(data) else []
        self._size = len(data) - start
        return messages


class Call:
    """One call: what it does with a message, with the end of the client's half, and when it is gone."""

    __slots__ = ("deframer", "has_head")

    def __init__(self) -> None:
        # Only there while a message is, that came in more than one part.
        self.deframer: Deframer | None = None
        self.has_head = False

    def take(self, message: Message) -> list[bytes]:
        """Return the replies to one message."""
        raise NotImplementedError

    def finish(self) -> list[bytes]:
        """The client has said everything; return the last replies."""
        return []

    def send_late(self, send: Callable[[list[bytes] | Exception], None]) -> None:
        """Have `send` called when replies come that `take` could not give yet."""

    def gone(self) -> None:
        """The call is over, however; told once."""


class ProcessCall(Call):
    """One request's exchange."""

    __slots__ = ("_exchange", "_picker")

    def __init__(self, picker: Picker) -> None:
        self.deframer = None
        self.has_head = False
        self._picker = picker
        self._exchange = Exchange(picker)

    def take(self, message: Message) -> list[bytes]:
        """Ask the exchange."""
        body = read_body(message)
        try:
            if body is not None:
                return self._exchange.receive_body(body, is_end=True)
            return self._exchange.receive(pb.ProcessingRequest.FromString(joined(message)))
        except DecodeError:
            raise
        except Exception as error:
            streams.note_unplaced(self._picker, error)
            raise

    def send_late(self, send: Callable[[list[bytes] | Exception], None]) -> None:
        """The router may answer in a later step."""
        self._exchange.send_late(send)

    def cut(self, commands: Mapping[str, Cut | Evict]) -> list[bytes]:
        """Return the reply that ends the request if it is among these."""
        command = commands.get(self._exchange.request_id)
        return self._exchange.cut(command) if command is not None else []

    def gone(self) -> None:
        """Release what the request holds."""
        self._exchange.end()


class RecordsCall(Call):
    """One stream of access-log records; one message is the answer to all of them."""

    __slots__ = ("_picker",)

    def __init__(self, picker: Picker) -> None:
        super().__init__()
        self._picker = picker

    def take(self, message: Message) -> list[bytes]:
        """Feed the router."""
        streams.take_records(self._picker, parse_records(joined(message)))
        return []

    def finish(self) -> list[bytes]:
        """The empty response."""
        return [b""]


class HealthCall(Call):
    """One question of Envoy's health check."""

    __slots__ = ("_is_serving", "_reply")

    def __init__(self, is_serving: bool) -> None:
        super().__init__()
        self._is_serving = is_serving
        self._reply: bytes | None = None

    def take(self, message: Message) -> list[bytes]:
        """Note the service that is asked for."""
        service = health_pb2.HealthCheckRequest.FromString(joined(message)).service
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
        elif self._timer is None and http2.has_output:
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
        stream_id, data = event.stream_id, event.data
        call = self._calls.get(stream_id)
        if call is None:
            return
        try:
            if call.deframer is not None:
                self._take_parts(stream_id, call, call.deframer, data)
            elif data:
                size = len(data)
                if size >= _PREFIX_BYTES and _unpack_prefix(data) == (0, size - _PREFIX_BYTES):
                    replies = call.take([data[_PREFIX_BYTES:]])
                    for reply in replies:
                        self._reply(stream_id, call, reply)
                    if not replies:
                        call.send_late(partial(self._send_late, stream_id, call))
                else:
                    self._take_parts(stream_id, call, Deframer(self._server.max_message_bytes), data)
        except Exception as error:
            self._fail(stream_id, call, error)
            return
        if event.is_end:
            self._finish(stream_id, call)
        elif type(call) is RecordsCall and self._server.is_draining:
            self.end_records()

    def _take_parts(self, stream_id: int, call: Call, deframer: Deframer, data: memoryview) -> None:
        for message in deframer.feed(data):
            replies = call.take(message)
            for reply in replies:
                self._reply(stream_id, call, reply)
            if not replies:
                call.send_late(partial(self._send_late, stream_id, call))
        call.deframer = None if deframer.is_between else deframer

    def _reply(self, stream_id: int, call: Call, message: bytes) -> None:
        message = _PREFIX.pack(0, len(message)) + message
        if call.has_head:
            self._http2.send_data(stream_id, message)
        else:
            call.has_head = True
            self._http2.send_data(stream_id, message, HEAD)

    def _send_late(self, stream_id: int, call: Call, replies: list[bytes] | Exception) -> None:
        """Send what could not be said at once; a call that is gone is not told of."""
        if isinstance(replies, Exception):
            streams.note_unplaced(self._server.picker, replies)
            self._fail(stream_id, call, replies)
        else:
            for reply in replies:
                self._reply(stream_id, call, reply)
        self._flush()

    def _finish(self, stream_id: int, call: Call) -> None:
        if not self._http2.is_open(stream_id):
            # Envoy ends a stream and gives it up in one breath: nobody hears what would be said.
            self._gone(stream_id)
            return
        try:
            if call.deframer is not None:
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

    def cut(self, commands: Mapping[str, Cut | Evict]) -> int:
        """End these requests; returns how many of them were placed here."""
        count = 0
        for stream_id, call in list(self._calls.items()):
            if type(call) is ProcessCall:
                replies = call.cut(commands)
                for reply in replies:
                    self._reply(stream_id, call, reply)
                count += bool(replies)
        self._flush()
        return count

    def leave(self) -> None:
        """Send Envoy's next requests elsewhere; the connection closes with its last call."""
        self._http2.leave()
        self._flush()

    def abort(self) -> None:
        """Cut what is left."""
        self._transport.abort()


class LeanServer:
    """The server of one worker; `start` it, `stop` it.  picker: asked by its calls."""

    def __init__(self, picker: Picker, path: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.picker = picker
        self._path = path
        self._is_serving = False
        picker.driver.on_evict = self._evict
        self._is_stopping = False
        self._peers: dict[Peer, None] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._makers: dict[str, Callable[[], Call]] = {
            PROCESS_PATH: lambda: ProcessCall(picker),
            RECORDS_PATH: lambda: RecordsCall(picker),
            HEALTH_PATH: lambda: HealthCall(self._is_serving),
        }

    @property
    def max_message_bytes(self) -> int:
        """Longer messages are refused; never less than what one frame brings."""
        return self.picker.limits.max_body_bytes + MESSAGE_OVERHEAD_BYTES

    @property
    def is_draining(self) -> bool:
        """Whether another worker takes over."""
        return self.picker.draining.is_set()

    async def start(self) -> None:
        """Listen."""
        self._server = await self.loop.create_unix_server(lambda: Peer(self), self._path, backlog=4096)
        self._watch = asyncio.create_task(self._end_records())

    def cut(self, commands: Mapping[str, Cut | Evict]) -> int:
        """End these requests; returns how many there were."""
        return sum(peer.cut(commands) for peer in list(self._peers))

    def _evict(self, command: Evict) -> None:
        """End a request for a higher one; Envoy cannot give one back, nor say whether its answer has begun."""
        if not (command.may_cut and self.cut({command.request_id: command})):
            self.picker.driver.feed(Kept(command.request_id))

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
        await self.picker.draining.wait()
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
