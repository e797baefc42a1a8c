import contextlib
import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernel import InvalidInput
from shoal.pool import Api, RefusalReason
from shoal.wire import Decoded, Limits, decode, refusal_of

CANARY = "CANARY-7f3a"
CHAT = "/v1/chat/completions"


def read(document: Any, path: str = CHAT, limits: Limits | None = None, **headers: str) -> Decoded:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return decode("r1", "POST", path, named, body, limits or Limits())


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def prompt(document: Any, path: str = CHAT) -> bytes:
    (only,) = read(document, path).prompts
    return only


def test_a_chat_request_becomes_a_request() -> None:
    body = json.dumps(chat(user("hello"), stream=True, max_tokens=7, temperature=0.5)).encode()
    decoded = decode("r1", "POST", CHAT + "?api-version=1", {"x-request-id": "c1"}, body)
    request = decoded.request
    assert (request.id, request.client_id, request.api, request.path) == ("r1", "c1", Api.CHAT, CHAT)
    assert (request.model, request.is_streaming, request.max_output_tokens) == ("m", True, 7)
    assert request.body_bytes == len(body)
    assert request.prompt_bytes == len(decoded.prompts[0])
    assert request.prompt_tokens == -(-request.prompt_bytes // 4)
    assert request.retry_allowed
    assert not request.is_token_exact


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": None, "max_completion_tokens": None}, None),
        ({"max_tokens": "12"}, 12),
        ({"max_tokens": 12.0}, 12),
        ({"max_tokens": True}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": {"a": 1}}, None),
    ],
)
def test_the_output_limit_is_read_as_engines_read_it(fields: dict[str, Any], limit: int | None) -> None:
    assert read(chat(user("a"), **fields)).request.max_output_tokens == limit


def test_a_missing_or_null_model_is_an_empty_name() -> None:
    assert read({"messages": []}).request.model == ""
    assert read({"model": None, "messages": []}).request.model == ""


def test_unknown_fields_of_any_type_are_ignored() -> None:
    assert read(chat(user("a"), zzz={"deep": [1, {"model": "other"}]}, logit_bias=5)).request.model == "m"


@pytest.mark.parametrize(
    ("name", "value", "attribute"),
    [
        ("x-session-id", "s", "session_id"),
        ("x-claude-code-session-id", "s", "session_id"),
        ("x-session-affinity", "s", "session_id"),
        ("session-id", "s", "session_id"),
        ("session_id", "s", "session_id"),
        ("x-llm-d-inference-fairness-id", "t", "tenant_id"),
        ("x-gateway-inference-fairness-id", "t", "tenant_id"),
        ("x-llm-d-inference-objective", "o", "objective"),
        ("x-gateway-inference-objective", "o", "objective"),
    ],
)
def test_identities_come_from_present_and_older_headers(name: str, value: str, attribute: str) -> None:
    request = decode("r", "POST", "/x", {name: value}, b"").request
    assert getattr(request, attribute) == value


def test_the_first_session_header_wins_and_long_ones_are_cut() -> None:
    headers = {"session_id": "b", "x-session-id": "a" * 1000}
    assert decode("r", "GET", "/x", headers, b"").request.session_id == "a" * 256


def test_control_headers_are_kept_under_their_present_names() -> None:
    headers = {
        "x-gateway-model-name-rewrite": "other",
        "x-slo-ttft-ms": "200",
        "x-session-token": "tok",
        "prefer": "if-available",
        "authorization": "Bearer secret",
        "x-team": "blue",
    }
    kept = decode("r", "GET", "/x", headers, b"", Limits(kept_headers=("x-team",))).request.headers
    assert kept == {
        "x-llm-d-model-name-rewrite": "other",
        "x-llm-d-slo-ttft-ms": "200",
        "x-session-token": "tok",
        "prefer": "if-available",
        "x-team": "blue",
    }


def test_a_client_can_opt_out_of_retries_by_header_or_body() -> None:
    assert not read(chat(user("a")), x_shoal_no_retry="True").request.retry_allowed
    assert not read(chat(user("a"), disable_fallbacks=True)).request.retry_allowed
    assert not read({"model": "m", "disable_fallbacks": True}, "/unknown").request.retry_allowed
    assert read(chat(user("a"), disable_fallbacks=False), x_shoal_no_retry="false").request.retry_allowed


def test_the_gateways_subset_travels_with_the_request() -> None:
    assert decode("r", "GET", "/x", {}, b"", subset=("10.0.0.1:80",)).request.subset == ("10.0.0.1:80",)


def test_the_cache_salt_comes_beside_the_prompt() -> None:
    decoded = read(chat(user("a"), cache_salt="abc"))
    assert decoded.salt == b"abc"
    assert b"abc" not in decoded.prompts[0]


@pytest.mark.parametrize(
    ("path", "document", "expected"),
    [
        ("/v1/completions", {"prompt": "one"}, (b"one",)),
        ("/v1/completions", {"prompt": ["one", "two"]}, (b"one", b"two")),
        ("/v1/embeddings", {"input": ["one", "two"]}, (b"one", b"two")),
        ("/v1/embeddings", {"input": "one"}, (b"one",)),
        ("/tokenize", {"prompt": "one"}, (b"one",)),
        ("/pooling", {"input": "one"}, (b"one",)),
        ("/v1/audio/speech", {"input": "one"}, (b"one",)),
        ("/generate", {"text": "one"}, (b"one",)),
        ("/v1/completions", {}, ()),
    ],
)
def test_text_prompts_are_their_utf8_bytes(path: str, document: dict[str, Any], expected: tuple[bytes, ...]) -> None:
    assert read(document, path).prompts == expected


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/v1/completions", {"prompt": [1, 2, 70000]}),
        ("/v1/embeddings", {"input": [[1, 2, 70000]]}),
        ("/inference/v1/generate", {"token_ids": [1, 2, 70000], "sampling_params": {"max_tokens": 9}}),
        ("/generate", {"input_ids": [[1, 2, 70000]], "sampling_params": {"max_new_tokens": 9}}),
    ],
)
def test_token_ids_are_little_endian_words_and_exact(path: str, document: dict[str, Any]) -> None:
    decoded = read(document, path)
    assert decoded.prompts == (b"\1\0\0\0\2\0\0\0\x70\x11\1\0",)
    assert decoded.request.is_token_exact
    assert decoded.request.prompt_tokens == 3
    assert decoded.request.max_output_tokens == (9 if "sampling_params" in document else None)


def test_several_token_prompts_are_several_entries() -> None:
    assert read({"prompt": [[1], [2, 3]]}, "/v1/completions").prompts == (b"\1\0\0\0", b"\2\0\0\0\3\0\0\0")


@pytest.mark.parametrize("ids", [[1, -1], [1, 2**32], [1, "x"], [1, 1.5], [[1], [1.5]]])
def test_what_is_no_token_id_is_refused(ids: list[Any]) -> None:
    with pytest.raises(InvalidInput, match="whole numbers"):
        read({"prompt": ids}, "/v1/completions")


def test_media_among_tokens_tell_prompts_apart_from_their_place_on() -> None:
    def tokens(name: str) -> bytes:
        features = {"mm_hashes": {"image": [name]}, "mm_placeholders": {"image": [{"offset": 2, "length": 3}]}}
        (only,) = read({"token_ids": [9] * 6, "features": features}, "/inference/v1/generate").prompts
        return only

    assert tokens("a") == tokens("a")
    assert tokens("a") != tokens("b")
    assert tokens("a")[:8] == tokens("b")[:8] == b"\x09\0\0\0" * 2
    assert tokens("a")[20:] == tokens("b")[20:]
    assert len(tokens("a")) == 24


@pytest.mark.parametrize("features", [5, {"mm_hashes": 1}, {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {}}])
def test_malformed_media_features_are_left_to_the_engine(features: Any) -> None:
    assert read({"token_ids": [1], "features": features}, "/inference/v1/generate").prompts == (b"\1\0\0\0",)


def test_scoring_bodies_put_the_shared_query_first() -> None:
    one = prompt({"query": "which?", "documents": ["a", "b"]}, "/v1/rerank")
    two = prompt({"query": "which?", "documents": ["c"]}, "/rerank")
    assert one.startswith(b"which?")
    assert two.startswith(b"which?")
    assert prompt({"text_1": "which?", "text_2": ["a"]}, "/score").startswith(b"which?")


def test_an_unknown_path_never_fails_and_shows_its_model_when_it_can() -> None:
    assert read({"model": "m", "stream": True}, "/v9/new").request.model == "m"
    for body in (b"\xff\xfe binary", b'{"model": 5}', b'{"model"', b"[1]", b"[" * 100_000, b'{"a":' * 100_000):
        decoded = read(body, "/v9/new")
        assert (decoded.request.api, decoded.request.model, decoded.prompts) == (Api.OTHER, "", ())
        assert decoded.request.body_bytes == len(body)


def test_requests_without_a_body_pass_on_any_path_but_a_posted_api() -> None:
    listing = decode("r", "GET", "/v1/models", {}, b"").request
    assert (listing.api, listing.has_body) == (Api.OTHER, False)
    assert decode("r", "GET", "/v1/responses/resp_1", {}, b"").request.api is Api.OTHER
    with pytest.raises(InvalidInput, match="no body"):
        decode("r", "POST", CHAT, {}, b"")


BAD = [
    b"{" + CANARY.encode(),
    b'{"model":"m","messages":[{"role":"user","content":"' + CANARY.encode(),
    b'{"model":"m","messages":"' + CANARY.encode() + b'"}',
    b'{"model":"m","messages":["' + CANARY.encode() + b'"]}',
    b'{"model":{"' + CANARY.encode() + b'":1},"messages":[]}',
    b'{"model":"m","messages":{"' + CANARY.encode() + b'":1}}',
    b'{"model":"m"}',
    b'["' + CANARY.encode() + b'"]',
    b'"' + CANARY.encode() + b'"',
    b'{"messages":[{"content":"' + CANARY.encode() + b'\xff"}]}',
    b'{"messages":[{"content":' + b"[" * 5000 + b'"' + CANARY.encode() + b'"' + b"]" * 5000 + b"}]}",
    b'{"model":"' + CANARY.encode() * 100 + b'","messages":[]}',
    b'{"messages":[]} ' + CANARY.encode(),
]


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_malformed_bodies_are_refused_without_a_word_of_the_prompt(body: bytes) -> None:
    for path in (CHAT, "/v1/messages"):
        with pytest.raises(InvalidInput) as caught:
            read(body, path)
        assert CANARY not in str(caught.value)
        assert refusal_of(caught.value).reason is RefusalReason.BAD_REQUEST


@pytest.mark.parametrize("value", [5, {"a": CANARY}, True])
def test_a_prompt_of_a_wrong_type_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match="prompt must be") as caught:
        read({"prompt": value}, "/v1/completions")
    assert CANARY not in str(caught.value)


@given(st.binary(max_size=60))
def test_no_bytes_at_all_raise_anything_but_invalid_input(noise: bytes) -> None:
    for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate", "/rerank"):
        with contextlib.suppress(InvalidInput):
            read(noise, path)


_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("type", "text", "content", "name", "function", "url", "a")), inner, max_size=3
        )
    ),
    max_leaves=8,
)


FIELDS = (
    *("model", "messages", "system", "input", "prompt", "instructions", "tools", "token_ids", "features", "query"),
    *(
        "documents",
        "stream",
        "max_tokens",
        "cache_salt",
        "reasoning",
        "sampling_params",
        "text",
        "chat_template_kwargs",
    ),
)


@given(
    st.dictionaries(
        st.sampled_from(FIELDS),
        _JSON,
        max_size=6,
    ),
    st.lists(st.dictionaries(st.sampled_from(("role", "content", "name", "tool_calls", "type")), _JSON, max_size=4)),
)
def test_any_json_is_read_or_refused(document: dict[str, Any], messages: list[Any]) -> None:
    for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate", "/score", "/zz"):
        for body in (document, {**document, "model": "m", "messages": messages, "input": messages}):
            try:
                request = read(body, path).request
            except InvalidInput:
                continue
            assert request.prompt_bytes >= 0


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("GZIP", lambda body: gzip.compress(body[:10]) + gzip.compress(body[10:])),
        ("deflate", zlib.compress),
        ("deflate", lambda body: zlib.compress(body)[2:-4]),
        ("identity", lambda body: body),
    ],
)
def test_compressed_bodies_are_looked_into(encoding: str, packed: Any) -> None:
    plain = json.dumps(chat(user("hello"))).encode()
    decoded = read(packed(plain), content_encoding=encoding)
    assert decoded.request.model == "m"
    assert decoded.prompts == read(plain).prompts
    assert decoded.request.body_bytes == len(packed(plain))


@pytest.mark.parametrize("body", [b"not gzip", gzip.compress(b'{"messages":[]}', mtime=0)[:-9], b"\x1f\x8b"])
def test_a_broken_gzip_body_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput, match="gzip") as caught:
        read(body, content_encoding="gzip")
    assert refusal_of(caught.value).reason is RefusalReason.BAD_REQUEST
    assert read(body, "/unknown", content_encoding="gzip").request.api is Api.OTHER


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, br", "made-up"])
def test_a_body_in_an_unknown_coding_passes_unread(encoding: str) -> None:
    decoded = read(b"\x8b\x02", content_encoding=encoding)
    assert (decoded.request.api, decoded.request.model, decoded.prompts) == (Api.OTHER, "", ())


def test_a_body_over_the_limit_names_the_limit() -> None:
    limits = Limits(max_body_bytes=1000)
    bomb = gzip.compress(b'{"messages":[]}' + b" " * 1_000_000)
    for body, headers in ((b" " * 1001, {}), (bomb[:1000], {"content_encoding": "gzip"})):
        with pytest.raises(InvalidInput, match="1000 bytes") as caught:
            read(body, CHAT, limits, **headers)
        assert refusal_of(caught.value).reason is RefusalReason.BODY_TOO_LARGE
    with pytest.raises(InvalidInput, match="at most 3 prompts"):
        read({"prompt": ["a"] * 4}, "/v1/completions", Limits(max_prompts=3))


def form(*parts: tuple[str, bytes], boundary: str = "XX") -> bytes:
    out = b""
    for name, value in parts:
        out += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + value + b"\r\n"
    return out + f"--{boundary}--\r\n".encode()


def test_a_form_shows_its_model_wherever_the_field_stands() -> None:
    audio = ("file", b"RIFF\r\n\r\n--X name=model" * 1000)
    for body in (form(("model", b"whisper"), audio), form(audio, ("stream", b"true"), ("model", b"whisper"))):
        for header in ("multipart/form-data; boundary=XX", 'Multipart/Form-Data; charset=x; boundary="XX"'):
            request = read(body, "/v1/audio/transcriptions", content_type=header).request
            assert (request.api, request.model) == (Api.AUDIO, "whisper")
            assert request.is_streaming == (b"stream" in body)


def test_a_form_without_a_model_or_boundary_is_told_apart() -> None:
    path = "/v1/audio/transcriptions"
    assert read(form(("file", b"x")), path, content_type="multipart/form-data; boundary=XX").request.model == ""
    for header in ("multipart/form-data", "multipart/form-data; boundary=YY"):
        with pytest.raises(InvalidInput, match="boundary"):
            read(form(("file", b"x")), path, content_type=header)


@given(st.binary(max_size=200))
def test_no_form_raises_anything_but_invalid_input(noise: bytes) -> None:
    for body in (noise, b"--XX\r\n" + noise, form(("file", noise))):
        with contextlib.suppress(InvalidInput):
            read(body, "/v1/audio/transcriptions", content_type="multipart/form-data; boundary=XX")
