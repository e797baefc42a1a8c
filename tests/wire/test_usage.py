"""Usage shapes as real vLLM 0.32 and SGLang 0.5.23 send them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.wire import Usage, UsageMeter

GOLDEN = Path(__file__).parent / "golden"

CHAT_USAGE = {
    "prompt_tokens": 18,
    "total_tokens": 26,
    "completion_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 16, "created_cache_tokens": 0, "multimodal_tokens": None},
    "completion_tokens_details": None,
}


def read(document: Any) -> Usage:
    meter = UsageMeter()
    meter.read(document if isinstance(document, bytes) else json.dumps(document).encode())
    return meter.usage


def stream(*events: Any) -> Usage:
    meter = UsageMeter()
    for event in events:
        name = f"event: {event['type']}\n" if "type" in event else ""
        meter.feed(f"{name}data: {json.dumps(event)}\n\n".encode())
    meter.feed(b"data: [DONE]\n\n")
    return meter.usage


@pytest.mark.parametrize(
    ("document", "usage"),
    [
        ({"object": "chat.completion", "usage": CHAT_USAGE}, Usage(18, 16, 8)),
        ({"usage": {**CHAT_USAGE, "prompt_tokens_details": None}}, Usage(18, None, 8)),
        ({"object": "list", "usage": {"prompt_tokens": 3, "total_tokens": 3}}, Usage(3, None, None)),
        (
            {"usage": {"input_tokens": 14, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 6}},
            Usage(14, 8, 6),
        ),
        ({"type": "message", "usage": {"input_tokens": 18, "output_tokens": 5}}, Usage(18, None, 5)),
        ({"usage": None}, Usage()),
        ({"usage": {"prompt_tokens": "many", "completion_tokens": -1}}, Usage()),
        ({"usage": [1]}, Usage()),
        ({"choices": [{"text": 'a "usage" here'}]}, Usage()),
        ({"message": "an error text", "usage": {"prompt_tokens": 1}}, Usage(1, None, None)),
        (b'{"usage": {"prompt_tokens": 1', Usage()),
        (b'"usage"', Usage()),
        (b'{"usage":' * 20000, Usage()),
    ],
)
def test_usage_of_one_document(document: Any, usage: Usage) -> None:
    assert read(document) == usage


def test_anthropic_input_leaves_out_what_the_cache_holds() -> None:
    usage = {
        "input_tokens": 2,
        "output_tokens": 5,
        "cache_creation_input_tokens": 3,
        "cache_read_input_tokens": 16,
    }
    assert read({"type": "message", "usage": usage}) == Usage(21, 16, 5)


def test_usage_is_taken_from_any_chunk_and_the_last_one_wins() -> None:
    choice = [{"index": 0, "delta": {"content": "a"}}]
    assert stream({"choices": choice}, {"choices": [], "usage": CHAT_USAGE}) == Usage(18, 16, 8)
    assert stream({"choices": choice, "usage": CHAT_USAGE}) == Usage(18, 16, 8)
    continuous = {"prompt_tokens": 18, "total_tokens": 19, "completion_tokens": 1}
    assert stream({"choices": choice, "usage": continuous}) == Usage(18, None, 1)
    assert (
        stream({"choices": choice, "usage": continuous}, {"choices": choice, "usage": CHAT_USAGE}).completion_tokens
        == 8
    )
    assert stream({"choices": choice, "usage": CHAT_USAGE}, {"choices": choice, "usage": None}) == Usage(18, 16, 8)
    assert stream({"choices": choice, "usage": continuous}, {"choices": [], "usage": CHAT_USAGE}) == Usage(18, 16, 8)


def test_a_responses_stream_says_it_at_its_end_however_it_ends() -> None:
    usage = {"input_tokens": 14, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 3, "total_tokens": 17}
    for kind in ("response.completed", "response.incomplete", "response.failed"):
        events = [
            {"type": "response.created", "response": {"usage": None}},
            {"type": kind, "response": {"usage": usage}},
        ]
        assert stream(*events) == Usage(14, 8, 3)


def test_an_anthropic_stream_says_it_at_both_ends() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 18, "output_tokens": 0}}}
    short = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 3}}
    full = {"input_tokens": 2, "output_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 16}
    assert stream(start, short) == Usage(18, None, 3)
    assert stream(start, {"type": "message_delta", "usage": full}) == Usage(18, 16, 3)
    cached_start = {"type": "message_start", "message": {"usage": full}}
    assert stream(cached_start, short) == Usage(18, 16, 3)


def test_a_stream_cut_in_the_middle_keeps_what_it_had_said() -> None:
    meter = UsageMeter()
    meter.feed(b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\ndata: {"choi')
    assert meter.usage == Usage(5, None, 2)


@given(st.lists(st.integers(min_value=1, max_value=40), max_size=40))
def test_usage_does_not_depend_on_how_the_stream_is_cut(sizes: list[int]) -> None:
    body = b'data: {"choices":[]}\n\ndata: ' + json.dumps({"usage": CHAT_USAGE}).encode() + b"\r\n\r\ndata: [DONE]\n\n"
    meter = UsageMeter()
    for size in [*sizes, len(body)]:
        meter.feed(body[:size])
        body = body[size:]
    assert meter.usage == Usage(18, 16, 8)


@given(st.binary(max_size=100))
def test_no_answer_of_an_engine_raises(noise: bytes) -> None:
    meter = UsageMeter(max_event_bytes=32)
    meter.feed(noise)
    meter.feed(b'data: {"usage"' + noise + b"\n\n")
    meter.read(b'{"usage":' + noise + b"}")
    assert meter.usage.completion_tokens is None or meter.usage.completion_tokens >= 0


@pytest.mark.parametrize("engine", ["vllm-0.32", "sglang-0.5"])
def test_every_captured_answer_that_holds_usage_is_read(engine: str) -> None:
    text = (GOLDEN / f"{engine}-answers.txt").read_bytes().replace(b"\r\n", b"\n")
    seen = 0
    for exchange in text.split(b"\n### ")[1:]:
        head, _, body = exchange.partition(b"\n\n")
        if b'"completion_tokens":' not in body and b'"output_tokens":' not in body:
            continue
        seen += 1
        meter = UsageMeter()
        if b"text/event-stream" in head:
            meter.feed(body.strip() + b"\n\n")
        else:
            meter.read(body.strip())
        usage = meter.usage
        assert usage.prompt_tokens is not None, head
        assert usage.completion_tokens is not None, head
        assert 0 < usage.prompt_tokens <= 18
        assert 0 < usage.completion_tokens <= 8192
    assert seen >= 9
