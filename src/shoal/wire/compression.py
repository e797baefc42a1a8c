"""Inflate a request body so that it can be looked at.

Owns Content-Encoding gzip and deflate (RFC 9110 8.4.1), with a bound on the result.  The bytes as sent travel on
unchanged; nothing is ever compressed here.
"""

import zlib

from shoal.kernel import InvalidInput
from shoal.wire.limits import BodyTooLarge

_GZIP = 16 + zlib.MAX_WBITS
# Each member copies what follows it; clients send one, concatenated logs a few.
MAX_MEMBERS = 16


def inflate(body: bytes, encoding: str, max_bytes: int) -> bytes | None:
    """Return the plain body, or None for a coding that is not known here (`br`, `zstd`, chains of codings).

    encoding: the Content-Encoding header, any case.  Raises BodyTooLarge when more than `max_bytes` come out, and
    InvalidInput for bytes that are not what the header says.
    """
    coding = encoding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding in ("gzip", "x-gzip"):
        return _members(body, max_bytes)
    if coding == "deflate":
        # RFC 9110 means the zlib format, but many clients send raw deflate data.
        try:
            return _one(body, zlib.MAX_WBITS, coding, max_bytes)[0]
        except InvalidInput:
            return _one(body, -zlib.MAX_WBITS, coding, max_bytes)[0]
    return None


def _members(body: bytes, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    left = max_bytes
    while body:
        if len(parts) == MAX_MEMBERS:
            raise InvalidInput(f"the gzip body has more than {MAX_MEMBERS} members; send it as one")
        plain, body = _one(body, _GZIP, "gzip", left, limit=max_bytes)
        left -= len(plain)
        parts.append(plain)
        body = body.lstrip(b"\0")
    return b"".join(parts)


def _one(body: bytes, wbits: int, coding: str, max_bytes: int, limit: int | None = None) -> tuple[bytes, bytes]:
    inflater = zlib.decompressobj(wbits)
    try:
        plain = inflater.decompress(body, max_bytes + 1)
    except zlib.error:
        raise InvalidInput(
            f"the body is not valid {coding} data; check the content-encoding header or send it uncompressed"
        ) from None
    if len(plain) > max_bytes:
        raise BodyTooLarge(limit or max_bytes, "the inflated request body")
    if not inflater.eof:
        raise InvalidInput(f"the {coding} body ends too early; send the whole body")
    return plain, inflater.unused_data
