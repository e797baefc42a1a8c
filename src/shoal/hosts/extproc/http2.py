"""The server's side of one HTTP/2 connection (RFC 9113), for the one client that our unix socket has: our own Envoy.

Owns frames, flow control both ways, limits and the paths of requests; bytes go in, events and bytes come out, without
I/O.  What a stream means is `lean`'s.  Of a head only `:path` is read.  The client is told to keep no header table, so
that a header block means the same whenever it comes and need be decoded only once (RFC 7541, section 4.2).
"""

import struct
from collections import deque
from typing import Final

import msgspec
from hpack import Decoder
from hpack.exceptions import HPACKError

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
REFUSED_STREAM, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 9, 11

# Long bodies come in few frames; a short request never waits for more than one of them.
MAX_FRAME_BYTES = 256 * 1024
MAX_BLOCK_BYTES = 64 * 1024
MAX_CONTINUATIONS = 64
MAX_STREAMS = 1_000_000
MAX_WINDOW = (1 << 31) - 1
# A path is remembered for this many header blocks of up to this size; Envoy sends three.
KEPT_BLOCKS, KEPT_BLOCK_BYTES = 64, 1024

_FRAME = struct.Struct(">IBI")  # length and type, flags, stream
_FRAME_BYTES = _FRAME.size
_unpack_frame = _FRAME.unpack_from
_LONGEST_DATA_WORD = MAX_FRAME_BYTES << 8
_LOW_WINDOW = MAX_WINDOW // 2
_U32 = struct.Struct(">I")
_SETTING = struct.Struct(">HI")
_FIRST_WINDOW = 65_535
_FIRST_FRAME_BYTES = 16_384
_LEAVING = b"leaving\0"


class Opened(msgspec.Struct, frozen=True, gc=False):
    """A request came.  path: "" when it has none.  is_end: no data follows."""

    stream_id: int
    path: str
    is_end: bool


class Received(msgspec.Struct, frozen=True, gc=False):
    """Data as far as it is there, or the end of the client's half (`data` may then be empty)."""

    stream_id: int
    data: memoryview
    is_end: bool


class Reset(msgspec.Struct, frozen=True, gc=False):
    """The client gave the stream up."""

    stream_id: int
    code: int


Http2Event = Opened | Received | Reset
_NOTHING = memoryview(b"")


class _Broken(Exception):
    """The client broke the protocol: the connection ends with this code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class _Stream:
    __slots__ = ("has_ended", "is_remote_closed", "receive_window", "send_queue", "send_window")

    def __init__(self, send_window: int, is_remote_closed: bool) -> None:
        self.send_window = send_window
        self.receive_window = MAX_WINDOW
        self.is_remote_closed = is_remote_closed
        # What flow control holds back, and behind it the closing header block.
        self.send_queue: deque[tuple[bytes, bool]] | None = None
        self.has_ended = False


class Paths:
    """Reads the `:path` of header blocks, in the order in which they came."""

    __slots__ = ("_decoder", "_known")

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_BLOCK_BYTES)
        self._known: dict[bytes, str] = {}

    def forbid_table(self) -> None:
        """The client has acknowledged that it keeps no table."""
        self._decoder.max_allowed_table_size = 0

    def read(self, block: bytes) -> str:
        """Return the path in `block`, "" when there is none."""
        known = self._known.get(block)
        if known is not None:
            return known
        try:
            headers = self._decoder.decode(block, raw=True)
        except (HPACKError, ValueError, IndexError) as error:
            raise _Broken(COMPRESSION_ERROR, "a header block cannot be read") from error
        found = next((value for name, value in headers if name == b":path"), b"")
        path = bytes(found).decode("latin-1")
        # Without a table and any right to one, a block neither reads nor leaves anything outside itself.
        decoder = self._decoder
        if not decoder.header_table_size and not decoder.max_allowed_table_size and len(block) <= KEPT_BLOCK_BYTES:
            if len(self._known) >= KEPT_BLOCKS:
                self._known.clear()
            self._known[block] = path
        return path


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return _FRAME.pack(len(payload) << 8 | kind, flags, stream_id) + payload


class Connection:
    """One connection.  Feed it with `receive`, answer with `send_*`, and write what `take` returns."""

    def __init__(self, max_streams: int = MAX_STREAMS) -> None:
        self.is_closed = False
        self.why_closed = ""
        # Whether the client waits for something of what `take` would return; it does not for the end of what it ended.
        self.is_urgent = True
        self._max_streams = max_streams
        self._streams: dict[int, _Stream] = {}
        self._last_id = 0
        self._refuse_from = MAX_WINDOW
        self._is_prefaced = self._is_settled = self._is_leaving = False
        self._paths = Paths()
        self._pending: list[bytes] = []
        self._pending_bytes = self._needed_bytes = 0
        # A header block under way: its stream, whether it ends the stream, its parts.
        self._block: tuple[int, bool, list[bytes]] | None = None
        # Of a DATA frame whose payload comes in parts: its stream, whether it ends the stream, bytes to come.
        self._cut: tuple[int, bool, int] | None = None
        self._receive_window = MAX_WINDOW
        self._send_window = self._stream_window = _FIRST_WINDOW
        self._send_frame_bytes = _FIRST_FRAME_BYTES
        self._blocked: dict[int, None] = {}
        settings = ((0x1, 0), (0x3, max_streams), (0x4, MAX_WINDOW), (0x5, MAX_FRAME_BYTES), (0x6, MAX_BLOCK_BYTES))
        self._out = [
            frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in settings)),
            frame(WINDOW_UPDATE, 0, 0, _U32.pack(MAX_WINDOW - _FIRST_WINDOW)),
        ]
        # Our own first block says that we keep no table either.
        self._block_prefix = b"\x20"

    @property
    def open_streams(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    @property
    def has_left(self) -> bool:
        """Whether `leave` is complete: the client knows, and no stream is left."""
        return self._refuse_from != MAX_WINDOW and not self._streams

    @property
    def has_output(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._out)

    def is_open(self, stream_id: int) -> bool:
        """Whether the client may still hear of this stream."""
        return stream_id in self._streams

    def take(self) -> bytes:
        """Return the bytes to write, once."""
        self.is_urgent = False
        if not self._out:
            return b""
        out = b"".join(self._out)
        self._out.clear()
        return out

    # ------------------------------------------------------------------ bytes in

    def receive(self, data: bytes) -> list[Http2Event]:
        """Take bytes and return what they say; a broken protocol sets `is_closed` and leaves a GOAWAY to write."""
        events: list[Http2Event] = []
        if self.is_closed:
            return events
        if self._pending:
            self._pending.append(data)
            self._pending_bytes += len(data)
            if self._pending_bytes < self._needed_bytes:
                return events
            data = b"".join(self._pending)
            self._pending.clear()
        try:
            position = self._rest_of_data(data, events) if self._cut is not None else 0
            if not self._is_prefaced:
                position = self._preface(data)
            position = self._frames(data, position, events)
        except _Broken as broken:
            self.is_closed, self.why_closed, self.is_urgent = True, str(broken), True
            self._out.append(frame(GOAWAY, 0, 0, _U32.pack(self._last_id) + _U32.pack(broken.code)))
            return events
        if position < len(data):
            self._pending = [data[position:]]
            self._pending_bytes = len(data) - position
        return events

    def _preface(self, data: bytes) -> int:
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise _Broken(PROTOCOL_ERROR, "this is not HTTP/2 with prior knowledge")
        if len(data) < len(PREFACE):
            self._needed_bytes = len(PREFACE)
            return 0
        self._is_prefaced = True
        return len(PREFACE)

    def _frames(self, data: bytes, position: int, events: list[Http2Event]) -> int:
        """Read what is there from `position`; returns where the first frame starts that has to wait for its rest."""
        if not self._is_prefaced:
            return position
        view, size, handlers, streams = memoryview(data), len(data), _HANDLERS, self._streams
        self._needed_bytes = _FRAME_BYTES
        while size - position >= _FRAME_BYTES:
            word, flags, stream_id = _unpack_frame(data, position)
            start = position + _FRAME_BYTES
            end = start + (word >> 8)
            # The frames that nearly all bytes come in, without a call each.
            if not word & 0xFF and word <= _LONGEST_DATA_WORD and flags <= END_STREAM and self._block is None:
                stream = streams.get(stream_id)
                if stream is not None and not stream.is_remote_closed:
                    self._receive_window = window = self._receive_window - (word >> 8)
                    stream.receive_window -= word >> 8
                    if window < _LOW_WINDOW or stream.receive_window < _LOW_WINDOW:
                        self._give_back(stream_id, stream)
                    if end > size:
                        if start < size:
                            events.append(Received(stream_id, view[start:], False))
                        self._cut = (stream_id, flags == END_STREAM, end - size)
                        return size
                    if flags:
                        stream.is_remote_closed = True
                        events.append(Received(stream_id, view[start:end], True))
                    elif end > start:
                        events.append(Received(stream_id, view[start:end], False))
                    position = end
                    continue
            kind = word & 0xFF
            if word >> 8 > MAX_FRAME_BYTES:
                raise _Broken(FRAME_SIZE_ERROR, "a frame is too long")
            if (self._block is not None and kind != CONTINUATION) or (not self._is_settled and kind != SETTINGS):
                raise _Broken(PROTOCOL_ERROR, "a frame came where another was due")
            if end > size:
                self._needed_bytes = end - position
                break
            if kind < len(handlers):
                handlers[kind](self, flags, stream_id & MAX_WINDOW, view[start:end], events)
            position = end
        return position

    def _rest_of_data(self, data: bytes, events: list[Http2Event]) -> int:
        """Take what is there of a payload that began earlier; returns where it ends."""
        assert self._cut is not None
        stream_id, is_end, missing = self._cut
        size = min(missing, len(data))
        is_whole = size == missing
        self._cut = None if is_whole else (stream_id, is_end, missing - size)
        stream = self._streams.get(stream_id)
        if stream is not None and size:
            stream.is_remote_closed = is_end and is_whole
            events.append(Received(stream_id, memoryview(data)[:size], stream.is_remote_closed))
        return size

    def _give_back(self, stream_id: int, stream: _Stream) -> None:
        """Let the client send on: receive windows are as large as can be, and given back in big steps."""
        if self._receive_window < _LOW_WINDOW:
            self._out.append(frame(WINDOW_UPDATE, 0, 0, _U32.pack(MAX_WINDOW - self._receive_window)))
            self._receive_window = MAX_WINDOW
        if stream.receive_window < _LOW_WINDOW:
            self._out.append(frame(WINDOW_UPDATE, 0, stream_id, _U32.pack(MAX_WINDOW - stream.receive_window)))
            stream.receive_window = MAX_WINDOW

    def _known(self, stream_id: int) -> _Stream | None:
        """The open stream; None for a closed one, whose late frames mean nothing."""
        stream = self._streams.get(stream_id)
        if stream is None and (stream_id > self._last_id or not stream_id & 1):
            raise _Broken(PROTOCOL_ERROR, "a frame for a stream that was never opened")
        return stream

    def _on_data(self, flags: int, stream_id: int, payload: memoryview, events: list[Http2Event]) -> None:
        """Take what is not for `_frames`: data with padding, and of streams that are closed."""
        self._receive_window -= len(payload)
        stream = self._known(stream_id)
        if stream is None:
            return
        if stream.is_remote_closed:
            raise _Broken(STREAM_CLOSED, "data after the end of a stream")
        stream.receive_window -= len(payload)
        self._give_back(stream_id, stream)
        stream.is_remote_closed = is_end = bool(flags & END_STREAM)
        if flags & PADDED:
            payload = _unpadded(payload)
        if payload or is_end:
            events.append(Received(stream_id, payload, is_end))

    def _on_headers(self, flags: int, stream_id: int, payload: memoryview, events: list[Http2Event]) -> None:
        if not stream_id & 1:
            raise _Broken(PROTOCOL_ERROR, "a client's streams have odd numbers")
        if flags & (PADDED | HAS_PRIORITY):
            payload = _bare(flags, payload)
        if len(payload) > MAX_BLOCK_BYTES:
            raise _Broken(ENHANCE_YOUR_CALM, "a header block is too long")
        if flags & END_HEADERS:
            self._on_block(stream_id, bool(flags & END_STREAM), bytes(payload), events)
        else:
            self._block = (stream_id, bool(flags & END_STREAM), [bytes(payload)])

    def _on_continuation(self, flags: int, stream_id: int, payload: memoryview, events: list[Http2Event]) -> None:
        if self._block is None or self._block[0] != stream_id:
            raise _Broken(PROTOCOL_ERROR, "a continuation of nothing")
        _, is_end, parts = self._block
        parts.append(bytes(payload))
        if len(parts) > MAX_CONTINUATIONS or sum(map(len, parts)) > MAX_BLOCK_BYTES:
            raise _Broken(ENHANCE_YOUR_CALM, "a header block is too long")
        if flags & END_HEADERS:
            self._block = None
            self._on_block(stream_id, is_end, b"".join(parts), events)

    def _on_block(self, stream_id: int, is_end: bool, block: bytes, events: list[Http2Event]) -> None:
        path = self._paths.read(block)
        if stream_id > self._last_id:
            self._last_id = stream_id
            if stream_id >= self._refuse_from or len(self._streams) >= self._max_streams:
                self._out.append(frame(RST_STREAM, 0, stream_id, _U32.pack(REFUSED_STREAM)))
                return
            self._streams[stream_id] = _Stream(self._stream_window, is_end)
            events.append(Opened(stream_id, path, is_end))
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if stream.is_remote_closed or not is_end:
            raise _Broken(PROTOCOL_ERROR, "trailers that do not end their stream")
        stream.is_remote_closed = True
        events.append(Received(stream_id, _NOTHING, True))

    def _on_priority(self, _: int, stream_id: int, payload: memoryview, events: list[Http2Event]) -> None:
        if not stream_id or len(payload) != 5:
            raise _Broken(FRAME_SIZE_ERROR, "a priority of another size")

    def _on_reset(self, _: int, stream_id: int, payload: memoryview, events: list[Http2Event]) -> None:
        if len(payload) != 4:
            raise _Broken(FRAME_SIZE_ERROR, "a reset of another size")
        if self._known(stream_id) is not None:
            self._forget(stream_id)
            events.append(Reset(stream_id, _U32.unpack(payload)[0]))

    def _on_settings(self, flags: int, stream_id: int, payload: memoryview, events: list[Http2Event]) -> None:
        if stream_id:
            raise _Broken(PROTOCOL_ERROR, "settings of a stream")
        if len(payload) % _SETTING.size or (flags & ACK and payload):
            raise _Broken(FRAME_SIZE_ERROR, "settings of another size")
        if flags & ACK:
            if not self._is_settled:
                raise _Broken(PROTOCOL_ERROR, "an acknowledgement before any settings")
            self._paths.forbid_table()
            return
        self._is_settled = True
        for name, value in _SETTING.iter_unpack(payload):
            self._set(name, value)
        self._out.append(frame(SETTINGS, ACK, 0))
        self._unblock()

    def _set(self, name: int, value: int) -> None:
        if name == 0x2 and value > 1:
            raise _Broken(PROTOCOL_ERROR, "ENABLE_PUSH is 0 or 1")
        if name == 0x4:
            if value > MAX_WINDOW:
                raise _Broken(FLOW_CONTROL_ERROR, "a window is too large")
            change = value - self._stream_window
            self._stream_window = value
            for stream in self._streams.values():
                stream.send_window += change
                if stream.send_window > MAX_WINDOW:
                    raise _Broken(FLOW_CONTROL_ERROR, "a window is too large")
        elif name == 0x5:
            if not _FIRST_FRAME_BYTES <= value < 1 << 24:
                raise _Broken(PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of range")
            self._send_frame_bytes = value

    def _on_push(self, _: int, stream_id: int, payload: memoryview, events: list[Http2Event]) -> None:
        raise _Broken(PROTOCOL_ERROR, "a client cannot push")

    def _on_ping(self, flags: int, stream_id: int, payload: memoryview, events: list[Http2Event]) -> None:
        if stream_id or len(payload) != 8:
            raise _Broken(PROTOCOL_ERROR if stream_id else FRAME_SIZE_ERROR, "a ping of another form")
        if not flags & ACK:
            self._out.append(frame(PING, ACK, 0, bytes(payload)))
        elif self._is_leaving and payload == _LEAVING and self._refuse_from == MAX_WINDOW:
            # Everything that the client sent before it heard of our leaving has come.
            self._refuse_from = self._last_id + 1
            self._out.append(frame(GOAWAY, 0, 0, _U32.pack(self._last_id) + _U32.pack(NO_ERROR)))

    def _on_goaway(self, _: int, stream_id: int, payload: memoryview, events: list[Http2Event]) -> None:
        if stream_id or len(payload) < 8:
            raise _Broken(PROTOCOL_ERROR if stream_id else FRAME_SIZE_ERROR, "a GOAWAY of another form")

    def _on_window_update(self, _: int, stream_id: int, payload: memoryview, events: list[Http2Event]) -> None:
        if len(payload) != 4:
            raise _Broken(FRAME_SIZE_ERROR, "a window update of another size")
        more = _U32.unpack(payload)[0] & MAX_WINDOW
        if not stream_id:
            self._send_window += more
            if not more or self._send_window > MAX_WINDOW:
                raise _Broken(FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR, "a window update of no use")
            self._unblock()
            return
        stream = self._known(stream_id)
        if stream is None:
            return
        stream.send_window += more
        if not more or stream.send_window > MAX_WINDOW:
            code = FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR
            self.reset(stream_id, code)
            events.append(Reset(stream_id, code))
        elif stream.send_queue:
            self._send_queued(stream_id, stream)

    # ------------------------------------------------------------------ bytes out

    def send_headers(self, stream_id: int, block: bytes, is_end: bool = False) -> None:
        """Send a header block; with `is_end` behind all data of the stream, which then is over for both sides."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.has_ended:
            return
        stream.has_ended = is_end
        if stream.send_queue:
            stream.send_queue.append((block, True))
        else:
            self._send_block(stream_id, stream, block)

    def send_data(self, stream_id: int, data: bytes, head: bytes = b"") -> None:
        """Send data, now or as soon as the client's windows let it pass.  head: the header block to go before it."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.has_ended:
            return
        if head:
            self._send_block(stream_id, stream, head)
        size = len(data)
        if stream.send_queue or size > stream.send_window or size > self._send_window or size > self._send_frame_bytes:
            if stream.send_queue is None:
                stream.send_queue = deque()
            stream.send_queue.append((data, False))
            self._send_queued(stream_id, stream)
            return
        stream.send_window -= size
        self._send_window -= size
        self.is_urgent = True
        self._out += (_FRAME.pack(size << 8, 0, stream_id), data)

    def reset(self, stream_id: int, code: int) -> None:
        """Give the stream up."""
        if stream_id in self._streams:
            self._out.append(frame(RST_STREAM, 0, stream_id, _U32.pack(code)))
            self._forget(stream_id)

    def leave(self) -> None:
        """Ask the client to open its next streams elsewhere; those under way go on.

        Two steps (RFC 9113, section 6.8), so that no stream that is on its way here is refused.
        """
        if not self._is_leaving and not self.is_closed:
            self._is_leaving = True
            self._out.append(frame(GOAWAY, 0, 0, _U32.pack(MAX_WINDOW) + _U32.pack(NO_ERROR)))
            self._out.append(frame(PING, 0, 0, _LEAVING))

    def _send_block(self, stream_id: int, stream: _Stream, block: bytes) -> None:
        if self._block_prefix:
            block, self._block_prefix = self._block_prefix + block, b""
        flags = END_HEADERS | END_STREAM if stream.has_ended else END_HEADERS
        self._out += (_FRAME.pack(len(block) << 8 | HEADERS, flags, stream_id), block)
        if stream.has_ended:
            if not stream.is_remote_closed:
                # RFC 9113, section 8.1: the answer is whole, the rest of the request is not wanted.
                self.is_urgent = True
                self._out.append(frame(RST_STREAM, 0, stream_id, _U32.pack(NO_ERROR)))
            self._forget(stream_id)

    def _send_queued(self, stream_id: int, stream: _Stream) -> None:
        queue = stream.send_queue
        while queue:
            data, is_block = queue[0]
            if is_block:
                queue.popleft()
                self._send_block(stream_id, stream, data)
                continue
            start, size = 0, len(data)
            while start < size:
                chunk = min(size - start, stream.send_window, self._send_window, self._send_frame_bytes)
                if chunk <= 0:
                    queue[0] = (data[start:], False)
                    self._blocked[stream_id] = None
                    return
                stream.send_window -= chunk
                self._send_window -= chunk
                self.is_urgent = True
                self._out += (_FRAME.pack(chunk << 8, 0, stream_id), data[start : start + chunk])
                start += chunk
            queue.popleft()
        self._blocked.pop(stream_id, None)

    def _unblock(self) -> None:
        for stream_id in list(self._blocked):
            if self._send_window <= 0:
                return
            self._send_queued(stream_id, self._streams[stream_id])

    def _forget(self, stream_id: int) -> None:
        del self._streams[stream_id]
        self._blocked.pop(stream_id, None)


def _unpadded(payload: memoryview) -> memoryview:
    if not payload or payload[0] >= len(payload):
        raise _Broken(PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]


def _bare(flags: int, payload: memoryview) -> memoryview:
    """The header block in a HEADERS frame with more in it."""
    if flags & PADDED:
        payload = _unpadded(payload)
    if not flags & HAS_PRIORITY:
        return payload
    if len(payload) < 5:
        raise _Broken(FRAME_SIZE_ERROR, "a priority is cut")
    return payload[5:]


# By type of frame; those above are extensions, which mean nothing.
_HANDLERS = (
    Connection._on_data,
    Connection._on_headers,
    Connection._on_priority,
    Connection._on_reset,
    Connection._on_settings,
    Connection._on_push,
    Connection._on_ping,
    Connection._on_goaway,
    Connection._on_window_update,
    Connection._on_continuation,
)
