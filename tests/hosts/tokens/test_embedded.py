"""What is counted here is what the embedded engine counts."""

import asyncio
import json
from typing import Any

import pytest

from shoal.hosts.tokens.embedded import tokenise
from shoal.hosts.tokens.prompts import NoTokens
from shoal.pool import Api
from tests.hosts.engine.engine_http import Engine, quick, run
from tests.hosts.tokens.engine_check import differing

TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": "x"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "é 你"},
]
CASES: dict[str, tuple[Api, dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": (
        Api.CHAT,
        {"messages": TURNS, "tools": [{"type": "function"}], "chat_template_kwargs": {"a": 1}, "cache_salt": "s"},
        ("usage", "prompt_tokens"),
    ),
    "/v1/completions": (Api.COMPLETIONS, {"prompt": ["one text", "another one"]}, ("usage", "prompt_tokens")),
    "/v1/responses": (
        Api.RESPONSES,
        {"instructions": "be kind", "input": [{"role": "user", "content": "hello"}, {"type": "reasoning"}]},
        ("usage", "input_tokens"),
    ),
    "/v1/messages": (
        Api.MESSAGES,
        {"system": "be kind", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
        ("usage", "input_tokens"),
    ),
    "/inference/v1/generate": (
        Api.GENERATE,
        {"token_ids": [1, 2, 3, 4, 5], "sampling_params": {"max_tokens": 2}},
        ("usage", "prompt_tokens"),
    ),
}


@pytest.mark.parametrize("path", CASES)
def test_the_engines_usage_is_what_was_counted(path: str) -> None:
    api, body, field = CASES[path]

    async def scene(engine: Engine) -> None:
        status, answer = await engine.post(path, {"max_tokens": 2, **body})
        assert status == 200, answer
        ids, salt = tokenise(api, json.dumps(body).encode())
        assert sum(map(len, ids)) // 4 == answer[field[0]][field[1]]
        assert salt == body.get("cache_salt", "")

    run(scene, quick())


def test_the_ids_are_the_engines_own() -> None:
    async def scene(engine: Engine) -> None:
        _, models = await engine.get("/v1/models")
        name = models["data"][0]["id"]
        found = await asyncio.to_thread(differing, engine.url, name, lambda api, body: tokenise(api, body)[0])
        assert found == []

    run(scene, quick())


def test_a_body_that_the_engine_refuses_has_no_tokens() -> None:
    for body in (b"{", b'{"messages": 3}', b'{"messages": [{"role": "user", "content": [{"type": 3}]}]}'):
        with pytest.raises(NoTokens):
            tokenise(Api.CHAT, body)
