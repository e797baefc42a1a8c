"""The official clients through a pool, and through two pools in a row: every byte as the engine sent it."""

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.scenarios.engines import EngineProcess, backends, engines
from tests.scenarios.pools import ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CHAT: dict[str, object] = {"model": "tiny", "messages": [{"role": "user", "content": "tell"}], "max_tokens": 9}
TEXT: dict[str, object] = {"model": "tiny", "prompt": "tell", "max_tokens": 9}
SHAPES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {**CHAT, "stream_options": {"include_usage": True}},
    "/v1/completions": {**TEXT, "stream_options": {"include_usage": True}},
    "/v1/responses": {"model": "tiny", "input": "tell", "max_output_tokens": 9},
    "/v1/messages": {**CHAT, "system": "be brief"},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The one engine."""
    with engines(tmp_path_factory.mktemp("engine"), ["--seed", "7"]) as (started,):
        yield started


@pytest.fixture(scope="module")
def inner(plane: str, tmp_path_factory: pytest.TempPathFactory, engine: EngineProcess) -> Iterator[ScenarioPool]:
    """A pool before the engine."""
    with pool(plane, tmp_path_factory.mktemp("inner"), backends([engine])) as running:
        yield running


@pytest.fixture(scope="module")
def outer(plane: str, tmp_path_factory: pytest.TempPathFactory, inner: ScenarioPool) -> Iterator[ScenarioPool]:
    """A pool before that pool."""
    with pool(plane, tmp_path_factory.mktemp("outer"), ["--backend", inner.url]) as running:
        yield running


def answered(url: str, path: str, body: dict[str, object]) -> bytes:
    """The bytes of an answer, without the second at which it was made."""
    headers = {"x-request-id": "the-same-id"}
    answer = httpx.post(url + path, json=body, headers=headers, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return re.sub(rb'"(created|created_at|completed_at)":\d+', rb'"\1":0', answer.content)


@pytest.mark.parametrize("is_streaming", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", SHAPES)
def test_answers_are_the_engines_byte_for_byte_through_one_pool_and_through_two_in_a_row(
    path: str, is_streaming: bool, engine: EngineProcess, inner: ScenarioPool, outer: ScenarioPool
) -> None:
    body = {**SHAPES[path], "stream": is_streaming}
    if not is_streaming:
        body.pop("stream_options", None)
    answered(engine.url, path, body)  # later ones report the same cached tokens
    direct = answered(engine.url, path, body)
    assert answered(inner.url, path, body) == direct
    assert answered(outer.url, path, body) == direct
    assert (b"data: " in direct) is is_streaming


@pytest.mark.parametrize(
    ("path", "wrong", "status"),
    [
        ("/v1/chat/completions", {**CHAT, "max_tokens": 10**7}, 400),
        ("/v1/completions", {**TEXT, "n": "many"}, 400),
        ("/v1/messages", {"model": "tiny", "messages": []}, 400),
        ("/v1/no/such/path", {"model": "tiny"}, 404),
    ],
)
def test_errors_are_the_engines_byte_for_byte_through_two_pools(
    path: str, wrong: dict[str, object], status: int, engine: EngineProcess, outer: ScenarioPool
) -> None:
    direct = httpx.post(engine.url + path, json=wrong, timeout=30.0)
    passed = httpx.post(outer.url + path, json=wrong, timeout=30.0)
    assert direct.status_code == status
    assert (passed.status_code, passed.content) == (direct.status_code, direct.content)
    assert passed.headers["content-type"] == direct.headers["content-type"]


def test_the_openai_client_gets_every_api_whole_and_streamed(inner: ScenarioPool) -> None:
    client = inner.openai
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "tell"}], max_tokens=9, seed=1
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 9
    pieces = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "tell"}], max_tokens=9, seed=1, stream=True
    )
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == chat.choices[0].message.content
    text = client.completions.create(model="tiny", prompt="tell", max_tokens=9)
    words = client.completions.create(model="tiny", prompt="tell", max_tokens=9, stream=True)
    assert "".join(word.choices[0].text for word in words) == text.choices[0].text
    response = client.responses.create(model="tiny", input="tell", max_output_tokens=9)
    events = list(client.responses.create(model="tiny", input="tell", max_output_tokens=9, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
        response.output_text
    )
    vectors = client.embeddings.create(model="tiny", input=["a", "b"])
    assert len(vectors.data) == 2


def test_the_anthropic_client_gets_messages_whole_and_streamed(inner: ScenarioPool) -> None:
    client = inner.anthropic
    whole = client.messages.create(model="tiny", max_tokens=7, messages=[{"role": "user", "content": "tell"}])
    with client.messages.stream(model="tiny", max_tokens=7, messages=[{"role": "user", "content": "tell"}]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in whole.content if block.type == "text"] == [text]
    assert final.usage.output_tokens == 7
    counted = client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": "tell"}])
    assert counted.input_tokens > 0


def test_paths_that_the_router_does_not_know_pass_to_an_engine(inner: ScenarioPool, engine: EngineProcess) -> None:
    direct = httpx.get(f"{engine.url}/version", timeout=30.0)
    passed = httpx.get(f"{inner.url}/version", timeout=30.0)
    assert (passed.status_code, passed.content) == (direct.status_code, direct.content)
    tokens = httpx.post(f"{inner.url}/tokenize", json={"model": "tiny", "prompt": "one two"}, timeout=30.0)
    assert tokens.json()["count"] > 0
    nothing = httpx.post(f"{inner.url}/v2/nothing", json={"model": "tiny"}, timeout=30.0)
    assert (nothing.status_code, nothing.json()) == (404, {"detail": "Not Found"})
