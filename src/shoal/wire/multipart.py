"""Find one small field in a multipart/form-data body (RFC 7578) without reading the files in it.

Owns the byte spans of fields.  It is no general MIME parser: transfer encodings and nested parts are not read.
"""

import re
from typing import NamedTuple

from shoal.kernel import InvalidInput

MAX_PARTS = 64
MAX_PART_HEADER_BYTES = 8192
MAX_FIELD_BYTES = 4096

_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,200})"|([^\s;,"]{1,200}))', re.IGNORECASE)
_NAME = re.compile(rb'content-disposition:[^\r\n]*;\s*name="([^"\r\n]*)"', re.IGNORECASE)


class Span(NamedTuple):
    """A half-open range of bytes."""

    start: int
    stop: int


def is_multipart(content_type: str) -> bool:
    """Whether a content-type header names a multipart form."""
    return content_type.lower().lstrip().startswith("multipart/form-data")


def find_field(body: bytes, content_type: str, name: bytes) -> Span | None:
    """Return where the value of the first field `name` stands in `body`, None when there is none.

    Raises InvalidInput when the header names no boundary, or the body does not hold it.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise InvalidInput("the content-type header names no boundary; let the HTTP client write this header")
    mark = b"--" + (found[1] or found[2]).encode("latin-1", "replace")
    at = body.find(mark)
    if at < 0:
        raise InvalidInput("the multipart body does not hold the boundary that the content-type header names")
    delimiter = b"\r\n" + mark
    for _ in range(MAX_PARTS):
        head = at + len(mark)
        if body[head : head + 2] == b"--":
            return None
        value = body.find(b"\r\n\r\n", head, head + MAX_PART_HEADER_BYTES)
        if value < 0:
            return None
        stop = body.find(delimiter, value + 2)
        stop_or_end = len(body) if stop < 0 else stop
        named = _NAME.search(body, head, value)
        if named is not None and named[1] == name and stop_or_end - value - 4 <= MAX_FIELD_BYTES:
            return Span(value + 4, max(value + 4, stop_or_end))
        if stop < 0:
            return None
        at = stop + 2
    return None


def read_field(body: bytes, content_type: str, name: str) -> str | None:
    """Return the text of the first field `name`, None when there is none."""
    span = find_field(body, content_type, name.encode())
    return None if span is None else body[span.start : span.stop].decode("utf-8", "replace").strip()
