"""Token usage out of what an engine answers, in every shape, streaming or not.

Owns the names of usage fields: OpenAI chat and completions (`prompt_tokens`), Responses and Anthropic
(`input_tokens`).  Usage may stand in any chunk, also in one with choices; what comes later replaces what came
before, field by field.  Nothing here changes a byte of the answer.

Anthropic counts differently: its `input_tokens` leaves out what was read from or written to the cache, and the
prompt is the sum of the three.  vLLM does the same once it reports cache fields, and without them its
`input_tokens` is the whole prompt; so the sum of what is present is right for both.
"""

from typing import Any, NamedTuple

import msgspec

from shoal.kernel import UNREADABLE
from shoal.wire.sse import MAX_EVENT_BYTES, SseSplitter, data_of

_MARK = b'"usage"'


class Usage(NamedTuple):
    """Tokens of one answer; None where the engine did not say.  cached_tokens is part of prompt_tokens."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class _Holder(msgspec.Struct, gc=False):
    usage: Any = None


class _Document(msgspec.Struct, gc=False):
    """An answer or a chunk: usage at its top, in `response` (Responses), or in `message` (Anthropic's start)."""

    usage: Any = None
    response: _Holder | None = None
    message: _Holder | None = None


class _Loose(msgspec.Struct, gc=False):
    """As _Document, where `message` is something else (an error text)."""

    usage: Any = None


_DOCUMENT = msgspec.json.Decoder(_Document)
_LOOSE = msgspec.json.Decoder(_Loose)


class UsageMeter:
    """Reads the usage of one answer: `feed` for the chunks of an event stream, `read` for a whole document."""

    __slots__ = ("_cached", "_completion", "_created", "_given", "_is_split", "_splitter")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._splitter = SseSplitter(max_event_bytes)
        self._given: int | None = None
        self._cached: int | None = None
        self._created = 0
        self._completion: int | None = None
        self._is_split = False

    @property
    def usage(self) -> Usage:
        """What is known so far."""
        prompt = self._given
        if prompt is not None and self._is_split:
            prompt += (self._cached or 0) + self._created
        return Usage(prompt, self._cached, self._completion)

    def feed(self, chunk: bytes) -> None:
        """Read the events that `chunk` completes."""
        for event in self._splitter.feed(chunk):
            if event.is_whole and _MARK in event.raw:
                self.read(data_of(event.raw))

    def read(self, document: bytes) -> None:
        """Read one JSON document: a whole answer, or the data of one event.  Anything else is passed over."""
        if _MARK not in document:
            return
        try:
            found = _DOCUMENT.decode(document)
        except msgspec.ValidationError:
            found = self._loose(document)
        except (msgspec.DecodeError, RecursionError):
            return
        for holder in (found.message, found.response, found):
            if holder is not None and isinstance(holder.usage, dict):
                self._take(holder.usage)

    def _loose(self, document: bytes) -> _Document:
        try:
            return _Document(usage=_LOOSE.decode(document).usage)
        except UNREADABLE:
            return _Document()

    def _take(self, usage: dict[str, Any]) -> None:
        given = _first(usage, "prompt_tokens", "input_tokens")
        if given is not None:
            self._given = given
        completion = _first(usage, "completion_tokens", "output_tokens")
        if completion is not None:
            self._completion = completion
        details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
        if isinstance(details, dict):
            cached = _first(details, "cached_tokens")
        else:
            cached = _first(usage, "cache_read_input_tokens")
            self._is_split = self._is_split or cached is not None
            self._created = _first(usage, "cache_creation_input_tokens") or self._created
        if cached is not None:
            self._cached = cached


def _first(usage: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = usage.get(name)
        if type(value) is int and value >= 0:
            return value
    return None
