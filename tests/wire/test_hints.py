import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pool.request import Hints
from shoal.wire import decode
from shoal.wire.hints import OUTPUT_HEADER, PRIORITY_HEADER, RETURN_HEADER, read_hints

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]%b}'


def hints_of(headers: dict[str, str] | None = None, more: bytes = b"") -> Hints | None:
    return decode("r", "POST", "/v1/chat/completions", headers or {}, BODY % more).request.hints


def test_a_request_without_hints_has_none() -> None:
    assert hints_of() is None
    assert hints_of(more=b',"nvext":{"annotations":["x"]}') is None


def test_headers_say_how_urgent_how_long_and_when_it_is_back() -> None:
    headers = {PRIORITY_HEADER: "-5", OUTPUT_HEADER: " 900 ", RETURN_HEADER: "1500"}
    assert hints_of(headers) == Hints(priority=-5, output_tokens=900, returns_within_s=1.5)


def test_the_agent_hints_of_a_body_are_read_and_a_header_goes_before_them() -> None:
    more = b',"nvext":{"agent_hints":{"priority":5,"osl":1024,"speculative_prefill":true}}'
    assert hints_of(more=more) == Hints(priority=5, output_tokens=1024)
    assert hints_of({OUTPUT_HEADER: "10"}, more) == Hints(priority=5, output_tokens=10)


@pytest.mark.parametrize("text", ["", "x", "1.5", "1e3", "0", "-1", "٣x", "9" * 40, "true"])
def test_a_length_that_is_none_is_left_out(text: str) -> None:
    assert read_hints({OUTPUT_HEADER: text}) is None


@pytest.mark.parametrize(
    "more",
    [b',"nvext":7', b',"nvext":{"agent_hints":[]}', b',"nvext":{"agent_hints":{"osl":{"a":1}}}', b',"nvext":null'],
)
def test_an_extension_of_another_shape_is_left_out_and_the_request_passes(more: bytes) -> None:
    assert hints_of(more=more) is None


@given(st.text(max_size=30), st.binary(max_size=60))
def test_no_hint_raises_or_is_out_of_bounds(text: str, raw: bytes) -> None:
    for name in (PRIORITY_HEADER, OUTPUT_HEADER, RETURN_HEADER):
        found = read_hints({name: text}, msgspec.Raw(raw))
        if found is not None:
            assert found.output_tokens is None or 1 <= found.output_tokens <= 1 << 20
            assert found.returns_within_s is None or 0 < found.returns_within_s <= 3600
