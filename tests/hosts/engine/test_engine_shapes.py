"""Answers of the embedded engine, key for key against those of vLLM 0.32."""

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.hosts.engine.engine_http import CHAT, Engine, run

USAGE = {
    "prompt_tokens": int,
    "total_tokens": int,
    "completion_tokens": int,
    "prompt_tokens_details": {"cached_tokens": int, "created_cache_tokens": int, "multimodal_tokens": None},
    "completion_tokens_details": None,
}
STREAM_USAGE = {
    "prompt_tokens": int,
    "total_tokens": int,
    "completion_tokens": int,
    "prompt_tokens_details": {"cached_tokens": int, "created_cache_tokens": int},
}
RUNNING_USAGE = {
    "prompt_tokens": int,
    "total_tokens": int,
    "completion_tokens": int,
    "completion_tokens_details": None,
}
CHAT_HEAD = {"id": str, "object": str, "created": int, "model": str}
CHAT_WHOLE = CHAT_HEAD | {
    "choices": [
        {
            "index": int,
            "message": {
                "role": str,
                "content": str,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": str,
            "stop_reason": None,
            "token_ids": None,
            "routed_experts": None,
        }
    ],
    "service_tier": None,
    "system_fingerprint": str,
    "usage": USAGE,
    "prompt_logprobs": None,
    "prompt_token_ids": None,
    "prompt_text": None,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "metrics": None,
}
CHAT_ROLE = CHAT_HEAD | {
    "choices": [{"index": int, "delta": {"role": str, "content": str}, "logprobs": None, "finish_reason": None}],
    "prompt_token_ids": None,
    "prompt_text": None,
}
CHAT_TOKEN = CHAT_HEAD | {
    "choices": [{"index": int, "delta": {"content": str}, "logprobs": None, "finish_reason": None, "token_ids": None}]
}
CHAT_LAST = CHAT_HEAD | {
    "choices": [
        {
            "index": int,
            "delta": {"content": str},
            "logprobs": None,
            "finish_reason": str,
            "stop_reason": None,
            "token_ids": None,
        }
    ]
}
CHAT_USAGE = CHAT_HEAD | {"choices": [], "usage": STREAM_USAGE, "system_fingerprint": str}
COMPLETION_WHOLE = CHAT_HEAD | {
    "choices": [
        {
            "index": int,
            "text": str,
            "logprobs": None,
            "finish_reason": str,
            "stop_reason": None,
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "routed_experts": None,
        }
    ],
    "service_tier": None,
    "system_fingerprint": str,
    "usage": {
        **USAGE,
        "prompt_tokens_details": {"cached_tokens": int, "created_cache_tokens": None, "multimodal_tokens": None},
    },
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "metrics": None,
}
COMPLETION_CHOICE = {
    "index": int,
    "text": str,
    "logprobs": None,
    "finish_reason": None,
    "stop_reason": None,
    "prompt_token_ids": None,
    "token_ids": None,
}
RESPONSE = [
    "id",
    "created_at",
    "incomplete_details",
    "instructions",
    "metadata",
    "model",
    "object",
    "output",
    "parallel_tool_calls",
    "temperature",
    "tool_choice",
    "tools",
    "top_p",
    "background",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt",
    "reasoning",
    "service_tier",
    "status",
    "text",
    "top_logprobs",
    "truncation",
    "usage",
    "user",
    "presence_penalty",
    "frequency_penalty",
    "kv_transfer_params",
    "ec_transfer_params",
    "input_messages",
    "output_messages",
]


def assert_shape(value: Any, shape: Any, path: str = "$") -> None:
    """Same keys in the same order, values of the named types, None where vLLM says null."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), path
        assert list(value) == list(shape), path
        for key, inner in shape.items():
            assert_shape(value[key], inner, f"{path}.{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list), path
        assert len(value) == len(shape), path
        for index, inner in enumerate(shape):
            assert_shape(value[index], inner, f"{path}[{index}]")
    elif shape is None:
        assert value is None, path
    else:
        assert isinstance(value, shape), path


def test_a_chat_answer_has_vllms_keys() -> None:
    async def check(engine: Engine) -> None:
        status, answer = await engine.post("/v1/chat/completions", CHAT, X_Request_Id="my-req-1")
        assert status == 200
        assert_shape(answer, CHAT_WHOLE)
        assert answer["id"] == "chatcmpl-my-req-1"
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 8

    run(check)


def test_a_chat_stream_has_vllms_chunks_in_order() -> None:
    async def check(engine: Engine) -> None:
        body = {**CHAT, "max_tokens": 3, "stream_options": {"include_usage": True}}
        events = [data for _, data in await engine.events("/v1/chat/completions", body)]
        for event, shape in zip(events[:-1], [CHAT_ROLE, CHAT_TOKEN, CHAT_TOKEN, CHAT_LAST, CHAT_USAGE], strict=True):
            assert_shape(event, shape)
            assert event["object"] == "chat.completion.chunk"
        assert events[-1] == "[DONE]"
        assert len({event["id"] for event in events[:-1]}) == 1
        _, whole = await engine.post("/v1/chat/completions", {**CHAT, "max_tokens": 3})
        text = "".join(event["choices"][0]["delta"]["content"] for event in events[:4])
        assert text == whole["choices"][0]["message"]["content"]

    run(check)


def test_continuous_usage_stands_in_every_chunk_of_a_chat_stream() -> None:
    async def check(engine: Engine) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await engine.events("/v1/chat/completions", {**CHAT, "max_tokens": 2, "stream_options": options})
        role, first, last, usage, done = [data for _, data in events]
        head = dict(list(CHAT_ROLE.items())[:5])
        assert_shape(role, head | {"usage": RUNNING_USAGE, "prompt_token_ids": None, "prompt_text": None})
        assert_shape(first, CHAT_TOKEN | {"usage": RUNNING_USAGE})
        assert_shape(last, CHAT_LAST | {"usage": RUNNING_USAGE})
        assert_shape(usage, CHAT_USAGE)
        assert [each["usage"]["completion_tokens"] for each in (role, first, last, usage)] == [0, 1, 2, 2]
        assert done == "[DONE]"

    run(check)


def test_a_stream_without_usage_ends_with_the_fingerprint_in_its_last_chunk() -> None:
    async def check(engine: Engine) -> None:
        events = await engine.events("/v1/completions", {"model": "tiny", "prompt": "def main():", "max_tokens": 3})
        first, second, last, done = [data for _, data in events]
        assert_shape(first, CHAT_HEAD | {"choices": [COMPLETION_CHOICE]})
        assert_shape(second, CHAT_HEAD | {"choices": [COMPLETION_CHOICE]})
        assert_shape(
            last, CHAT_HEAD | {"choices": [{**COMPLETION_CHOICE, "finish_reason": str}], "system_fingerprint": str}
        )
        assert done == "[DONE]"
        assert last["id"].startswith("cmpl-")

    run(check)


def test_a_completion_answers_each_prompt_and_each_sample() -> None:
    async def check(engine: Engine) -> None:
        _, one = await engine.post("/v1/completions", {"prompt": "def main():", "max_tokens": 6})
        assert_shape(one, COMPLETION_WHOLE)
        body = {"prompt": ["def main():", "import os"], "n": 2, "max_tokens": 2, "return_token_ids": True}
        _, many = await engine.post("/v1/completions", body)
        assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
        assert len({choice["text"] for choice in many["choices"]}) == 4
        assert many["usage"]["prompt_tokens"] == 6, "three tokens each, counted once a prompt"
        assert many["usage"]["completion_tokens"] == 8
        assert [len(choice["token_ids"]) for choice in many["choices"]] == [2] * 4
        tokens = many["choices"][0]["prompt_token_ids"]
        _, again = await engine.post("/v1/completions", {"prompt": tokens, "max_tokens": 6})
        assert again["choices"][0]["text"] == one["choices"][0]["text"], "token ids and their text are one prompt"
        _, echoed = await engine.post("/v1/completions", {"prompt": "def main():", "max_tokens": 1, "echo": True})
        assert echoed["choices"][0]["text"].startswith("def main(): ")

    run(check)


def test_samples_of_one_streamed_request_carry_their_index() -> None:
    async def check(engine: Engine) -> None:
        events = await engine.events("/v1/chat/completions", {**CHAT, "n": 2, "max_tokens": 3})
        chunks = [data for _, data in events[:-1]]
        assert [sum(chunk["choices"][0]["index"] == index for chunk in chunks) for index in (0, 1)] == [4, 4]
        assert events[-1][1] == "[DONE]"

    run(check)


def test_a_response_has_vllms_keys_and_events() -> None:
    async def check(engine: Engine) -> None:
        body: dict[str, object] = {"model": "tiny", "input": "hi there", "max_output_tokens": 2, "temperature": 0}
        _, answer = await engine.post("/v1/responses", body)
        assert list(answer) == RESPONSE
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert list(answer["usage"]) == [
            "input_tokens",
            "input_tokens_details",
            "output_tokens",
            "output_tokens_details",
            "total_tokens",
        ]
        assert list(answer["output"][0]) == ["id", "content", "role", "status", "type", "phase"]
        events = await engine.events("/v1/responses", body)
        assert [name for name, _ in events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [data["sequence_number"] for _, data in events] == list(range(10))
        assert all(data["type"] == name for name, data in events)
        assert set(events[4][1]) == {
            "content_index",
            "delta",
            "item_id",
            "logprobs",
            "output_index",
            "sequence_number",
            "type",
        }
        assert list(events[-1][1]["response"]) == RESPONSE

    run(check)


def test_an_anthropic_message_has_vllms_keys_and_events() -> None:
    async def check(engine: Engine) -> None:
        body: dict[str, object] = {**CHAT, "max_tokens": 2}
        _, answer = await engine.post("/v1/messages", body)
        assert list(answer) == ["id", "type", "role", "content", "model", "stop_reason", "usage"]
        assert list(answer["usage"]) == [
            "input_tokens",
            "output_tokens",
            "cache_creation_input_tokens",
            "cache_read_input_tokens",
        ]
        assert answer["stop_reason"] == "max_tokens"
        events = await engine.events("/v1/messages", body)
        assert [name for name, _ in events] == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert all(data["type"] == name for name, data in events)
        assert events[0][1]["message"]["usage"] == {"input_tokens": 10, "output_tokens": 0}
        assert events[5][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}

    run(check)


def test_tokens_go_in_and_come_out_of_generate() -> None:
    async def check(engine: Engine) -> None:
        body: dict[str, object] = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3}, "request_id": "r1"}
        _, answer = await engine.post("/inference/v1/generate", body)
        assert answer["request_id"] == "r1"
        assert len(answer["choices"][0]["token_ids"]) == 3
        events = await engine.events("/inference/v1/generate", body)
        assert [token for _, data in events[:-1] for token in data["choices"][0]["token_ids"]] == answer["choices"][0][
            "token_ids"
        ]
        assert events[-1][1] == "[DONE]"

    run(check)


def test_the_tokeniser_gives_back_what_it_got() -> None:
    async def check(engine: Engine) -> None:
        text = "def main(): # naïve ✓"
        _, answer = await engine.post("/tokenize", {"prompt": text, "return_token_strs": True})
        assert list(answer) == ["count", "max_model_len", "tokens", "token_strs"]
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["count"] == -(-len(text.encode()) // 4)
        assert (await engine.post("/detokenize", {"tokens": answer["tokens"]}))[1] == {"prompt": text}
        _, chat = await engine.post("/tokenize", {"messages": CHAT["messages"]})
        assert chat["count"] == 10
        assert chat["token_strs"] is None
        _, counted = await engine.post("/v1/messages/count_tokens", {"messages": CHAT["messages"]})
        assert counted == {"input_tokens": 10}

    run(check)


def test_parts_of_a_message_count_by_what_they_are() -> None:
    async def check(engine: Engine) -> None:
        async def count(*parts: object) -> int:
            body = {"messages": [{"role": "user", "content": list(parts)}], "add_generation_prompt": False}
            return int((await engine.post("/tokenize", body))[1]["count"])

        empty = await count()
        assert await count({"type": "text", "text": "x" * 400}) == empty + 100
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000}}
        assert await count(picture) == empty + 61, "a mark and its digest, whatever the size"
        assert await count({"type": "tool_result", "content": "y" * 4000}) > empty + 1000

    run(check)


def test_prompts_are_scored_ranked_and_embedded() -> None:
    async def check(engine: Engine) -> None:
        _, vectors = await engine.post("/v1/embeddings", {"input": ["a", "b"], "dimensions": 8})
        assert list(vectors) == ["id", "object", "created", "model", "data", "usage"]
        assert [len(item["embedding"]) for item in vectors["data"]] == [8, 8]
        _, pooled = await engine.post("/pooling", {"input": "a"})
        assert pooled["data"][0]["object"] == "pooling"
        assert len(pooled["data"][0]["data"]) == 256
        _, scored = await engine.post("/score", {"text_1": "q", "text_2": ["x", "y"]})
        assert [list(item) for item in scored["data"]] == [["index", "object", "score"]] * 2
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            _, ranked = await engine.post(path, {"query": "q", "documents": ["x", "y", "z"], "top_n": 2})
            values = [result["relevance_score"] for result in ranked["results"]]
            assert values == sorted(values, reverse=True)
            assert len(values) == 2
        assert (await engine.samples())["vllm:generation_tokens_total"] == 0

    run(check)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_sound_is_transcribed_from_a_form(is_streaming: bool) -> None:
    async def check(engine: Engine) -> None:
        form = aiohttp.FormData()
        form.add_field("file", b"RIFF" + bytes(range(256)) * 300, filename="a.wav", content_type="audio/wav")
        form.add_field("model", "tiny")
        form.add_field("stream", str(is_streaming).lower())
        async with engine.session.post(engine.url + "/v1/audio/transcriptions", data=form) as response:
            text = await response.text()
            assert response.status == 200
        if is_streaming:
            assert '"object":"transcription.chunk"' in text
            assert text.endswith("data: [DONE]\n\n")
        else:
            assert '"usage":{"type":"duration","seconds":2}' in text

    run(check)


def test_models_aliases_and_adapters_are_listed_as_by_vllm() -> None:
    async def check(engine: Engine) -> None:
        _, listing = await engine.get("/v1/models")
        base = listing["data"][0]
        assert list(base) == ["id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"]
        assert len(base["permission"]) == 1
        assert (base["id"], base["parent"], base["max_model_len"]) == ("tiny", None, 25600)
        _, text = await engine.post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "/x"})
        assert text == "Success: LoRA adapter 'sql' added successfully."
        status, twice = await engine.post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "/x"})
        assert (status, twice["error"]["type"]) == (400, "InvalidUserInput")
        _, listing = await engine.get("/v1/models")
        assert (listing["data"][1]["id"], listing["data"][1]["parent"]) == ("sql", "tiny")
        status, answer = await engine.post("/v1/chat/completions", {**CHAT, "model": "sql"})
        assert (status, answer["model"]) == (200, "sql")
        await engine.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
        assert (await engine.post("/v1/chat/completions", {**CHAT, "model": "sql"}))[0] == 404
        assert (await engine.post("/v1/unload_lora_adapter", {"lora_name": "sql"}))[0] == 404

    run(check)


def test_refusals_have_vllms_status_and_words() -> None:
    async def check(engine: Engine) -> None:
        async def refused(path: str, body: object) -> tuple[int, dict[str, Any]]:
            status, answer = await engine.post(path, body)
            assert list(answer["error"]) == ["message", "type", "param", "code"]
            assert answer["error"]["code"] == status
            return status, answer["error"]

        status, error = await refused("/v1/chat/completions", {**CHAT, "model": "nope"})
        assert (status, error["type"], error["param"]) == (404, "NotFoundError", "model")
        assert error["message"] == "The model `nope` does not exist. Valid aliases: tiny."
        status, error = await refused("/v1/chat/completions", {**CHAT, "max_tokens": 999999})
        assert (status, error["type"], error["param"]) == (400, "BadRequestError", "max_tokens")
        assert error["message"] == (
            "max_tokens=999999 cannot be greater than max_model_len=25600. Please request fewer output tokens. "
            "(parameter=max_tokens, value=999999)"
        )
        status, error = await refused("/v1/chat/completions", b"{bad")
        assert (status, error["type"], error["param"]) == (400, "Bad Request", "body.1")
        assert error["message"].startswith(
            "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.1', 'msg': 'JSON decode error'"
        )
        status, error = await refused("/v1/chat/completions", {"model": "tiny"})
        assert (status, error["param"]) == (400, "body.messages")
        status, error = await refused("/v1/completions", {"prompt": "x" * 4 * 25600})
        assert (status, error["param"]) == (400, "input_tokens")
        assert "maximum context length is 25600 tokens" in error["message"]
        status, error = await refused("/v1/completions", {"prompt": "x" * 4 * 25000, "max_tokens": 1000})
        assert "maximum input length of 24600 tokens" in error["message"]
        assert (await refused("/v1/completions", {"prompt": "a", "max_tokens": 0}))[0] == 400
        assert (await refused("/v1/completions", {"prompt": []}))[0] == 400
        assert (await refused("/v1/responses", {"input": [{"role": 5}]}))[0] == 400
        status, error = await refused("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
        assert (status, error["param"]) == (400, "stream_options")
        status, error = await refused("/v1/completions", {"prompt": "a", "priority": 3})
        assert error["message"] == "Got priority 3 but Priority scheduling is not enabled."
        assert (await refused("/v1/completions", {"prompt": [-1]}))[0] == 400
        status, answer = await engine.post("/v1/messages", {**CHAT, "model": "nope"})
        assert (status, answer["type"], answer["error"]["type"]) == (404, "error", "NotFoundError")
        assert await engine.get("/nowhere") == (404, {"detail": "Not Found"})
        assert await engine.get("/v1/chat/completions") == (405, {"detail": "Method Not Allowed"})

    run(check)


def test_a_large_body_announced_with_expect_is_taken() -> None:
    async def check(engine: Engine) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        body = b'{"prompt":"%b","max_tokens":1}' % (b"x" * 50_000)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
            % len(body)
        )
        assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        await reader.readline()
        writer.write(body)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        await writer.wait_closed()

    run(check)
