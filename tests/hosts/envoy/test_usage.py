"""Token usage of every API shape, from plain answers and from streams."""

import gzip
import json
from typing import Any

import pytest
from aiohttp import web

from tests.hosts.envoy.envoy_rig import Rig, sse

pytestmark = pytest.mark.e2e

CHAT = {"usage": {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 64}}}
RESPONSES_USAGE = {"input_tokens": 100, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 64}}
MESSAGES_USAGE = {
    "input_tokens": 36,
    "output_tokens": 7,
    "cache_read_input_tokens": 64,
    "cache_creation_input_tokens": 0,
}

PLAIN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", CHAT),
    ("/v1/responses", {"usage": RESPONSES_USAGE}),
    ("/v1/messages", {"usage": MESSAGES_USAGE}),
]
STREAMS: list[tuple[str, str, list[Any]]] = [
    (
        "chat, a last chunk without choices",
        "/v1/chat/completions",
        [{"choices": [{}]}, {"choices": [], **CHAT}, "[DONE]"],
    ),
    ("chat, usage beside choices", "/v1/chat/completions", [{"choices": [{}]}, {"choices": [{}], **CHAT}, "[DONE]"]),
    (
        "chat, usage in every chunk",
        "/v1/chat/completions",
        [{"usage": {"prompt_tokens": 100, "completion_tokens": n}} for n in range(7)] + [CHAT, "[DONE]"],
    ),
    ("chat, null after it", "/v1/chat/completions", [CHAT, {"usage": None}, "[DONE]"]),
    ("completions", "/v1/completions", [{"usage": None}, CHAT, "[DONE]"]),
    (
        "responses",
        "/v1/responses",
        [
            {"type": "response.created", "response": {"usage": None}},
            {"type": "response.completed", "response": {"usage": RESPONSES_USAGE}},
        ],
    ),
    (
        "messages",
        "/v1/messages",
        [
            {"type": "message_start", "message": {"usage": {**MESSAGES_USAGE, "output_tokens": 0}}},
            {"type": "message_delta", "usage": {"output_tokens": 7}},
            {"type": "message_stop"},
        ],
    ),
    (
        "messages, all in the last event",
        "/v1/messages",
        [
            {"type": "message_start", "message": {"usage": {"input_tokens": 100, "output_tokens": 0}}},
            {"type": "message_delta", "usage": MESSAGES_USAGE},
        ],
    ),
    ("an event of 200 KB", "/v1/chat/completions", [{**CHAT, "pad": "x" * 200_000}, "[DONE]"]),
]


@pytest.mark.parametrize(("path", "body"), PLAIN)
async def test_usage_of_a_plain_answer_is_read(live: Rig, path: str, body: dict[str, Any]) -> None:
    async def answer(_: web.Request, __: bytes) -> web.Response:
        return web.json_response({"choices": [], **body})

    live.engines[0].answers[path] = answer
    got = await live.send(path, live.engines[0].address)
    assert json.loads(got.body) == {"choices": [], **body}
    outcome = (await live.record(path)).outcome
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens) == (100, 64, 7)
    assert not outcome.is_estimated


@pytest.mark.parametrize(("path", "events"), [row[1:] for row in STREAMS], ids=[row[0] for row in STREAMS])
async def test_usage_of_a_stream_is_read_and_its_bytes_are_untouched(live: Rig, path: str, events: list[Any]) -> None:
    live.engines[0].answers[path] = lambda request, _: sse(request, events)
    got = await live.send(path, live.engines[0].address)
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    assert got.body == "".join(f"data: {text}\n\n" for text in texts).encode()
    outcome = (await live.record(path)).outcome
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens) == (100, 64, 7)
    assert not outcome.is_estimated
    assert outcome.ttft_s is not None
    assert 0 < outcome.ttft_s <= outcome.duration_s


async def test_a_stream_without_usage_says_its_bytes_and_no_tokens(live: Rig) -> None:
    live.engines[0].answers["/v1/chat/completions"] = lambda request, _: sse(request, [{"choices": [{}]}] * 100)
    answer = await live.send("/v1/chat/completions", live.engines[0].address)
    outcome = (await live.record("/v1/chat/completions")).outcome
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.is_estimated) == (None, None, False)
    assert outcome.response_bytes == len(answer.body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"usage":',
        b'{"usage": {"prompt_tokens": "many", "completion_tokens": [1], "prompt_tokens_details": 3}}',
        b'{"usage": {"prompt_tokens": -5, "completion_tokens": 1e300}}',
        b'{"usage": {"completion_tokens": 99999999999999999999999}}',
        b"[" * 100_000,
        b"\xff\xfe\x00",
        gzip.compress(b"{}"),
        b"",
    ],
)
async def test_an_engine_that_lies_about_usage_does_no_harm(live: Rig, body: bytes) -> None:
    async def lie(_: web.Request, __: bytes) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    engine = live.engines[0]
    engine.answers["/v1/chat/completions"] = lie
    got = await live.send("/v1/chat/completions", engine.address)
    assert (got.status, got.body) == (200, body)
    outcome = (await live.record("/v1/chat/completions")).outcome
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (None, None)
    engine.answers["/v1/chat/completions"] = lambda request, _: sse(request, [body.decode("latin-1"), "[DONE]"])
    assert (await live.send("/v1/chat/completions", engine.address)).status == 200
