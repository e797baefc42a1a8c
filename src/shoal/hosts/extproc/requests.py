"""Messages from Envoy as they come in: in parts, and read by hand where that spares a long body its copies.

Owns the wire form of the ProcessingRequest that brings a whole body.  Every other message is for protobuf to read, and
what they mean is `exchange`'s.
"""

Message = list[memoryview]
"""One gRPC message, in the parts in which it came."""

# ProcessingRequest.request_body is its field 4, HttpBody.body that message's field 1, both of bytes.
_REQUEST_BODY, _BODY = 4 << 3 | 2, 1 << 3 | 2
# HttpBody.end_of_stream is true, and the metadata_context is empty or not there.
_END = b"\x10\x01"
_TAILS = (_END + b"\x42\x00", _END)
_MAX_VARINT_BYTES = 5
_MAX_HEAD_BYTES = 2 * (1 + _MAX_VARINT_BYTES)


def joined(message: Message) -> bytes:
    """The message in one piece."""
    return bytes(message[0]) if len(message) == 1 else b"".join(message)


def read_body(message: Message) -> bytes | None:
    """Return the body that a message brings whole, or None: then it is another one, and protobuf has to read it."""
    first = message[0]
    if len(first) < _MAX_HEAD_BYTES or first[0] != _REQUEST_BODY:
        return None
    outer, inside = _varint(first, 1)
    if first[inside] != _BODY:
        return None
    size, start = _varint(first, inside + 1)
    if size < 0 or outer != start - inside + size + len(_END):
        return None
    if len(message) == 1:
        end = start + size
        return bytes(first[start:end]) if first[end:] in _TAILS else None
    last = message[-1]
    tail = sum(map(len, message)) - start - size
    if not 0 < tail <= len(last) or last[-tail:] not in _TAILS:
        return None
    return b"".join([first[start:], *message[1:-1], last[:-tail]])


def _varint(data: memoryview, start: int) -> tuple[int, int]:
    """Return the number at `start`, -1 for one that is too long, and where it ends."""
    value = shift = 0
    for place in range(start, start + _MAX_VARINT_BYTES):
        byte = data[place]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place + 1
        shift += 7
    return -1, start
