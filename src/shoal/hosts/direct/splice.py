"""The body of one answer on its way from an engine's socket to the client's, as it came.

Owns the finding of its end and the few bytes that are kept of it for usage.  Nothing is decoded, joined or framed anew,
but for clients of HTTP/1.0, who know no chunks.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from shoal.hosts.direct.answerheads import AnswerHead
from shoal.hosts.direct.chunks import WHOLE, WHOLE_BYTES, BadChunk, ChunkDecoder, ChunkWalk
from shoal.hosts.direct.tails import KEEP_BYTES

_CRLF = b"\r\n"
_CR, _LF = _CRLF
_whole_of = WHOLE.get  # bound once: an attribute of an imported name is looked up anew at each call

KEEP_READS = 16
"""So many reads are kept before they are cut to the bytes that are wanted, for cutting at each costs more."""

_HOLD_BYTES = KEEP_READS * WHOLE_BYTES  # and of larger ones no more than that


class Listener(Protocol):
    """Who is told of the body's end, once."""

    def completed(self, is_reusable: bool) -> None:
        """All of it went to the client.  is_reusable: the engine sent nothing behind it."""

    def broken(self, flag: str) -> None:
        """It cannot be followed any further; flag: as in Envoy's access log."""


Take = Callable[..., None]
"""Takes the bytes of one read, and what to send before them."""


class Splice:
    """One body.

    keeps_first, keeps_tail: whether its beginning and its end are kept.  first: the beginning.
    """

    __slots__ = (
        "_decoder",
        "_held_bytes",
        "_keeps_first",
        "_keeps_tail",
        "_left",
        "_listener",
        "_size",
        "_tail",
        "_takes_whole",
        "_walk",
        "_write",
        "first",
    )

    def __init__(self, listener: Listener, out: asyncio.Transport, *, keeps_first: bool, keeps_tail: bool) -> None:
        self._listener = listener
        self._write = out.write
        self._keeps_first = keeps_first
        self._keeps_tail = keeps_tail
        self._tail: list[bytes] = []
        self._walk: ChunkWalk | None = None
        self._decoder: ChunkDecoder | None = None
        self._left = self._size = self._held_bytes = 0
        # No chunk is under way, and of the next one nothing but the end is wanted.
        self._takes_whole = False
        self.first = b""

    def mode(self, answer: AnswerHead, minor: int) -> Take:
        """Return what takes the body of `answer` to a client of HTTP/1.`minor`."""
        if answer.is_chunked:
            if not minor:
                self._decoder = ChunkDecoder()
                return self._unframed
            self._walk = ChunkWalk()
            return self._chunked
        if answer.length is not None:
            self._left = answer.length
            return self._sized
        return self._until_close

    @property
    def body_bytes(self) -> int:
        """Payload so far, without what frames it."""
        return self._size if self._walk is None else self._size + self._walk.body_bytes

    @property
    def tail(self) -> bytes:
        """The last bytes of the body, frames of chunks among them."""
        return b"".join(self._tail)

    @property
    def is_framed(self) -> bool:
        """Whether the client can tell an answer that was cut from one that ended."""
        return self._walk is not None or bool(self._left)

    @property
    def may_put_in(self) -> bool:
        """Whether an event of ours may follow what was sent."""
        return self._walk.is_between if self._walk is not None else not self._left

    def framed(self, event: bytes) -> bytes:
        """Return an event of ours as it goes on the wire."""
        return b"%x\r\n%b\r\n" % (len(event), event) if self._walk is not None else event

    # ------------------------------------------------------------------ the ways of framing

    def _chunked(self, data: bytes, head: bytes = b"") -> None:
        """Mostly a read brings one event in one chunk, as a token comes: all that is done for it stands here."""
        whole = _whole_of(len(data))
        if whole is not None and self._takes_whole:
            width, opening, size = whole
            # Of the ways to compare, these cost least: `startswith` and `endswith` take more than all else here.
            if data[:width] == opening and data[-1] == _LF and data[-2] == _CR and not head:
                write = self._write
                write(data)
                self._size += size
                tail = self._tail
                tail.append(data)
                if len(tail) > KEEP_READS:
                    self._shorten()
                return
        self._walked(data, head)

    def _walked(self, data: bytes, head: bytes) -> None:
        walk = self._walk
        assert walk is not None
        try:
            stop = walk.feed(data)
        except BadChunk:
            self._listener.broken("UPE")
            return
        if walk.is_over:
            self._write(head + data[:stop] + (_CRLF if walk.owes_end else b""))
            if self._keeps_tail:
                self._keep(data)
            self._listener.completed(not walk.left_bytes)
            return
        if head:
            self._write(head + data[:stop])
        elif stop:
            self._write(data if stop == len(data) else data[:stop])
        if self._keeps_tail:
            self._keep(data)
            self._takes_whole = walk.is_between and not self._keeps_first

    def _sized(self, data: bytes, head: bytes = b"") -> None:
        size = len(data)
        left = self._left - size
        if left < 0:
            data = data[:left]
            size += left
        self._left = max(0, left)
        self._size += size
        self._write(head + data if head else data)
        if self._keeps_tail:
            self._keep(data)
        if left <= 0:
            self._listener.completed(not left)

    def _until_close(self, data: bytes, head: bytes = b"") -> None:
        self._size += len(data)
        self._write(head + data if head else data)
        if self._keeps_tail:
            self._keep(data)

    def _unframed(self, data: bytes, head: bytes = b"") -> None:
        decoder = self._decoder
        assert decoder is not None
        try:
            decoder.feed(data)
        except BadChunk:
            self._listener.broken("UPE")
            return
        payload = decoder.take()
        self._size += len(payload)
        self._write(head + payload)
        if self._keeps_tail:
            self._keep(data)
        if decoder.is_over:
            self._listener.completed(not decoder.rest)

    def _keep(self, data: bytes) -> None:
        if self._keeps_first:
            self.first += data[:KEEP_BYTES]
            self._keeps_first = len(self.first) < KEEP_BYTES
        if len(data) >= KEEP_BYTES:
            self._tail = [data[-KEEP_BYTES:]]
            return
        self._tail.append(data)
        self._held_bytes += len(data)
        if len(self._tail) > KEEP_READS or self._held_bytes > _HOLD_BYTES:
            self._shorten()

    def _shorten(self) -> None:
        self._held_bytes = 0
        self._tail = [b"".join(self._tail)[-KEEP_BYTES:]]
