"""A real SGLang on CPU behind `shoal up`.  `make sglang` installs it; without it these tests are skipped.

Unofficial: upstream builds its CPU kernels from source.  Where it does not start its tests say so and are skipped.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.hosts.supervisor.pool_rig import until
from tests.scenarios.pools import pool
from tests.sglang.servers import SGLANG_VENV, sglang
from tests.vllm.conftest import Weights, make_weights
from tests.vllm.exactpool import EXACT, ExactPool
from tests.vllm.prompts import CHAT, COMPLETIONS, LONG, says
from tests.vllm.servers import Server

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (SGLANG_VENV / ".installed").exists(), reason="no SGLang installed: make sglang"),
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The tiny model of the vLLM tests."""
    return make_weights(tmp_path_factory.mktemp("weights"), SGLANG_VENV)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, weights: Weights) -> Iterator[Server]:
    """One engine."""
    with ExitStack() as stack:
        started = sglang(weights.model, tmp_path_factory.mktemp("sglang") / "engine.log")
        stack.callback(started.close)
        try:
            started.listening()
        except AssertionError as error:
            pytest.skip(f"SGLang does not start here: {error}")
        yield started


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory, engine: Server, weights: Weights) -> Iterator[ExactPool]:
    """A pool that follows what the engine publishes."""
    settings = EXACT.format(backend=f"local: {{path: {weights.model}}}")
    with pool("envoy", tmp_path_factory.mktemp("pool"), ["--backend", engine.url], settings) as running:
        made = ExactPool(running)
        made.wait_fresh()
        yield made


def test_figures_and_models_of_sglang_are_read(exact: ExactPool) -> None:
    exact.ask(CHAT, {"messages": [says("hi")]})

    def figures_are_there() -> bool:
        (found,) = exact.pool.client.picture().endpoints
        return found.models == ["tiny"] and found.running == 0 and found.kv_usage_ratio is not None

    until(figures_are_there, why=exact.pool.said)


def test_streams_and_answers_of_sglang_pass(exact: ExactPool) -> None:
    plain = exact.pool.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=6, temperature=0
    )
    stream = exact.pool.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=6, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text
    assert plain.choices[0].message.content == text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [says("Be brief", "system"), says(LONG)]}),
        (COMPLETIONS, {"prompt": LONG}),
        (COMPLETIONS, {"prompt": [(37 * place) % 1900 + 10 for place in range(200)]}),
    ],
    ids=["chat", "completion", "ids"],
)
def test_what_is_predicted_is_what_sglang_reports(exact: ExactPool, path: str, body: dict[str, Any]) -> None:
    body = exact.fresh(body)
    cold = exact.ask(path, body)
    warm = exact.ask(path, body)
    longer = exact.ask(path, exact.longer(body))
    assert warm.is_exact
    assert longer.is_exact
    assert warm.cached > cold.prompt - 2 * 32
    assert abs(warm.predicted - warm.cached) <= 32
    assert abs(longer.predicted - longer.cached) <= 32


def test_a_flushed_cache_is_known_at_once(exact: ExactPool, engine: Server) -> None:
    body = {"prompt": f"{time.monotonic_ns()}\n" + LONG}
    exact.ask(COMPLETIONS, body)
    assert engine.post("/flush_cache").status_code == 200
    exact.settle()
    flushed = exact.ask(COMPLETIONS, body)
    assert (flushed.predicted, flushed.cached) == (0, 0)
    warm = exact.ask(COMPLETIONS, body)
    assert warm.is_exact
    assert abs(warm.predicted - warm.cached) <= 32
    assert warm.cached > 0


def test_a_client_that_leaves_frees_sglang_within_seconds(exact: ExactPool, engine: Server) -> None:
    connection = exact.pool.send("leaves", "go on", 1900)
    until(lambda: engine.samples()["sglang:num_running_reqs"] == 1)
    connection.close()
    until(lambda: engine.samples()["sglang:num_running_reqs"] == 0, 10.0)
