"""Asking an engine, one that answers as vLLM does and one that does not."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import numpy as np
import pytest
import uvloop
from aiohttp import web

from shoal.hosts.backends import Backend
from shoal.hosts.tokens import remote
from shoal.hosts.tokens.prompts import NoTokens, read_prompt
from shoal.hosts.tokens.remote import RemoteTokenizer, Rendered, Server
from shoal.pool import Api

Answer = Callable[[dict[str, Any]], Any]


class Engine:
    """Answers by path: a status, bytes, JSON, or nothing for ever.  key: wanted as a bearer token, "" for none."""

    def __init__(self, key: str = "", **answers: Any) -> None:
        self.key = key
        self.answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.url = ""

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.asked.append((request.path, body))
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        name = "render" if request.path.endswith("/render") else "tokenize"
        answer = self.answers.get(name, 404)
        if answer is None:
            await asyncio.sleep(60)
        if isinstance(answer, int):
            return web.Response(status=answer)
        if isinstance(answer, bytes):
            return web.Response(body=answer)
        return web.json_response(answer)


def play(engine: Engine, scene: Callable[[RemoteTokenizer], Awaitable[None]], timeout_s: float = 10.0) -> None:
    async def main() -> None:
        server = web.Server(engine.serve)
        runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            with ThreadPoolExecutor(1) as threads:
                async with asyncio.timeout(30), aiohttp.ClientSession() as session:
                    await scene(RemoteTokenizer(session, threads, timeout_s, timeout_s))
        finally:
            await runner.cleanup()

    uvloop.run(main())


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "alias", "messages": [{"role": "user", "content": "hi"}], "stream": True, **more}


async def ask(made: RemoteTokenizer, engine: Engine, api: Api, body: dict[str, Any], **more: Any) -> Rendered:
    return await made.tokenise(Server(engine.url, **more), read_prompt(api, json.dumps(body).encode()), "m")


def numbers(rendered: Rendered) -> list[list[int]]:
    return [np.frombuffer(each, "<u4").tolist() for each in rendered.ids]


def fails(engine: Engine, body: dict[str, Any] | None = None, api: Api = Api.CHAT, timeout_s: float = 10.0) -> str:
    reasons: list[str] = []

    async def scene(made: RemoteTokenizer) -> None:
        with pytest.raises(NoTokens) as raised:
            await ask(made, engine, api, body or chat())
        reasons.append(raised.value.reason)

    play(engine, scene, timeout_s)
    return reasons[0]


def test_a_chat_is_rendered_by_the_engine_under_its_own_name_of_the_model() -> None:
    engine = Engine(render={"token_ids": [1, 2, 3], "sampling_params": {}})

    async def scene(made: RemoteTokenizer) -> None:
        rendered = await ask(made, engine, Api.CHAT, chat(tools=[], stream_options={"include_usage": True}))
        assert (numbers(rendered), rendered.media) == ([[1, 2, 3]], [])
        ((path, body),) = engine.asked
        assert path == "/v1/chat/completions/render"
        assert (body["model"], body["messages"], body["stream"]) == ("m", chat()["messages"], False)
        assert "stream_options" not in body

    play(engine, scene)


def test_completions_come_as_a_list() -> None:
    engine = Engine(render=[{"token_ids": [1]}, {"token_ids": [2, 3]}])

    async def scene(made: RemoteTokenizer) -> None:
        rendered = await ask(made, engine, Api.COMPLETIONS, {"prompt": ["a", "b"]})
        assert numbers(rendered) == [[1], [2, 3]]

    play(engine, scene)


@pytest.mark.parametrize("closed", [401, 403, 404, 501])
def test_where_rendering_is_closed_tokenize_is_asked_and_rendering_not_again(closed: int) -> None:
    engine = Engine(render=closed, tokenize={"tokens": [7, 8], "count": 2})

    async def scene(made: RemoteTokenizer) -> None:
        for _ in range(2):
            assert numbers(await ask(made, engine, Api.CHAT, chat(temperature=1, tools=[{"a": 1}]))) == [[7, 8]]
        texts = await ask(made, engine, Api.COMPLETIONS, {"prompt": ["a", "b"], "add_special_tokens": False})
        assert numbers(texts) == [[7, 8], [7, 8]]
        paths = [path for path, _ in engine.asked]
        assert paths[:3] == ["/v1/chat/completions/render", "/tokenize", "/tokenize"]
        _, body = engine.asked[1]
        assert body == {"model": "m", "messages": chat()["messages"], "tools": [{"a": 1}]}
        assert engine.asked[-1][1] == {"model": "m", "prompt": "b", "add_special_tokens": False}

    play(engine, scene)


def test_an_engine_without_rendering_is_not_asked_for_it() -> None:
    engine = Engine(tokenize={"tokens": [7]})

    async def scene(made: RemoteTokenizer) -> None:
        await ask(made, engine, Api.CHAT, chat(), has_render=False)
        assert [path for path, _ in engine.asked] == ["/tokenize"]

    play(engine, scene)


@pytest.mark.parametrize("has_render", [True, False])
def test_an_engine_that_wants_a_key_gets_its_own(has_render: bool) -> None:
    engine = Engine("own", render={"token_ids": [1]}, tokenize={"tokens": [2]})

    async def scene(made: RemoteTokenizer) -> None:
        backend = Backend(authorization="Bearer own")
        asked = {"backend": backend, "client_key": {"authorization": "Bearer client"}, "has_render": has_render}
        assert numbers(await ask(made, engine, Api.CHAT, chat(), **asked)) == [[1 if has_render else 2]]
        with pytest.raises(NoTokens, match="unauthorized"):
            await ask(made, engine, Api.CHAT, chat(), **{**asked, "backend": Backend(authorization="Bearer old")})

    play(engine, scene)


def test_the_wrong_key_of_one_client_closes_nothing_for_the_next() -> None:
    engine = Engine("good", render={"token_ids": [1]})

    async def scene(made: RemoteTokenizer) -> None:
        for key in ("bad", "good"):
            asked = ask(made, engine, Api.CHAT, chat(), client_key={"authorization": f"Bearer {key}"})
            if key == "bad":
                with pytest.raises(NoTokens, match="unauthorized"):
                    await asked
            else:
                assert numbers(await asked) == [[1]]

    play(engine, scene)


def test_a_client_without_a_key_closes_nothing_for_one_that_has_it() -> None:
    engine = Engine("good", render={"token_ids": [1]})

    async def scene(made: RemoteTokenizer) -> None:
        with pytest.raises(NoTokens, match="unauthorized"):
            await ask(made, engine, Api.CHAT, chat(), client_key={})
        with_key = {"client_key": {"authorization": "Bearer good"}}
        assert numbers(await ask(made, engine, Api.CHAT, chat(), **with_key)) == [[1]]

    play(engine, scene)


@pytest.mark.parametrize(
    "asked",
    [
        {"backend": Backend(authorization="Bearer bad"), "client_key": {"authorization": "Bearer client"}},
        {"backend": Backend(authorization="Bearer bad")},
        {},
    ],
)
def test_a_refusal_that_no_client_can_change_closes_rendering(asked: dict[str, Any]) -> None:
    engine = Engine("good", render={"token_ids": [1]})

    async def scene(made: RemoteTokenizer) -> None:
        for _ in range(2):
            with pytest.raises(NoTokens, match="unauthorized"):
                await ask(made, engine, Api.CHAT, chat(), **asked)
        assert [path for path, _ in engine.asked] == ["/v1/chat/completions/render", "/tokenize", "/tokenize"]

    play(engine, scene)


def test_token_ids_need_no_engine() -> None:
    engine = Engine()

    async def scene(made: RemoteTokenizer) -> None:
        assert numbers(await ask(made, engine, Api.COMPLETIONS, {"prompt": [4, 5]})) == [[4, 5]]
        assert engine.asked == []

    play(engine, scene)


def test_images_are_named_by_their_place() -> None:
    features = {"mm_hashes": {"image": ["h1", "h2"]}, "mm_placeholders": {"image": [{"offset": 4, "length": 3}] * 2}}
    features["mm_placeholders"]["image"][1] = {"offset": 1, "length": 2}
    engine = Engine(render={"token_ids": list(range(8)), "features": features})

    async def scene(made: RemoteTokenizer) -> None:
        rendered = await ask(made, engine, Api.CHAT, chat())
        assert rendered.media == [("h2", 1, 2), ("h1", 4, 3)]

    play(engine, scene)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (400, "refused"),
        (500, "unavailable"),
        (302, "unavailable"),
        (b"no json", "bad-answer"),
        ({"token_ids": ["a"]}, "bad-answer"),
        ({"token_ids": [-1]}, "bad-answer"),
        ([], "bad-answer"),
        ({"token_ids": [1], "features": {"mm_hashes": {"image": ["h"]}}}, "bad-answer"),
        (
            {
                "token_ids": [1],
                "features": {"mm_hashes": {"i": ["h"]}, "mm_placeholders": {"i": [{"offset": 0, "length": 9}]}},
            },
            "bad-answer",
        ),
        (None, "timeout"),
    ],
)
def test_what_an_engine_may_say_instead_is_a_reason(answer: Any, reason: str) -> None:
    assert fails(Engine(render=answer), timeout_s=0.3 if answer is None else 10.0) == reason


def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_ANSWER_BYTES", 1000)
    assert fails(Engine(render={"token_ids": list(range(5000))})) == "too-large"


def test_an_engine_that_cannot_be_reached_is_a_reason() -> None:
    async def main() -> None:
        with ThreadPoolExecutor(1) as threads:
            async with aiohttp.ClientSession() as session:
                made = RemoteTokenizer(session, threads, 5.0, 5.0)
                prompt = read_prompt(Api.CHAT, json.dumps(chat()).encode())
                with pytest.raises(NoTokens, match="unavailable"):
                    await made.tokenise(Server("http://127.0.0.1:1"), prompt, "m")

    uvloop.run(main())


@pytest.mark.parametrize("body", [chat(documents=[{}]), chat(reasoning_effort="low")])
def test_what_tokenize_does_not_know_of_is_not_asked_of_it(body: dict[str, Any]) -> None:
    assert fails(Engine(render=404, tokenize={"tokens": [1]}), body) == "unsupported"


def test_images_need_rendering() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    assert fails(Engine(render=404, tokenize={"tokens": [1]}), body) == "media"


def test_the_render_endpoint_of_other_apis_is_the_only_way(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(render={"token_ids": [1]})

    async def scene(made: RemoteTokenizer) -> None:
        await ask(made, engine, Api.MESSAGES, {"messages": []})
        await ask(made, engine, Api.RESPONSES, {"input": "x"})
        assert [path for path, _ in engine.asked] == ["/v1/messages/render", "/v1/responses/render"]

    play(engine, scene)
    assert fails(Engine(tokenize={"tokens": [1]}), {"messages": []}, Api.MESSAGES) == "unsupported"
