"""Chunked bodies: one walk follows an answer without touching its bytes, another takes a request's apart.

Owns the grammar of RFC 9112, section 7.1, and what one whole chunk looks like.  Extensions are passed over, trailers
dropped; anything else that is not exactly a chunk is an error, for a reader that forgives and one that does not see
different messages.
"""

import re

from shoal.hosts.direct.heads import BARE_NEWLINE, FIELD

_SIZE_LINE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_MAX_LINE_BYTES = 4096
_MAX_TRAILER_BYTES = 16 * 1024
_CRLF = b"\r\n"
_SIZES = {b"%x" % size: size for size in range(2048)}

WHOLE_BYTES = 1024
"""The largest payload of a chunk that `WHOLE` knows: an event of a token is a few hundred bytes."""

WHOLE = {
    len(opening) + size + 2: (len(opening), opening, size)
    for size in range(1, WHOLE_BYTES + 1)
    for opening in (b"%x\r\n" % size,)
}
"""By the length of one whole chunk: the length of its size line, that line, and the bytes of its payload.

What is so long, begins so and ends with CRLF is that chunk and nothing else."""


class BadChunk(Exception):
    """The body is not chunked as it says."""


def _size(line: bytes) -> int:
    found = _SIZE_LINE.fullmatch(line)
    if found is None or len(line) > _MAX_LINE_BYTES:
        raise BadChunk("a chunk's size")
    return int(found[1], 16)


def _check_trailers(section: bytes) -> None:
    """Trailers are dropped, but what is none may be the next message to another reader.  section: whole lines."""
    for line in section[:-2].split(_CRLF) if section else ():
        if FIELD.fullmatch(line) is None:
            raise BadChunk("its trailers")


class ChunkWalk:
    """Follows a chunked body that is passed on as it comes.

    body_bytes: payload so far.  is_over: the body has ended.  left_bytes: bytes of the last read behind its end.
    owes_end: trailers were cut off, so the empty line that ends the body is for the caller to send.
    is_between: no chunk is under way, so something may be put in.
    """

    __slots__ = ("_is_in_trailers", "_left", "_line", "body_bytes", "is_over", "left_bytes", "owes_end")

    def __init__(self) -> None:
        self._left = 0
        self._line = b""
        self._is_in_trailers = False
        self.body_bytes = self.left_bytes = 0
        self.is_over = self.owes_end = False

    @property
    def is_between(self) -> bool:
        """Whether the last byte passed on ended a chunk."""
        return not (self._left or self._line or self._is_in_trailers)

    def feed(self, data: bytes) -> int:
        """Return how many bytes of `data` to pass on; raises BadChunk, and `is_between` is then as before `data`."""
        if self._is_in_trailers:
            return self._trailers(data)
        held = len(self._line)
        if held:
            data = self._line + data
            return self._walk(data, 0, len(data)) - held
        return self._walk(data, self._left, len(data))

    def _walk(self, data: bytes, at: int, end: int) -> int:
        """at: where the chunk under way ends, its line end included; 0 when none is."""
        if at == 1 and data[0] != 10:
            raise BadChunk("the end of a chunk")
        while True:
            if at > end:
                if at == end + 1 and end and data[end - 1] != 13:
                    raise BadChunk("the end of a chunk")
                self._left = at - end
                self._line = b""
                return end
            if at > 1 and data[at - 2 : at] != _CRLF:
                raise BadChunk("the end of a chunk")
            if at == end:
                self._left = 0
                self._line = b""
                return end
            stop = data.find(_CRLF, at)
            if stop < 0:
                if end - at > _MAX_LINE_BYTES:
                    raise BadChunk("a chunk's size")
                self._left = 0
                self._line = data[at:]
                return end
            line = data[at:stop]
            size = _SIZES.get(line)
            if size is None:
                size = _size(line)
            if not size:
                return self._last(data, stop + 2, end)
            self.body_bytes += size
            at = stop + size + 4

    def _last(self, data: bytes, at: int, end: int) -> int:
        self._left = 0
        self._line = b""
        if data[at : at + 2] == _CRLF:
            self.is_over = True
            self.left_bytes = end - at - 2
            return at + 2
        self._is_in_trailers = True
        self._trailers(data[at:])
        return at

    def _trailers(self, data: bytes) -> int:
        self._line = line = self._line + data
        stop = 0 if line.startswith(_CRLF) else line.find(b"\r\n\r\n") + 2
        if (len(line) if stop == 1 else stop) > _MAX_TRAILER_BYTES:
            raise BadChunk("its trailers")
        if stop == 1:
            return 0
        _check_trailers(line[:stop])
        self.is_over = self.owes_end = True
        self.left_bytes = len(line) - stop - 2
        return 0


class ChunkDecoder:
    """Takes a chunked body apart.

    size_bytes: payload so far.  is_over: the body has ended.  rest: what came behind its end.
    """

    __slots__ = ("_held", "_is_in_trailers", "_left", "_payload", "is_over", "rest", "size_bytes")

    def __init__(self) -> None:
        # One buffer: a list of pieces would hold fifty times the payload when chunks are tiny.
        self._payload = bytearray()
        self.size_bytes = 0
        self.is_over = False
        self.rest = b""
        self._held = b""
        self._left = 0
        self._is_in_trailers = False

    def feed(self, data: bytes) -> None:
        """Take what was read; raises BadChunk."""
        if self._held:
            data = self._held + data
            self._held = b""
        at, end = 0, len(data)
        while not self.is_over and at < end:
            if self._is_in_trailers:
                at = self._trailers(data, at)
            elif self._left > 2:
                stop = min(end, at + self._left - 2)
                self._payload += data[at:stop]
                self.size_bytes += stop - at
                self._left -= stop - at
                at = stop
            elif self._left:
                at = self._line_end(data, at, end)
            else:
                at = self._size_line(data, at, end)
        if self.is_over:
            self.rest = data[at:]

    def take(self) -> bytes:
        """Return the payload since the last time."""
        payload = bytes(self._payload)
        self._payload.clear()
        return payload

    def _line_end(self, data: bytes, at: int, end: int) -> int:
        found = data[at : at + 2]
        if not _CRLF.startswith(found):
            raise BadChunk("the end of a chunk")
        if len(found) < 2:
            self._held = found
            return end
        self._left = 0
        return at + 2

    def _size_line(self, data: bytes, at: int, end: int) -> int:
        stop = data.find(_CRLF, at)
        if stop < 0:
            # An error is told at once where the rest cannot mend it.
            if end - at > _MAX_LINE_BYTES or b"\n" in data[at:]:
                raise BadChunk("a chunk's size")
            self._held = data[at:]
            return end
        size = _size(data[at:stop])
        self._is_in_trailers = not size
        self._left = size + 2 if size else 0
        return stop + 2

    def _trailers(self, data: bytes, at: int) -> int:
        stop = at if data.startswith(_CRLF, at) else data.find(b"\r\n\r\n", at) + 2
        if (len(data) if stop == 1 else stop) - at > _MAX_TRAILER_BYTES:
            raise BadChunk("its trailers")
        if stop == 1:
            self._held = held = data[at:]
            if BARE_NEWLINE.search(held) is not None:
                raise BadChunk("its trailers")
            return len(data)
        _check_trailers(data[at:stop])
        self.is_over = True
        return stop + 2
