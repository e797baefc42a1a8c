"""Bodies read by hand: what protobuf reads, or nothing at all."""

import itertools

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from shoal.hosts.extproc.requests import Message, joined, read_body

CUTS = st.lists(st.integers(0, 1 << 20), max_size=6)


def cut(wire: bytes, cuts: list[int]) -> Message:
    places = sorted({0, len(wire), *(each % (len(wire) + 1) for each in cuts)})
    return [memoryview(wire)[start:end] for start, end in itertools.pairwise(places)] or [memoryview(b"")]


def wire_of(body: bytes, *, is_end: bool = True, has_context: bool = True) -> bytes:
    message = pb.ProcessingRequest()
    message.request_body.body = body
    message.request_body.end_of_stream = is_end
    if has_context:
        message.metadata_context.SetInParent()
    return bytes(message.SerializeToString())


@given(st.binary(min_size=8, max_size=40_000), st.booleans(), st.lists(st.integers(12, 1 << 20), max_size=6))
def test_a_whole_body_is_read_out_of_its_parts(body: bytes, has_context: bool, cuts: list[int]) -> None:
    wire = wire_of(body, has_context=has_context)
    inner = [12 + each % max(1, len(wire) - 12 - 4) for each in cuts if len(wire) > 20]
    assert read_body(cut(wire, inner)) == body


def test_a_long_body_in_long_parts_is_read() -> None:
    body = bytes(range(256)) * 12_000
    wire = wire_of(body)
    assert read_body([memoryview(wire)[start : start + 16_384] for start in range(0, len(wire), 16_384)]) == body


def test_a_part_of_a_body_is_left_to_protobuf() -> None:
    assert read_body([memoryview(wire_of(b"x" * 100, is_end=False))]) is None


def test_a_body_with_more_beside_it_is_left_to_protobuf() -> None:
    message = pb.ProcessingRequest.FromString(wire_of(b"x" * 100))
    message.attributes["envoy.filters.http.ext_proc"].fields["a"].string_value = "b"
    assert read_body([memoryview(bytes(message.SerializeToString()))]) is None


@given(st.binary(max_size=60), st.integers(0, 60), st.binary(max_size=4), CUTS)
def test_what_is_read_by_hand_is_what_protobuf_reads(body: bytes, place: int, noise: bytes, cuts: list[int]) -> None:
    wire = bytearray(wire_of(body))
    wire[place % (len(wire) + 1) : place % (len(wire) + 1) + len(noise)] = noise
    message = cut(bytes(wire), cuts)
    assert b"".join(message) == bytes(joined(message)) == bytes(wire)
    found = read_body(message)
    if found is None:
        return
    try:
        read = pb.ProcessingRequest.FromString(bytes(wire))
    except DecodeError:
        raise AssertionError("read by hand what protobuf refuses") from None
    assert read.request_body.body == found
    assert read.request_body.end_of_stream
