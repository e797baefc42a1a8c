from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from shoal.hosts.extproc import replies

TEXT = st.text(max_size=300)
PAIRS = st.lists(st.tuples(TEXT, TEXT), max_size=4)


@given(
    is_body_phase=st.booleans(),
    set_headers=PAIRS,
    remove_headers=st.lists(TEXT, max_size=3),
    metadata=st.dictionaries(TEXT, st.dictionaries(TEXT, TEXT, max_size=3), max_size=3),
    body=st.none() | st.binary(max_size=70_000),
    skips=st.booleans(),
)
def test_what_is_written_by_hand_reads_as_the_message_it_stands_for(
    is_body_phase: bool,
    set_headers: list[tuple[str, str]],
    remove_headers: list[str],
    metadata: dict[str, dict[str, str]],
    body: bytes | None,
    skips: bool,
) -> None:
    written = replies.routed(
        is_body_phase=is_body_phase,
        set_headers=set_headers,
        remove_headers=remove_headers,
        metadata=metadata,
        body=body,
        skips_response_body=skips,
    )
    expected = pb.ProcessingResponse()
    common = expected.request_body.response if is_body_phase else expected.request_headers.response
    common.SetInParent()
    common.header_mutation.SetInParent()
    for key, value in set_headers:
        option = common.header_mutation.set_headers.add()
        option.append_action = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        option.header.key = key
        option.header.raw_value = value.encode()
    common.header_mutation.remove_headers.extend(remove_headers)
    if body is not None:
        common.body_mutation.body = body
    if not is_body_phase:
        common.clear_route_cache = True
    expected.dynamic_metadata.SetInParent()
    for namespace, values in metadata.items():
        space = expected.dynamic_metadata.fields[namespace].struct_value
        space.SetInParent()
        for key, value in values.items():
            space.fields[key].string_value = value
    if skips:
        expected.mode_override.SetInParent()
    read = pb.ProcessingResponse.FromString(written)
    # An empty key or value may be left out on the wire, so the readings are compared, not the bytes.
    assert read.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
