"""Token usage out of what was kept of an answer: its last bytes, and for Anthropic's streams its first.

Owns how much is kept.  What the fields mean is `wire.usage`'s; engines' figures are input to be checked, never trusted.
"""

import re

import msgspec

from shoal.hosts.direct.answerheads import AnswerHead
from shoal.kernel import UNREADABLE
from shoal.pool import Api
from shoal.wire import Usage, UsageMeter

KEEP_BYTES = 4096
"""Usage stands in the last event, or near the end of a document."""

MAX_TOKENS = 1 << 30
"""More than any request can have: a figure above is a mistake or an attack."""

NO_USAGE = Usage()
_MARK = b'"usage"'
# In an event stream no line of the engine looks like this, so it can only be the frame of a chunk.
_FRAME = re.compile(rb"\r\n[0-9a-fA-F]{1,15}\r\n")
_USAGE_AT = re.compile(rb'"usage"\s*:\s*\{')
_SILENT_APIS = frozenset((Api.TOKENIZE, Api.AUDIO))


def keeps_first(answer: AnswerHead, api: Api) -> bool:
    """Whether the first bytes matter too: Anthropic's stream begins with the prompt's tokens."""
    return answer.is_events and api is Api.MESSAGES


def keeps_tail(answer: AnswerHead) -> bool:
    """Whether its last bytes can name usage."""
    return answer.is_events or answer.is_json


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Figures(msgspec.Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Document(msgspec.Struct, gc=False):
    usage: _Figures


_DOCUMENT = msgspec.json.Decoder(_Document)


def usage_in(answer: AnswerHead, api: Api, body: bytes) -> Usage:
    """Read the usage out of a body that came in one read."""
    if not keeps_tail(answer):
        return NO_USAGE
    return usage_of(answer, api, body[:KEEP_BYTES] if keeps_first(answer, api) else b"", body[-KEEP_BYTES:])


def usage_of(answer: AnswerHead, api: Api, first: bytes, tail: bytes) -> Usage:
    """Read the usage out of the first and the last bytes of a body, frames of chunks among them."""
    at = tail.rfind(_MARK)
    if (at < 0 and _MARK not in first) or answer.is_encoded or api in _SILENT_APIS:
        return NO_USAGE
    if not first:
        # What engines mostly send: a whole document, or a last event whole, with the fields of chat.
        found = tail
        if answer.is_events:
            start, stop = tail.rfind(b"data: ", 0, at), tail.find(b"\n", at)
            found = tail[start + 6 : stop] if start >= 0 and stop > 0 else b""
        try:
            usage = _DOCUMENT.decode(found).usage
        except UNREADABLE:
            pass
        else:
            details = usage.prompt_tokens_details
            cached = details.cached_tokens if details is not None else None
            return _checked(usage.prompt_tokens, cached, usage.completion_tokens)
    return _searched(answer, first, tail)


def _searched(answer: AnswerHead, first: bytes, tail: bytes) -> Usage:
    """Read every event or the document, whatever its shape."""
    meter = UsageMeter()
    if answer.is_events:
        if first:
            meter.feed(_unframed(first, answer))
            meter.feed(b"\n\n")
        meter.feed(_unframed(tail, answer))
    elif answer.is_json:
        _read_document(meter, _unframed(tail, answer).strip())
    return _checked(*meter.usage)


def _unframed(body: bytes, answer: AnswerHead) -> bytes:
    return _FRAME.sub(b"", b"\r\n" + body) if answer.is_chunked else body


def _read_document(meter: UsageMeter, tail: bytes) -> None:
    """Read a whole document, or the last `usage` of one whose beginning is gone."""
    meter.read(tail)
    if meter.usage != NO_USAGE:
        return
    starts = [found.end() - 1 for found in _USAGE_AT.finditer(tail)]
    if starts:
        meter.read(b'{"usage":' + tail[starts[-1] : _end_of_object(tail, starts[-1])] + b"}")


def _end_of_object(text: bytes, at: int) -> int:
    """Where the object that begins at `at` ends; usage holds no braces in strings."""
    depth = 0
    for end in range(at, len(text)):
        if text[end] == 123:
            depth += 1
        elif text[end] == 125:
            depth -= 1
            if not depth:
                return end + 1
    return len(text)


def _checked(prompt: int | None, cached: int | None, completion: int | None) -> Usage:
    if prompt is not None and not 0 <= prompt <= MAX_TOKENS:
        prompt = None
    if completion is not None and not 0 <= completion <= MAX_TOKENS:
        completion = None
    if cached is not None and (prompt is None or not 0 <= cached <= prompt):
        cached = None
    return Usage(prompt, cached, completion)
