"""One answer as it came off the wire, and what is read from it after it has ended.

While bytes arrive only times and pieces are kept; JSON is read once the request is over, so that the reading
does not delay the clock of other requests.
"""

import msgspec

from shoal.kernel import UNREADABLE


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts as the engine reports them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens served from the engine's cache, 0 when it does not say."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class _Text(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Text | None = None
    message: _Text | None = None
    text: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Reading(msgspec.Struct, frozen=True):
    """What an answer says.  is_done: a stream closed with `[DONE]`, or plain JSON that could be read."""

    text: str = ""
    usage: Usage | None = None
    is_done: bool = False
    is_error: bool = False


class Answer:
    """An answer in the making.

    status: 0 until the head came.  Times are `time.perf_counter` seconds (a uvloop's own clock has steps of 1 ms),
    0.0 when the thing did not happen: started_s the request was handed over, head_s, first_s the first body byte,
    ended_s.  pieces: reads from the socket.
    failure: "" when the answer ended as HTTP says it must, else `connect`, `timeout`, `cut` or `left` (by us).
    """

    __slots__ = ("body", "ended_s", "failure", "first_s", "head", "head_s", "pieces", "started_s", "status")

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self.status = 0
        self.head = b""
        self.head_s = 0.0
        self.first_s = 0.0
        self.ended_s = 0.0
        self.pieces = 0
        self.body = bytearray()
        self.failure = ""

    def header(self, name: str) -> str:
        """Return the value of the response header `name` (lower case), "" when absent."""
        mark = b"\r\n" + name.encode() + b":"
        at = self.head.lower().find(mark)
        if at < 0:
            return ""
        start = at + len(mark)
        end = self.head.find(b"\r\n", start)
        return self.head[start : end if end >= 0 else None].decode("latin-1").strip()

    def read(self) -> Reading:
        """Read text and usage out of the body, stream or plain; `usage` is taken from whatever chunk has it."""
        if self.header("content-type").startswith("text/event-stream"):
            return self._read_stream()
        try:
            chunk = _decode(self.body)
        except UNREADABLE:
            return Reading()
        return Reading(
            text=_said(chunk), usage=chunk.usage, is_done=chunk.error is None, is_error=chunk.error is not None
        )

    def _read_stream(self) -> Reading:
        said: list[str] = []
        usage: Usage | None = None
        is_done = is_error = False
        for line in bytes(self.body).split(b"\n"):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                is_done = True
                continue
            try:
                chunk = _decode(data)
            except UNREADABLE:
                is_error = True
                continue
            said.append(_said(chunk))
            usage = chunk.usage or usage
            is_error = is_error or chunk.error is not None
        return Reading(text="".join(said), usage=usage, is_done=is_done, is_error=is_error)


def _said(chunk: _Chunk) -> str:
    if not chunk.choices:
        return ""
    choice = chunk.choices[0]
    part = choice.delta or choice.message
    return (part.content if part else choice.text) or ""
