"""The messages that go back to Envoy, as serialised protobuf.

Owns their shape only.  Constant parts are built once; a reply costs one header mutation.
"""

from collections.abc import Iterable
from functools import lru_cache

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3 import http_status_pb2

DESTINATION = "x-gateway-destination-endpoint"
LB_NAMESPACE = "envoy.lb"
OWN_NAMESPACE = "shoal"
# Envoy refuses streamed frames of 64 KiB and more.
STREAMED_CHUNK_BYTES = 62_000

_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

CONTINUE_HEADERS: bytes = pb.ProcessingResponse(request_headers=pb.HeadersResponse()).SerializeToString()
CONTINUE_BODY: bytes = pb.ProcessingResponse(request_body=pb.BodyResponse()).SerializeToString()
CONTINUE_TRAILERS: bytes = pb.ProcessingResponse(request_trailers=pb.TrailersResponse()).SerializeToString()
CONTINUE_RESPONSE_HEADERS: bytes = pb.ProcessingResponse(response_headers=pb.HeadersResponse()).SerializeToString()
CONTINUE_RESPONSE_BODY: bytes = pb.ProcessingResponse(response_body=pb.BodyResponse()).SerializeToString()
CONTINUE_RESPONSE_TRAILERS: bytes = pb.ProcessingResponse(response_trailers=pb.TrailersResponse()).SerializeToString()


def routed(
    *,
    is_body_phase: bool,
    destination: str,
    request_id: str,
    picker_id: str,
    retries: int | None = None,
    removed: tuple[str, ...] = (),
    own: Iterable[tuple[str, str]] = (),
    length: int | None = None,
    body: bytes | None = None,
    skips_response_body: bool = False,
) -> bytes:
    """Return the reply that lets the request go to `destination`, and says so in the dynamic metadata.

    is_body_phase: whether it answers the body message.  retries: None leaves them to the route.  removed: names of
    headers.  own: further values beside our ids in the metadata.  length: of a body that was changed.  body: replaces
    the one that the gateway holds; None leaves it.  skips_response_body: ask a gateway not to send response bodies.
    """
    target = destination.encode()
    header = _DESTINATION_NAME + b"\x1a" + _size(len(target)) + target
    option = b"\x0a" + _size(len(header)) + header + _APPEND
    mutation = b"\x0a" + _size(len(option)) + option + _constant_mutation(retries, removed)
    if length is not None:
        mutation += _set_header("content-length", str(length))
    common = b"\x12" + _size(len(mutation)) + mutation
    if body is not None:
        common += _field(b"\x1a", _field(b"\x0a", body))
    if not is_body_phase:
        common += _CLEAR_ROUTE_CACHE
    entries = _text_entry("id", request_id) + _picker_entry(picker_id)
    for key, value in own:
        entries += _text_entry(key, value)
    spaces = _namespace(_OWN_NAME, entries) + _namespace(_LB_NAME, _text_entry(DESTINATION, destination))
    reply = _field(b"\x1a" if is_body_phase else b"\x0a", _field(b"\x0a", common)) + _field(b"\x42", spaces)
    return reply + _SKIP_RESPONSE_BODY if skips_response_body else reply


# The reply of every request is written straight in protobuf's wire form: a tenth of the cost of building the message.
# A field of bytes is its key (number << 3 | 2), its size and its content; the numbers are those of ProcessingResponse,
# CommonResponse, HeaderMutation and Struct.
_APPEND = bytes((3 << 3, _OVERWRITE))
_CLEAR_ROUTE_CACHE = bytes((5 << 3, 1))
_SKIP_RESPONSE_BODY = bytes((9 << 3 | 2, 0))


def _varint(size: int) -> bytes:
    """A length as protobuf writes it: seven bits at a time, the lowest first."""
    written = bytearray()
    while size > 127:
        written.append(size & 127 | 128)
        size >>= 7
    written.append(size)
    return bytes(written)


_VARINTS = tuple(map(_varint, range(2048)))


def _size(size: int) -> bytes:
    return _VARINTS[size] if size < 2048 else _varint(size)


def _field(key: bytes, content: bytes) -> bytes:
    return key + _size(len(content)) + content


@lru_cache(maxsize=256)
def _name(name: str) -> bytes:
    """Field 1: the name of a header, or the key of an entry of a Struct."""
    return _field(b"\x0a", name.encode())


def _set_header(name: str, value: str) -> bytes:
    return _field(b"\x0a", _field(b"\x0a", _name(name) + _field(b"\x1a", value.encode())) + _APPEND)


@lru_cache(maxsize=256)
def _constant_mutation(retries: int | None, removed: tuple[str, ...]) -> bytes:
    """What many requests have in common."""
    set_headers = b"" if retries is None else _set_header("x-envoy-max-retries", str(retries))
    return set_headers + b"".join([_field(b"\x12", name.encode()) for name in removed])


def _text_entry(key: str, value: str) -> bytes:
    """One entry of a Struct of strings."""
    text = value.encode()
    size = _size(len(text))
    entry = _name(key) + b"\x12" + _size(1 + len(size) + len(text)) + b"\x1a" + size + text
    return b"\x0a" + _size(len(entry)) + entry


@lru_cache(maxsize=64)
def _picker_entry(picker_id: str) -> bytes:
    return _text_entry("picker", picker_id)


def _namespace(name: bytes, entries: bytes) -> bytes:
    """The entry of the metadata that holds a Struct of these entries."""
    size = _size(len(entries))
    entry = name + b"\x12" + _size(1 + len(size) + len(entries)) + b"\x2a" + size + entries
    return b"\x0a" + _size(len(entry)) + entry


_DESTINATION_NAME, _OWN_NAME, _LB_NAME = map(_name, (DESTINATION, OWN_NAMESPACE, LB_NAMESPACE))


def streamed_body(body: bytes, *, is_response: bool = False, is_end: bool = True) -> list[bytes]:
    """Return the messages that send `body` on in FULL_DUPLEX_STREAMED mode, the last one ending the stream."""
    messages = []
    for start in range(0, max(len(body), 1), STREAMED_CHUNK_BYTES):
        reply = pb.ProcessingResponse()
        phase = reply.response_body if is_response else reply.request_body
        chunk = phase.response.body_mutation.streamed_response
        chunk.body = body[start : start + STREAMED_CHUNK_BYTES]
        chunk.end_of_stream = is_end and start + STREAMED_CHUNK_BYTES >= len(body)
        messages.append(bytes(reply.SerializeToString()))
    return messages


def answer_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """Return the reply that lets an answer's head pass with further headers."""
    reply = pb.ProcessingResponse()
    for key, value in headers:
        option = reply.response_headers.response.header_mutation.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key = key
        option.header.raw_value = value.encode()
    return bytes(reply.SerializeToString())


def immediate(status: int, headers: Iterable[tuple[str, str]], body: bytes, details: str, picker_id: str) -> bytes:
    """Return the reply that answers the client at once; the metadata keeps Envoy from rewriting the body."""
    reply = pb.ProcessingResponse()
    own = reply.dynamic_metadata.fields[OWN_NAMESPACE].struct_value.fields
    own["picker"].string_value = picker_id
    own["refused"].bool_value = True
    answer = reply.immediate_response
    answer.status.CopyFrom(http_status_pb2.HttpStatus(code=status))
    for key, value in headers:
        option = answer.headers.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key = key
        option.header.raw_value = value.encode()
    answer.body = body
    answer.details = details
    return bytes(reply.SerializeToString())
