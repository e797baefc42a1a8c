"""One client's connection: reads requests, one at a time and in order, and knows when it may be kept.

Owns the collecting of bodies, the checks at the door, pipelined bytes, slow senders, and how a connection ends.  A
request that is complete is `relay`'s.
"""

import asyncio
import re
import socket
import struct
from time import monotonic
from typing import TYPE_CHECKING, cast

from shoal.hosts.direct import replies
from shoal.hosts.direct.chunks import BadChunk, ChunkDecoder
from shoal.hosts.direct.heads import BARE_NEWLINE, MAX_HEAD_BYTES, BadHead, RequestHead
from shoal.hosts.direct.relay import Relay
from shoal.hosts.direct.tunnels import Tunnel
from shoal.hosts.direct.wheel import NEVER
from shoal.hosts.picker import Answered
from shoal.pool import RefusalReason

if TYPE_CHECKING:
    from shoal.hosts.direct.plane import Plane

MAX_PIPELINED_BYTES = 256 * 1024
"""What a client may send ahead of its answer; with more the connection ends after that answer."""

WRITE_HIGH_BYTES = 128 * 1024
"""Unread bytes of an answer from which on its engine is not read."""

_SMALL_PIECE_BYTES = 4096
_EMPTY_LINES = re.compile(rb"(?:\r\n)+")
_NO_LINGER = struct.pack("ii", 1, 0)
# What a connection is about: a head, a body, an answer, bytes both ways, or nothing any more.
HEAD, BODY, BUSY, TUNNEL, ENDING = range(5)


class ClientConnection(asyncio.Protocol):
    """One connection.  due, visit: see `wheel.Timed`.  is_paused: the client does not read."""

    __slots__ = (
        "_begun_at",
        "_body",
        "_buffer",
        "_charged",
        "_decoder",
        "_head",
        "_is_last",
        "_missing",
        "_peer",
        "_plane",
        "_state",
        "_tenant",
        "_unread_bytes",
        "due",
        "is_paused",
        "relay",
        "transport",
        "visit",
    )

    def __init__(self, plane: "Plane") -> None:
        self._plane = plane
        self._state = HEAD
        self._buffer = b""
        self._peer = b""
        self._is_last = False
        self._begun_at = 0.0
        self._charged = self._unread_bytes = 0
        self._missing = 0
        self._body: list[bytes | bytearray] = []
        self._decoder: ChunkDecoder | None = None
        self._head: RequestHead | None = None
        self._tenant = ""
        self.relay: Relay | Tunnel | None = None
        self.is_paused = False
        self.due = NEVER
        self.visit = 0

    # ------------------------------------------------------------------ the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, unless there are too many."""
        self.transport = cast(asyncio.Transport, transport)
        plane = self._plane
        if not plane.joined(self):
            self._state = ENDING
            self.transport.abort()
            return
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self.due = plane.wheel.now + plane.settings.clocks.connection_idle_s
        plane.wheel.watch(self)

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        state = self._state
        if state == HEAD:
            if self.is_paused:
                self._ahead(data)
            else:
                self._read(self._buffer + data if self._buffer else data)
        elif state == BODY:
            rest = self._on_body(data)
            if rest:
                self._read(rest)
        elif state == BUSY:
            self._ahead(data)
        elif state == TUNNEL and isinstance(self.relay, Tunnel):
            self.relay.from_client(data)

    def connection_lost(self, _: Exception | None) -> None:
        """The client has gone."""
        self._plane.left(self)
        self.due = NEVER
        self._state = ENDING
        self._forget_body()
        self._settle_unread()
        self._hold(b"")
        relay, self.relay = self.relay, None
        if relay is not None:
            relay.leave()

    def pause_writing(self) -> None:
        """The client does not read as fast as its engine writes."""
        self.is_paused = True
        relay, picker = self.relay, self._plane.picker
        self._unread_bytes = self.transport.get_write_buffer_size()
        picker.buffered_bytes += self._unread_bytes
        if relay is None:
            return
        relay.client_paused()
        if self._plane.is_crammed():
            self._plane.loop.call_soon(self._overload, relay)

    def resume_writing(self) -> None:
        """The client reads again."""
        self.is_paused = False
        self._settle_unread()
        if self.relay is not None:
            self.relay.client_resumed()
        elif self._buffer and self._state == HEAD:
            self._plane.loop.call_soon(self._go_on)

    def _overload(self, relay: Relay | Tunnel) -> None:
        if self.relay is relay and self.is_paused:
            relay.overload()

    def _settle_unread(self) -> None:
        self._plane.picker.buffered_bytes -= self._unread_bytes
        self._unread_bytes = 0

    # ------------------------------------------------------------------ requests

    def _read(self, data: bytes) -> None:
        """Take one request after the other, for as long as each is answered at once and the client reads."""
        if self._buffer:
            self._hold(b"")
        while data and self._state == HEAD and not self.is_paused:
            data = self._one(data)
        if data and self._state != ENDING:
            self._ahead(data)

    def _one(self, data: bytes) -> bytes:
        """Take one request; returns what came behind it."""
        if data[0] in b"\r\n":
            # Some clients send an empty line after a body (RFC 9112, section 2.2).
            found = _EMPTY_LINES.match(data)
            if found is None:
                return self._partial(data) if data == b"\r" else self._refuse(400, "A line ends without CR.")
            return data[found.end() :]
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return self._partial(data)
        if end > MAX_HEAD_BYTES:
            return self._refuse(431, f"The request's headers are larger than {MAX_HEAD_BYTES} bytes.")
        try:
            head, declared = self._plane.heads.read(data[:end])
        except BadHead as error:
            return self._refuse(error.status, str(error))
        rest = data[end + 4 :]
        self._head = head
        self._is_last = not head.is_lasting
        length = declared or 0
        is_incomplete = head.is_chunked or len(rest) < length
        refusal = self._door(head, declared, is_incomplete)
        if refusal is not None:
            if is_incomplete:
                self._is_last = True
            self.answer(refusal.status, refusal.headers, refusal.body)
            return b"" if is_incomplete else rest[length:]
        begun_at = self._begun_at or monotonic()
        if is_incomplete:
            self._begun_at = begun_at
            return self._collect(head, length, rest)
        if len(rest) == length:
            self._send_on(head, rest, begun_at, begun_at)
            return b""
        self._send_on(head, rest[:length], begun_at, begun_at)
        return rest[length:]

    def _door(self, head: RequestHead, declared: int | None, is_incomplete: bool) -> Answered | None:
        """Return the answer of a request that goes no further."""
        plane, target, picker = self._plane, head.target, self._plane.picker
        path, headers = target.path, head.headers
        if target.is_denied and not plane.settings.are_all_paths_public:
            body = replies.error_body(404, replies.NOT_PUBLIC, "path_not_public")
            return Answered(404, replies.JSON_TYPE, body, "path_not_public")
        if picker.check_key is not None:
            tenant = picker.let_in(path, headers)
            if isinstance(tenant, Answered):
                return tenant
            self._tenant = tenant
        if target.method == "GET":
            models = picker.models(target.method, path, headers)
            if models is not None:
                return models
        if is_incomplete:
            if plane.is_crammed():
                return picker.refused(path, headers, RefusalReason.SATURATED, replies.CRAMMED, retry_after_s=1.0)
            charged = picker.charge(path, headers, declared)
            if isinstance(charged, Answered):
                return charged
            self._charged = charged
        elif (declared or 0) > picker.limits.max_body_bytes:
            return picker.too_large(path, headers)
        return None

    def _partial(self, data: bytes) -> bytes:
        """Wait for the rest of a head."""
        if len(data) > MAX_HEAD_BYTES:
            return self._refuse(431, f"The request's headers are larger than {MAX_HEAD_BYTES} bytes.")
        if BARE_NEWLINE.search(data) is not None:
            return self._refuse(400, "A line of the head ends without CR, or holds a NUL.")
        if self._plane.is_crammed():
            return self._refuse(503, replies.CRAMMED)
        self._hold(data)
        if not self._begun_at:
            self._begun_at = monotonic()
            self._set_due(self._begun_at + self._plane.settings.clocks.headers_s)
        return b""

    def _collect(self, head: RequestHead, length: int, rest: bytes) -> bytes:
        """Begin to receive a body that did not come with its head; returns what came behind it."""
        self._state = BODY
        self._set_due(self._begun_at + self._plane.settings.clocks.upload_s)
        if head.expects_continue and not rest:
            self.transport.write(replies.CONTINUE)
        if head.is_chunked:
            self._decoder = ChunkDecoder()
        else:
            self._missing = length
        return self._on_body(rest) if rest else b""

    def _on_body(self, data: bytes) -> bytes:
        """Take some of a body; returns what came behind it, which is the caller's: requests may be many in one read."""
        decoder = self._decoder
        if decoder is None:
            missing = self._missing - len(data)
            if missing > 0:
                self._missing = missing
                self._keep(data)
                return b""
            pieces = self._body
            pieces.append(data[:missing] if missing else data)
            self._body_is_there(b"".join(pieces))
            return data[missing:] if missing else b""
        try:
            decoder.feed(data)
        except BadChunk as error:
            return self._refuse(400, f"The request's body is not chunked as it says: {error}.")
        if not self._may_grow(decoder) or not decoder.is_over:
            return b""
        self._body_is_there(decoder.take())
        return decoder.rest

    def _keep(self, data: bytes) -> None:
        """Keep a piece of a body; small ones together, for each object costs more than they hold."""
        pieces = self._body
        if len(data) >= _SMALL_PIECE_BYTES:
            pieces.append(data)
        elif pieces and type(pieces[-1]) is bytearray:
            pieces[-1] += data
        else:
            pieces.append(bytearray(data))

    def _may_grow(self, decoder: ChunkDecoder) -> bool:
        """Charge a body of unknown length for what it has become."""
        picker, head = self._plane.picker, self._head
        assert head is not None
        more = decoder.size_bytes - self._charged
        if decoder.size_bytes <= picker.limits.max_body_bytes and more <= 0:
            return True
        if decoder.size_bytes > picker.limits.max_body_bytes:
            refusal = picker.too_large(head.target.path, head.headers)
        else:
            # What it was charged so far comes back first: else it would count twice.
            picker.uncharge(self._charged)
            self._charged = 0
            charged = picker.charge(head.target.path, head.headers, decoder.size_bytes)
            if not isinstance(charged, Answered):
                self._charged = charged
                return True
            refusal = charged
        self._is_last = True
        self._forget_body()
        self.answer(refusal.status, refusal.headers, refusal.body)
        return False

    def _body_is_there(self, body: bytes) -> None:
        head, charged = self._head, self._charged
        assert head is not None
        self._body = []
        self._decoder = None
        self._charged = self._missing = 0
        self._send_on(head, body, self._begun_at, monotonic(), charged)

    def _send_on(self, head: RequestHead, body: bytes, begun_at: float, received_at: float, charged: int = 0) -> None:
        self._state = BUSY
        self._begun_at = 0.0
        self.relay = relay = Relay(self._plane, self, head, body, charged, begun_at, received_at)
        self._set_due(self._plane.next_look(received_at, begun_at))
        relay.start(self._tenant)

    def _ahead(self, data: bytes) -> None:
        """Keep what comes before its turn."""
        if len(self._buffer) + len(data) <= MAX_PIPELINED_BYTES and not self._plane.is_crammed():
            if not self._is_last or self._state == HEAD:
                self._hold(self._buffer + data)
            return
        # What is thrown away here must not be missed later: nothing that follows is read as a request.
        self._is_last = True
        self._hold(b"")
        if self._state == HEAD:
            self._end()
        elif self._head is not None and self._head.upgrade:
            self.transport.abort()

    def _hold(self, data: bytes) -> None:
        """Keep bytes that nothing can be done with yet; they count against the budget of bodies."""
        self._plane.picker.buffered_bytes += len(data) - len(self._buffer)
        self._buffer = data

    # ------------------------------------------------------------------ answers

    def answer(self, status: int, headers: tuple[tuple[str, str], ...], body: bytes) -> None:
        """Send an answer of the pool itself to the request under way."""
        head, plane = self._head, self._plane
        is_last = self.ends_after()
        made = replies.local_answer(
            status,
            headers,
            body,
            request_id=(head.headers.get("x-request-id") if head is not None else None) or plane.fresh_id().decode(),
            is_last=is_last,
            is_head=head is not None and head.target.method == "HEAD",
            minor=1 if head is None else head.target.minor,
        )
        is_unread = self._state != BUSY
        self.transport.write(made)
        if is_last and is_unread:
            self._linger()
        else:
            self.answered()

    def answer_error(self, status: int, message: str) -> None:
        """Send an error of the data plane."""
        self.answer(status, replies.JSON_TYPE, replies.error_body(status, message))

    def ends_after(self, is_unframed: bool = False) -> bool:
        """Whether the connection ends with the answer whose head is being made; it is then told so."""
        if is_unframed or self._plane.is_draining:
            self._is_last = True
        return self._is_last

    def answered(self) -> None:
        """The answer is sent; go on with the next request, or end."""
        self.relay = self._head = None
        self._begun_at = 0.0
        if self._is_last:
            self._end()
            return
        self._state = HEAD
        plane = self._plane
        self.due = plane.wheel.now + (plane.linger_s if plane.is_draining else plane.settings.clocks.connection_idle_s)
        if self._buffer:
            plane.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._state == HEAD and self._buffer and not self.is_paused:
            self._read(self._buffer)

    def switched(self, tunnel: Tunnel) -> None:
        """The connection became a tunnel; what came ahead belongs to it."""
        self._state = TUNNEL
        self.relay = tunnel
        data = self._buffer
        if data:
            self._hold(b"")
            tunnel.from_client(data)

    def break_off(self, event: bytes, is_reset: bool = False) -> None:
        """End the connection in the middle of an answer, after `event`.

        is_reset: an orderly close would look like the answer's end.
        """
        self.relay = self._head = None
        if self.is_paused:
            # Who does not read would not see the event either, and is not waited for.
            self._state = ENDING
            self.transport.abort()
            return
        if event:
            self.transport.write(event)
        if is_reset:
            self._no_linger()
        self._end()
        self._set_due(self._plane.wheel.now + self._plane.settings.clocks.linger_s)

    def forwarded(self, head: RequestHead) -> bytes:
        """The lines, each after its line end, that tell an engine whose request it is."""
        if not self._peer:
            plane, peer = self._plane, self.transport.get_extra_info("peername")
            address, scheme = str(peer[0]) if peer else "unknown", "https" if plane.is_tls else "http"
            self._peer = f"\r\nx-forwarded-for: {address}\r\nx-forwarded-proto: {scheme}".encode()
        if head.forwarded_for:
            return self._peer.replace(b": ", b": %b, " % head.forwarded_for.encode("latin-1"), 1)
        return self._peer

    def _refuse(self, status: int, message: str) -> bytes:
        """Answer what cannot be read and end the connection: where the next request begins is not known."""
        self._is_last = True
        self._forget_body()
        self._plane.picker.driver.fold.refused_at_door(RefusalReason.BAD_REQUEST)
        self.answer_error(status, message)
        return b""

    # ------------------------------------------------------------------ the end

    def on_due(self, now: float) -> None:
        """Somebody was too slow, or the connection was unused for too long."""
        state = self._state
        if state in (BUSY, TUNNEL) and self.relay is not None:
            due = self.relay.on_due(now)
            if self._state == state:
                self.due = due
        elif state == BODY or (state == HEAD and self._begun_at):
            self._refuse(408, replies.too_slow(self._plane.settings))
        elif state == HEAD:
            self._end()
        else:
            self.due = NEVER
            self.transport.abort()

    def _set_due(self, due: float) -> None:
        self.due = due
        wheel = self._plane.wheel
        if due < wheel.horizon:
            wheel.watch(self)

    def _end(self) -> None:
        """Close when what was written is sent."""
        self._state = ENDING
        self._hold(b"")
        self.due = self._plane.wheel.now + self._plane.settings.clocks.stream_idle_s
        self.transport.close()

    def _linger(self) -> None:
        """Let the client read the answer while it still sends: a close at once would reset the connection."""
        self._state = ENDING
        self._head = None
        self._hold(b"")
        self._set_due(self._plane.wheel.now + self._plane.settings.clocks.linger_s)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def leave(self, linger_s: float) -> None:
        """The worker stops: end soon, or with the answer under way."""
        if self._state == HEAD and not self._begun_at:
            self._set_due(min(self.due, self._plane.wheel.now + linger_s))

    def abort(self) -> None:
        """End now."""
        self.transport.abort()

    def _forget_body(self) -> None:
        self._body = []
        self._decoder = None
        self._begun_at = 0.0
        charged, self._charged = self._charged, 0
        if charged:
            self._plane.picker.uncharge(charged)

    def _no_linger(self) -> None:
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
