"""The messages that go back to Envoy, as serialised protobuf.

Owns their shape only.  Constant parts are built once; a reply costs one header mutation.
"""

from collections.abc import Iterable, Sequence

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
    set_headers: Iterable[tuple[str, str]],
    remove_headers: Sequence[str],
    metadata: dict[str, dict[str, str]],
    body: bytes | None = None,
    skips_response_body: bool = False,
) -> bytes:
    """Return the reply that lets the request go, with its headers and dynamic metadata (namespace -> key -> value).

    is_body_phase: whether it answers the body message.  body: replaces the buffered body; None leaves it.
    skips_response_body: ask a gateway not to send response bodies.
    """
    mutation = b"".join(
        [
            _field(1, _field(1, _field(1, key.encode()) + _field(3, value.encode())) + _APPEND)
            for key, value in set_headers
        ]
        + [_field(2, name.encode()) for name in remove_headers]
    )
    common = _field(2, mutation)
    if body is not None:
        common += _field(3, _field(1, body))
    if not is_body_phase:
        common += _CLEAR_ROUTE_CACHE
    spaces = [_entry(name, _field(5, _text_fields(values))) for name, values in metadata.items()]
    phase = 3 if is_body_phase else 1
    reply = _field(phase, _field(1, common)) + _field(8, b"".join(spaces))
    return reply + _SKIP_RESPONSE_BODY if skips_response_body else reply


# The reply of every request is written straight in protobuf's wire form, field by field: a fifth of the cost of
# building the message.  The numbers are the fields' of ProcessingResponse, CommonResponse, HeaderMutation and Struct.
_APPEND = bytes((3 << 3, _OVERWRITE))
_CLEAR_ROUTE_CACHE = bytes((5 << 3, 1))
_SKIP_RESPONSE_BODY = bytes((9 << 3 | 2, 0))


def _field(number: int, payload: bytes) -> bytes:
    """One length-delimited field."""
    size = len(payload)
    if size < 128:
        return bytes((number << 3 | 2, size)) + payload
    head = bytearray((number << 3 | 2,))
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    head.append(size)
    return bytes(head) + payload


def _entry(key: str, value: bytes) -> bytes:
    """One entry of a Struct's map."""
    return _field(1, _field(1, key.encode()) + _field(2, value))


def _text_fields(values: dict[str, str]) -> bytes:
    """The entries of a Struct of strings."""
    return b"".join([_entry(key, _field(3, value.encode())) for key, value in values.items()])


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
