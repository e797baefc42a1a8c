"""Server-sent events of running generations, written straight to the socket: one write per stream and step.

Owns the HTTP chunk framing and what faults do to a stream.  What the events say is a `Shape`'s.
"""

import asyncio
import socket
import struct
from typing import NamedTuple, Protocol

from shoal.hosts.engine.faults import FaultBox
from shoal.hosts.engine.generation import Generation
from shoal.hosts.engine.tokens import TOKEN_BYTES

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Frame(NamedTuple):
    """Bytes around the word of a token event: prefix + word + suffix, with `last` for suffix at the last token."""

    prefix: bytes
    suffix: bytes
    last: bytes


class Shape(Protocol):
    """How one API dresses a streamed answer.  Every piece is a whole event, ending in a blank line."""

    def preamble(self) -> list[bytes]:
        """Return events sent with the head, before the engine has begun."""
        ...

    def opening(self, generation: Generation) -> list[bytes]:
        """Return events sent with the first token of a generation."""
        ...

    def frame(self, generation: Generation) -> Frame | None:
        """Return the constant bytes around each word, or None when `token` must be asked each time."""
        ...

    def token(self, generation: Generation, position: int) -> bytes:
        """Return the event of the token at `position`."""
        ...

    def aborted(self, generation: Generation) -> list[bytes]:
        """Return what tells that an operator ended a generation."""
        ...

    def closing(self, generations: list[Generation]) -> list[bytes]:
        """Return events sent when all generations are done."""
        ...


class EventStream:
    """The response of one streaming request.

    done: resolved when everything is written; never after a stall, so the request then ends with its client.
    """

    __slots__ = ("_box", "_generations", "_is_chunked", "_is_silent", "_left", "_transport", "done", "shape")

    def __init__(
        self,
        transport: asyncio.Transport,
        shape: Shape,
        generations: list[Generation],
        box: FaultBox,
        *,
        is_chunked: bool,
    ) -> None:
        self._transport = transport
        self._generations = generations
        self._box = box
        self._is_chunked = is_chunked
        self._is_silent = False
        self._left = len(generations)
        self.shape = shape
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def sink(self, generation: Generation) -> "TokenStream":
        """Return where the tokens of one generation go."""
        return TokenStream(self, generation)

    def send(self, events: list[bytes]) -> None:
        """Send whole events, each as an HTTP chunk of its own."""
        self.write(b"".join([self.chunk(event) for event in events]))

    def write(self, data: bytes) -> None:
        """Send bytes that are framed already; nothing after a stall or a disconnect."""
        if data and not self._is_silent and not self._transport.is_closing():
            self._transport.write(data)

    def chunk(self, event: bytes) -> bytes:
        """Return an event in HTTP/1.1 chunk framing."""
        return b"%x\r\n%b\r\n" % (len(event), event) if self._is_chunked else event

    def around(self, prefix: bytes, suffix: bytes) -> tuple[bytes, bytes]:
        """Return prefix and suffix with the chunk framing built in; every word has the same length."""
        if not self._is_chunked:
            return prefix, suffix
        size = len(prefix) + TOKEN_BYTES + len(suffix)
        return b"%x\r\n%b" % (size, prefix), b"%b\r\n" % suffix

    def may_send(self, position: int) -> bool:
        """Apply faults before the token at `position`; False when it must not be sent."""
        if self._box.hits_streams and not self._is_silent:
            faults = self._box.faults
            if faults.cut_after is not None and position >= faults.cut_after:
                self._is_silent = True
                reset(self._transport)
            elif faults.stall_after is not None and position >= faults.stall_after:
                self._is_silent = True
        return not self._is_silent

    def end_one(self, last: bytes) -> None:
        """One generation is done and `last` is its last token; the last one closes the stream, unless it is stalled."""
        self._left -= 1
        if self._left or self._is_silent:
            self.write(last)
            return
        self.write(last + b"".join([self.chunk(event) for event in self.shape.closing(self._generations)]))
        if not self.done.done():
            self.done.set_result(None)


class TokenStream:
    """The sink of one generation of an event stream."""

    __slots__ = ("_has_frame", "_held", "_inner", "_last", "_sent", "_stream", "generation")

    def __init__(self, stream: EventStream, generation: Generation) -> None:
        self.generation = generation
        self._stream = stream
        self._sent = 0
        self._held = b""
        frame = stream.shape.frame(generation)
        self._has_frame = frame is not None
        self._inner = self._last = (b"", b"")
        if frame is not None:
            self._inner = stream.around(frame.prefix, frame.suffix)
            self._last = stream.around(frame.prefix, frame.last)

    def advance(self, count: int) -> None:
        """Send `count` more token events in one write."""
        stream = self._stream
        out = b""
        for position in range(self._sent, self._sent + count):
            if not stream.may_send(position):
                return
            if position == 0:
                out = b"".join([stream.chunk(event) for event in stream.shape.opening(self.generation)])
            out += self._event(position)
        self._sent += count
        if self._sent < self.generation.output_tokens:
            stream.write(out)
        else:
            self._held = out

    def end(self) -> None:
        """The engine is done with this generation: the last token goes out with what closes the stream."""
        if self.generation.is_aborted:
            shape = self._stream.shape
            self._held = b"".join([self._stream.chunk(event) for event in shape.aborted(self.generation)])
        self._stream.end_one(self._held)

    def _event(self, position: int) -> bytes:
        generation = self.generation
        if not self._has_frame:
            return self._stream.chunk(self._stream.shape.token(generation, position))
        start = position * TOKEN_BYTES
        end = start + TOKEN_BYTES
        prefix, suffix = self._inner if end < len(generation.answer) else self._last
        return prefix + generation.answer[start:end] + suffix


class WholeAnswer:
    """A request that is answered when all its generations are done."""

    __slots__ = ("_left", "done")

    def __init__(self, count: int) -> None:
        self._left = count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def sink(self, generation: Generation) -> "Collector":
        """Return where one generation reports its end."""
        return Collector(self, generation)

    def end_one(self) -> None:
        """One generation is done; the last one resolves `done`."""
        self._left -= 1
        if self._left == 0 and not self.done.done():
            self.done.set_result(None)


class Collector:
    """The sink of one generation whose tokens are not shown before the end."""

    __slots__ = ("_answer", "generation")

    def __init__(self, answer: WholeAnswer, generation: Generation) -> None:
        self.generation = generation
        self._answer = answer

    def advance(self, count: int) -> None:
        """Nothing to do: the text is known, only its time is not."""

    def end(self) -> None:
        """The engine is done with this generation."""
        self._answer.end_one()


def reset(transport: asyncio.Transport) -> None:
    """Close a connection with a TCP reset."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()
