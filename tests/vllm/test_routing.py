"""Two real vLLMs on CPU behind `shoal up`.  `make vllm` installs vLLM; without it these tests are skipped."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.hosts.supervisor.pool_rig import until
from tests.scenarios.pools import ScenarioPool, pool
from tests.vllm.conftest import Weights
from tests.vllm.servers import VLLM_VENV, Server, vllm

PROMPT = "def main():\n    return sum(range(10))\n" * 12
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Łódź", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (VLLM_VENV / ".installed").exists(), reason="no vLLM installed: make vllm"),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, weights: Weights) -> Iterator[list[Server]]:
    """Two engines."""
    room = tmp_path_factory.mktemp("vllm")
    with ExitStack() as stack:
        started = []
        for name in ("a", "b"):
            started.append(vllm(weights.model, room / f"{name}.log", "--block-size", "32"))
            stack.callback(started[-1].close)
        yield [engine.listening() for engine in started]


@pytest.fixture(scope="module", params=["envoy", "direct"])
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engines: list[Server]
) -> Iterator[ScenarioPool]:
    """A pool of both engines, in either data plane."""
    flags = [word for engine in engines for word in ("--backend", engine.url)]
    with pool(request.param, tmp_path_factory.mktemp("pool"), flags, "ejection: {base_s: 2, max_s: 4}\n") as running:
        until(lambda: list(running.states().values()) == ["ready", "ready"], why=running.said)
        yield running


def ask(real: ScenarioPool, request_id: str, text: str = PROMPT) -> int:
    """One stream to its end; returns the tokens of the answer."""
    stream = real.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": text}],
        max_tokens=6,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-request-id": request_id},
    )
    usage = list(stream)[-1].usage
    assert usage is not None
    return usage.completion_tokens


def running_requests(engines: list[Server]) -> float:
    return sum(engine.samples()["vllm:num_requests_running"] for engine in engines)


def test_a_repeated_prompt_returns_to_the_vllm_that_cached_it(real: ScenarioPool) -> None:
    prompt = f"# {real.plane}\n" + PROMPT
    assert ask(real, "cold", prompt) == 6
    first = real.explained("cold")
    ask(real, "warm", prompt)
    second = real.explained("warm")
    assert second["served"] == first["served"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] > 0.7 * second["reported_prompt_tokens"]


def test_turns_of_a_conversation_go_where_its_first_turn_went(real: ScenarioPool) -> None:
    served: set[str] = set()
    for number in range(4):
        text = f"conversation {number} in {real.plane}\n" + f"line {number} of it\n" * 20
        ask(real, f"turn-0-{number}", text)
        ask(real, f"turn-1-{number}", text + "and more of it\n" * 10)
        first, second = (real.explained(f"turn-{turn}-{number}") for turn in (0, 1))
        assert second["served"] == first["served"]
        assert second["cached_tokens"] > 0.5 * first["reported_prompt_tokens"]
        served.add(first["served"])
    assert len(served) == 2


def test_the_engines_own_figures_are_read(real: ScenarioPool) -> None:
    ask(real, "figures")

    def figures_are_there() -> bool:
        return all(
            each.models == ["tiny"] and each.running == 0 and each.kv_usage_ratio is not None
            for each in real.client.picture().endpoints
        )

    until(figures_are_there, why=real.said)


def test_answers_of_vllm_pass_unchanged(real: ScenarioPool, engines: list[Server]) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 99999}
    through = real.post(body)
    direct = engines[0].post("/v1/chat/completions", body)
    assert (through.status_code, through.json()) == (direct.status_code, direct.json())
    assert through.status_code == 400


def test_every_api_of_vllm_is_reached_through_the_pool(real: ScenarioPool) -> None:
    assert real.openai.completions.create(model="tiny", prompt="import os", max_tokens=3).choices[0].text
    assert real.openai.responses.create(model="tiny", input="hi", max_output_tokens=16).output
    assert real.post({"model": "tiny", "prompt": "import os"}, path="/tokenize").json()["count"] > 0
    message = real.anthropic.messages.create(model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert message.type == "message"


def test_a_tool_is_called_and_its_result_goes_back(real: ScenarioPool) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather?"}]
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    first = real.openai.chat.completions.create(
        model="tiny", messages=asked, tools=[WEATHER], tool_choice=choice, max_tokens=60, temperature=0
    )
    assert first.choices[0].message.tool_calls
    call = first.choices[0].message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "weather"
    # What random weights write may end within a number; what goes back must be an object.
    call.function.arguments = json.dumps({"city": "Łódź"})
    reply: Any = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    second = real.openai.chat.completions.create(
        model="tiny", messages=[*asked, reply, result], tools=[WEATHER], tool_choice="none", max_tokens=4
    )
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


@pytest.mark.parametrize("is_streaming", [True, False], ids=["streaming", "plain"])
def test_a_client_that_leaves_frees_the_vllm_within_seconds(
    real: ScenarioPool, engines: list[Server], is_streaming: bool
) -> None:
    connection = real.send(f"leaves-{is_streaming}", "go on", 1900, is_streaming)
    until(lambda: running_requests(engines) == 1)
    connection.close()
    until(lambda: running_requests(engines) == 0, 10.0)


def test_an_engine_that_is_killed_costs_no_request_that_can_be_tried_again(
    real: ScenarioPool, engines: list[Server]
) -> None:
    stop, is_starting = threading.Event(), threading.Event()
    answers: list[httpx.Response] = []

    def client(number: int) -> None:
        for turn in range(10_000):
            # An engine that starts needs the machine for itself.
            if stop.wait(2.0 if is_starting.is_set() else 0.0):
                return
            answers.append(real.chat(f"client {number} of {real.plane}, turn {turn}: " + PROMPT, 40))

    with ThreadPoolExecutor(6) as threads:
        clients = [threads.submit(client, number) for number in range(6)]
        try:
            until(lambda: all(engine.samples()["vllm:num_requests_running"] > 0 for engine in engines))
            engines[1].kill()
            until(lambda: real.states()[engines[1].address] != "ready", why=real.said)
            before = len(answers)
            until(lambda: len(answers) > before + 12, why=real.said)
            is_starting.set()
            engines[1].heal()
            is_starting.clear()
            until(lambda: real.states()[engines[1].address] == "ready", why=real.said)
            until(lambda: engines[1].samples()["vllm:request_success_total"] > 0, why=real.said)
        finally:
            stop.set()
            engines[1].heal()
        for each in clients:
            each.result()
    assert {answer.status_code for answer in answers} == {200}
    assert all(answer.json()["usage"]["completion_tokens"] == 40 for answer in answers)
    real.idle()
