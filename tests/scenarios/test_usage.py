"""Token usage, from what engines send to `shoal explain --json` and the metrics page."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.cli import main
from tests.hosts.supervisor.pool_rig import body, until
from tests.scenarios.backends import backend
from tests.scenarios.engines import EngineProcess, backends, engines
from tests.scenarios.pools import ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROMPT = "a prompt long enough to fill some blocks of cache " * 8
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 11}
SHAPES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "ignore_eos": True},
    "/v1/completions": {"model": "tiny", "prompt": PROMPT, "max_tokens": 11, "ignore_eos": True},
    "/v1/responses": {"model": "tiny", "input": PROMPT, "max_output_tokens": 11},
    "/v1/messages": CHAT,
}
SUMS = (
    "llm_d_epp_request_input_tokens_sum",
    "llm_d_epp_request_output_tokens_sum",
    "shoal_reported_cached_tokens_total",
)
ASKED = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The one engine."""
    with engines(tmp_path_factory.mktemp("engine"), []) as (started,):
        yield started


@pytest.fixture(scope="module")
def front(plane: str, tmp_path_factory: pytest.TempPathFactory, engine: EngineProcess) -> Iterator[ScenarioPool]:
    """A pool that observes."""
    with pool(plane, tmp_path_factory.mktemp("front"), backends([engine]), "usage: observe\n") as running:
        yield running


def explained(front: ScenarioPool, name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `shoal explain --json` prints of a request whose record has come."""
    front.explained(name)
    capsys.readouterr()
    assert main(["explain", name, "--json", "--run-dir", str(front.run_dir)]) == 0
    (found,) = json.loads(capsys.readouterr().out)["found"]
    return dict(found)


@pytest.mark.parametrize("is_streaming", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", SHAPES)
def test_usage_of_every_api_reaches_the_explanation_and_the_metrics(
    path: str, is_streaming: bool, front: ScenarioPool, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {**SHAPES[path], "stream": is_streaming}
    if is_streaming and path.endswith("completions"):
        asked |= ASKED
    front.post(asked, path=path)  # the next one finds its prefix in the cache
    front.idle()
    before = [front.sample(name) for name in SUMS]
    name = f"usage-{path}-{is_streaming}".replace("/", "-")
    assert front.post(asked, {"x-request-id": name}, path).status_code == 200
    found = explained(front, name, capsys)
    assert found["completion_tokens"] == 11
    assert found["is_estimated"] is False
    assert found["reported_prompt_tokens"] > 90
    assert 64 <= found["cached_tokens"] < found["reported_prompt_tokens"]
    after = [front.sample(name) for name in SUMS]
    assert [now - was for now, was in zip(after, before, strict=True)] == [
        found["reported_prompt_tokens"],
        11,
        found["cached_tokens"],
    ]


def test_tokens_of_a_stream_without_usage_are_estimated_and_marked(
    front: ScenarioPool, capsys: pytest.CaptureFixture[str]
) -> None:
    for turn in range(12):  # what others reported teaches how long a token is
        front.post({**SHAPES["/v1/chat/completions"], **ASKED, "max_tokens": 60, "stream": True, "seed": turn})
    front.idle()
    estimated = front.sample("shoal_estimated_completion_tokens_total")
    asked = {**SHAPES["/v1/chat/completions"], "max_tokens": 60, "stream": True}
    front.post(asked, {"x-request-id": "silent"})
    found = explained(front, "silent", capsys)
    assert found["is_estimated"] is True
    assert 45 <= found["completion_tokens"] <= 75
    assert front.sample("shoal_estimated_completion_tokens_total") == estimated + found["completion_tokens"]


def test_tokens_of_a_cancelled_stream_are_counted_up_to_where_it_was_cancelled(front: ScenarioPool) -> None:
    before = front.sample("llm_d_epp_request_output_tokens_sum")
    with front.send("cancelled", "count me", 8000) as connection:
        heard = b""
        while heard.count(b'"content":"') < 80:
            heard += connection.recv(65536)
    found = front.explained("cancelled")
    assert found["is_estimated"] is True
    assert 60 <= found["completion_tokens"] <= 400
    until(lambda: front.sample("llm_d_epp_request_output_tokens_sum") == before + found["completion_tokens"])


def test_inject_asks_streams_for_usage_and_changes_nothing_else(
    plane: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with (
        backend() as echo,
        pool(plane, tmp_path_factory.mktemp("inject"), ["--backend", echo.url], "usage: inject\n") as injecting,
    ):
        last = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
        echo.scripts["/v1/chat/completions"] = [b'data: {"id":"c","choices":[]}\n\n', last, b"data: [DONE]\n\n"]
        answer = injecting.post(body("x", stream=True), {"x-request-id": "injected"})
        assert last in answer.content  # the client sees it too
        arrived = echo.seen.pop()
        assert json.loads(arrived.body) == {**body("x", stream=True), "stream_options": {"include_usage": True}}
        assert arrived.values("content-length") == [str(len(arrived.body))]
        assert injecting.explained("injected")["completion_tokens"] == 3
        echo.scripts.clear()
        plain = body("x")
        injecting.post(plain)
        assert json.loads(echo.seen.pop().body) == plain
