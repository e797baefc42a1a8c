"""Change one or two values of a request body and leave every other byte as it was.

Owns the rewriting of the top-level `model` and of `stream_options.include_usage`.  Whether a body is rewritten at
all is decided by the router and its configuration.
"""

import re
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from shoal.kernel import UNREADABLE, InvalidInput
from shoal.pool import Api
from shoal.wire.compression import inflate
from shoal.wire.limits import Limits
from shoal.wire.multipart import Span, find_field, is_multipart

_USAGE_APIS = (Api.CHAT, Api.COMPLETIONS)
"""Only these send usage on demand; the others send it by themselves or have none."""

_EMPTY = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*\}")
_DEFAULT_LIMITS = Limits()


class _Top(msgspec.Struct, gc=False):
    model: Raw = Raw()
    stream: Any = None
    stream_options: Raw = Raw()


class _Options(msgspec.Struct, gc=False):
    include_usage: Raw = Raw()


_TOP = msgspec.json.Decoder(_Top)
_OPTIONS = msgspec.json.Decoder(_Options)


def rewrite(
    body: bytes,
    api: Api,
    *,
    model: str = "",
    inject_usage: bool = False,
    content_type: str = "",
    content_encoding: str = "",
    limits: Limits = _DEFAULT_LIMITS,
) -> bytes:
    """Return `body` with another `model` ("" keeps it), and asking for usage if it is a stream of an API that can.

    A body in a content coding comes back plain, so its content-encoding header must go; in an unknown coding it
    comes back as it was, and so does a body that is no JSON object or form.
    """
    if content_encoding:
        plain = inflate(body, content_encoding, limits.max_body_bytes)
        if plain is None:
            return body
        body = plain
    if is_multipart(content_type):
        return _rewrite_form(body, content_type, model) if model else body
    try:
        top = _TOP.decode(body)
    except UNREADABLE:
        return body
    edits: list[tuple[Span, bytes]] = []
    added: list[bytes] = []
    if model:
        value = msgspec.json.encode(model)
        if top.model:
            edits.append((_span(body, top.model), value))
        else:
            added.append(b'"model":' + value)
    if inject_usage and api in _USAGE_APIS and top.stream is True:
        _ask_for_usage(body, top.stream_options, edits, added)
    return _apply(body, edits, added)


def _ask_for_usage(body: bytes, options: Raw, edits: list[tuple[Span, bytes]], added: list[bytes]) -> None:
    if not options:
        added.append(b'"stream_options":{"include_usage":true}')
        return
    span = _span(body, options)
    if options == Raw(b"null"):
        edits.append((span, b'{"include_usage":true}'))
        return
    try:
        asked = _OPTIONS.decode(options)
    except UNREADABLE:
        return
    if asked.include_usage:
        edits.append((_span(body, asked.include_usage), b"true"))
        return
    comma = b"" if _EMPTY.match(body, span.start, span.stop) else b","
    edits.append((Span(span.start + 1, span.start + 1), b'"include_usage":true' + comma))


def _span(body: bytes, value: Raw) -> Span:
    """Return where `value` stands in `body`.

    The decoder returns a Raw as a view of the buffer that it was given, so the distance of the two addresses is the
    place: exact also with repeated keys and escapes, and without a second pass over a large body.
    """
    start = _address(value) - _address(body)
    stop = start + len(memoryview(value))
    if start < 0 or body[start:stop] != bytes(value):
        raise AssertionError("the JSON decoder copied a value instead of viewing it")
    return Span(start, stop)


def _address(buffer: bytes | Raw) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])


def _apply(body: bytes, edits: list[tuple[Span, bytes]], added: list[bytes]) -> bytes:
    if not edits and not added:
        return body
    if added:
        end = body.rindex(b"}")
        comma = b"" if _EMPTY.match(body) else b","
        edits.append((Span(end, end), comma + b",".join(added)))
    view = memoryview(body)
    out: list[bytes | memoryview] = []
    at = 0
    for span, value in sorted(edits):
        out += (view[at : span.start], value)
        at = span.stop
    out.append(view[at:])
    return b"".join(out)


def _rewrite_form(body: bytes, content_type: str, model: str) -> bytes:
    try:
        span = find_field(body, content_type, b"model")
    except InvalidInput:
        return body
    if span is None:
        return body
    return body[: span.start] + model.encode() + body[span.stop :]
