"""Split a stream of bytes into server-sent events, byte for byte.

Owns where an event ends (WHATWG HTML, section 9.2: a blank line; LF, CRLF or CR) and which bytes are its data.
It reads a copy: what goes to the client is never rebuilt from events.
"""

import re
from typing import NamedTuple

MAX_EVENT_BYTES = 1024 * 1024

_END = re.compile(rb"(?:\n|\r\n|\r(?!\n))(?:\n|\r\n|\r(?!\n))")
_LINES = re.compile(rb"\r\n|\n|\r")


class SseEvent(NamedTuple):
    """raw: the bytes as they came, blank line included.  is_whole: false for a piece of an event over the limit."""

    raw: bytes
    is_whole: bool = True


class SseSplitter:
    """Cuts chunks into events; holds at most `max_event_bytes` and one chunk.

    All `raw` in order plus `pending` are exactly the bytes that were fed.
    """

    __slots__ = ("_is_piece", "_max_event_bytes", "_pending")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._pending = b""
        self._is_piece = False

    @property
    def pending(self) -> bytes:
        """Bytes of an event whose end has not come."""
        return self._pending

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Return the events that `chunk` completes."""
        held = len(self._pending)
        data = self._pending + chunk if held else chunk
        events: list[SseEvent] = []
        start = 0
        # An end may begin in the last three bytes that were held.
        look = max(0, held - 3)
        has_cr = b"\r" in data
        while (stop := _end(data, look, has_cr)) > 0:
            events.append(SseEvent(data[start:stop], not self._is_piece))
            self._is_piece = False
            start = look = stop
        self._pending = data[start:] if start else data
        if len(self._pending) > self._max_event_bytes:
            # Keep the last bytes back, so that a blank line cut in two is still seen.
            cut = len(self._pending) - 3
            events.append(SseEvent(self._pending[:cut], is_whole=False))
            self._pending = self._pending[cut:]
            self._is_piece = True
        return events


def _end(data: bytes, look: int, has_cr: bool) -> int:
    """Return where the first event that ends at or after `look` ends, 0 when none does."""
    if not has_cr:
        blank = data.find(b"\n\n", look)
        return blank + 2 if blank >= 0 else 0
    found = _END.search(data, look)
    # A CR at the very end may be half of a CRLF that the next chunk completes.
    if found is None or (found.end() == len(data) and data[-1:] == b"\r"):
        return 0
    return found.end()


def data_of(event: bytes) -> bytes:
    """Return the data of one event: its `data` lines joined by LF, b"" when there is none."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]
    lines = [line[6:] if line[5:6] == b" " else line[5:] for line in _LINES.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines)
