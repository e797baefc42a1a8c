from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from shoal.hosts.extproc import replies

TEXT = st.text(max_size=300)
PAIRS = st.lists(st.tuples(TEXT, TEXT), max_size=4)


@given(
    is_body_phase=st.booleans(),
    destination=TEXT,
    ids=st.tuples(TEXT, TEXT),
    retries=st.none() | st.integers(0, 1000),
    removed=st.lists(TEXT, max_size=3).map(tuple),
    own=PAIRS,
    length=st.none() | st.integers(0, 1 << 40),
    body=st.none() | st.binary(max_size=70_000),
    skips=st.booleans(),
)
def test_what_is_written_by_hand_reads_as_the_message_it_stands_for(
    is_body_phase: bool,
    destination: str,
    ids: tuple[str, str],
    retries: int | None,
    removed: tuple[str, ...],
    own: list[tuple[str, str]],
    length: int | None,
    body: bytes | None,
    skips: bool,
) -> None:
    written = replies.routed(
        is_body_phase=is_body_phase,
        destination=destination,
        request_id=ids[0],
        picker_id=ids[1],
        retries=retries,
        removed=removed,
        own=own,
        length=length,
        body=body,
        skips_response_body=skips,
    )
    expected = pb.ProcessingResponse()
    common = expected.request_body.response if is_body_phase else expected.request_headers.response
    set_headers = [("x-gateway-destination-endpoint", destination)]
    if retries is not None:
        set_headers.append(("x-envoy-max-retries", str(retries)))
    if length is not None:
        set_headers.append(("content-length", str(length)))
    for key, value in set_headers:
        option = common.header_mutation.set_headers.add()
        option.append_action = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        option.header.key = key
        option.header.raw_value = value.encode()
    common.header_mutation.remove_headers.extend(removed)
    if body is not None:
        common.body_mutation.body = body
    if not is_body_phase:
        common.clear_route_cache = True
    spaces = expected.dynamic_metadata.fields
    for key, value in (("id", ids[0]), ("picker", ids[1]), *own):
        spaces["shoal"].struct_value.fields[key].string_value = value
    spaces["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"].string_value = destination
    if skips:
        expected.mode_override.SetInParent()
    read = pb.ProcessingResponse.FromString(written)
    # An empty key or value may be left out on the wire, so the readings are compared, not the bytes.
    assert read.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
