import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pool import Api
from shoal.wire import decode, rewrite

_TEXT = st.text(max_size=8) | st.sampled_from(("model", 'say "model": "x"', "\\", "}", "é世\u2028"))
_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_OPTIONS = st.none() | st.dictionaries(st.sampled_from(("include_usage", "other", "é")), _VALUE, max_size=3)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """JSON objects with repeated keys, escapes and all kinds of white space."""
    pairs = draw(
        st.lists(
            st.tuples(st.just("model"), _VALUE)
            | st.tuples(st.just("stream_options"), _OPTIONS)
            | st.tuples(st.just("stream"), st.booleans())
            | st.tuples(_TEXT, _VALUE),
            max_size=6,
        )
    )
    blank = draw(st.sampled_from(("", " ", "\r\n\t")))
    is_ascii = draw(st.booleans())
    indent = draw(st.sampled_from((None, 2)))
    items = []
    for key, value in pairs:
        name = json.dumps(key, ensure_ascii=is_ascii)
        if draw(st.booleans()) and key == "model":
            name = '"mod\\u0065l"'
        items.append(f"{blank}{name}{blank}:{blank}{json.dumps(value, ensure_ascii=is_ascii, indent=indent)}{blank}")
    return f"{blank}{{{blank}{','.join(items)}}}{blank}".encode()


@given(bodies(), _TEXT.filter(bool))
def test_only_the_model_changes(body: bytes, model: str) -> None:
    changed = rewrite(body, Api.CHAT, model=model)
    assert json.loads(changed) == {**json.loads(body), "model": model}


@given(bodies(), st.sampled_from((Api.CHAT, Api.COMPLETIONS)))
def test_usage_is_asked_for_on_streams_and_nothing_else_changes(body: bytes, api: Api) -> None:
    before, after = json.loads(body), json.loads(rewrite(body, api, inject_usage=True))
    if before.get("stream") is True:
        before["stream_options"] = {**(before.get("stream_options") or {}), "include_usage": True}
    assert after == before


@given(bodies())
def test_without_a_change_every_byte_stays(body: bytes) -> None:
    assert rewrite(body, Api.CHAT) == body
    assert rewrite(body, Api.RESPONSES, inject_usage=True) == body


def test_every_other_byte_stays_as_it_was() -> None:
    body = b'{ "messages" : [{"model":"a","content":"\\u00e9 1.0e0"}],\n "model"\t: "a" , "stream":true,"x":1.00}\n'
    assert rewrite(body, Api.CHAT, model='b"', inject_usage=True) == (
        b'{ "messages" : [{"model":"a","content":"\\u00e9 1.0e0"}],\n "model"\t: "b\\"" , "stream":true,"x":1.00,'
        b'"stream_options":{"include_usage":true}}\n'
    )
    off = b'{"stream":true,"stream_options":{"a": 1, "include_usage" : false }}'
    assert rewrite(off, Api.CHAT, inject_usage=True) == off.replace(b"false", b"true")
    assert rewrite(b"{ }", Api.CHAT, model="m") == b'{ "model":"m"}'


@pytest.mark.parametrize("body", [b"", b"[]", b"{bad", b"\xff", b'"model"'])
def test_what_is_no_json_object_stays(body: bytes) -> None:
    assert rewrite(body, Api.OTHER, model="m", inject_usage=True) == body


def test_a_wrong_stream_options_is_left_for_the_engine_to_refuse() -> None:
    body = b'{"stream":true,"stream_options":"yes"}'
    assert rewrite(body, Api.CHAT, inject_usage=True) == body


def test_a_compressed_body_comes_back_plain() -> None:
    plain = b'{"model":"a"}'
    assert rewrite(gzip.compress(plain), Api.CHAT, model="b", content_encoding="gzip") == b'{"model":"b"}'
    assert rewrite(b"opaque", Api.CHAT, model="b", content_encoding="br") == b"opaque"


@pytest.mark.parametrize("value", [b"whisper", b""])
def test_a_form_gets_its_model_field_replaced(value: bytes) -> None:
    def form(model: bytes) -> bytes:
        return (
            b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--X\r\n'
            b'--XX\r\ncontent-disposition: form-data; name="model"\r\n\r\n' + model + b"\r\n--XX--\r\n"
        )

    header = "multipart/form-data; boundary=XX"
    assert rewrite(form(value), Api.AUDIO, model="other", content_type=header) == form(b"other")
    assert rewrite(b"--XX--", Api.AUDIO, model="other", content_type=header) == b"--XX--"


@given(bodies(), _TEXT.filter(bool))
def test_a_rewritten_body_decodes_to_the_new_model(body: bytes, model: str) -> None:
    document: Any = json.loads(rewrite(body, Api.OTHER, model=model))
    assert decode("r", "POST", "/zz", {}, json.dumps(document).encode()).request.model == model
