"""What the picker knows of the caches of real vLLMs is what these report."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.hosts.tokens.local import LocalTokenizer
from shoal.hosts.tokens.prompts import read_prompt
from shoal.pool import Api
from tests.hosts.supervisor.pool_rig import until
from tests.scenarios.pools import pool
from tests.vllm.conftest import Weights
from tests.vllm.exactpool import EXACT, ExactPool
from tests.vllm.prompts import CHAT, COMPLETIONS, FORMS, LONG, says
from tests.vllm.servers import VLLM_VENV, Server, vllm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (VLLM_VENV / ".installed").exists(), reason="no vLLM installed: make vllm"),
]

KEY = "engine-secret"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, weights: Weights) -> Iterator[list[Server]]:
    """Two engines with an adapter."""
    room = tmp_path_factory.mktemp("vllm")
    flags = ["--block-size", "32", "--enable-lora", "--max-loras", "1", "--max-lora-rank", "8"]
    flags += ["--lora-modules", f"tuned={weights.adapter}"]
    with ExitStack() as stack:
        started = []
        for name in ("a", "b"):
            started.append(vllm(weights.model, room / f"{name}.log", *flags))
            stack.callback(started[-1].close)
        yield [engine.listening() for engine in started]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, weights: Weights) -> Iterator[Server]:
    """An engine that wants a key, and has its render endpoints."""
    engine = vllm(
        weights.model, tmp_path_factory.mktemp("guarded") / "engine.log", "--api-key", KEY, "--enable-scale-out"
    )
    try:
        yield engine.listening()
    finally:
        engine.close()


def exact_pool(stack: ExitStack, room: Path, engines: list[Server], backend: str, plane: str) -> ExactPool:
    flags = [word for engine in engines for word in ("--backend", engine.url)]
    made = ExactPool(stack.enter_context(pool(plane, room, flags, EXACT.format(backend=backend))))
    made.wait_fresh()
    return made


@pytest.fixture(scope="module", params=["local", "engine"])
def exact(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engines: list[Server], weights: Weights
) -> Iterator[ExactPool]:
    """A pool that has tokens from the model's files, and one that asks the engines for them."""
    backend, plane = {
        "local": (f"local: {{path: {weights.model}}}", "direct"),
        "engine": ("engine: {}", "envoy"),
    }[request.param]
    with ExitStack() as stack:
        yield exact_pool(stack, tmp_path_factory.mktemp("pool"), engines, backend, plane)


def filler(number: int) -> dict[str, Any]:
    """A prompt that takes 29 of an engine's 80 blocks."""
    return {"prompt": [(place * (2 * number + 3)) % 1900 + 10 for place in range(920)]}


@pytest.mark.parametrize("form", [name for name, (_, body) in FORMS.items() if body.get("model") is None])
def test_tokens_from_the_models_files_are_those_of_vllm(engines: list[Server], weights: Weights, form: str) -> None:
    path, body = FORMS[form]
    asked = {"model": "tiny", "max_tokens": 1, "return_token_ids": True, **body}
    tokenizer = LocalTokenizer(weights.model, 1 << 20, 0)
    (mine,) = tokenizer.tokenise(read_prompt(Api.CHAT if path == CHAT else Api.COMPLETIONS, json.dumps(asked).encode()))
    answer = engines[0].post(path, asked).json()
    theirs = answer["prompt_token_ids"] if path == CHAT else answer["choices"][0]["prompt_token_ids"]
    assert np.frombuffer(mine, "<u4").tolist() == theirs


@pytest.mark.parametrize("form", FORMS)
def test_what_is_predicted_is_what_vllm_reports(exact: ExactPool, form: str) -> None:
    path, body = FORMS[form]
    body = exact.fresh(body)
    cold = exact.ask(path, body)
    warm = exact.ask(path, body)
    longer = exact.ask(path, ExactPool.longer(body))
    assert cold.cached == cold.predicted
    assert warm.served == longer.served == cold.served
    assert warm.is_exact
    assert longer.is_exact
    assert (warm.predicted, longer.predicted) == (warm.cached, longer.cached)
    assert warm.cached > cold.prompt - 2 * 32
    assert longer.cached > 32


def test_tenants_and_adapters_share_no_cache(exact: ExactPool) -> None:
    prompt = {"prompt": f"{time.monotonic_ns()}\n" + LONG}
    for body in (
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"model": "tuned"},
        {"model": "tuned", "cache_salt": "a"},
    ):
        cold = exact.ask(COMPLETIONS, {**prompt, **body})
        assert (cold.predicted, cold.cached) == (0, 0)
        warm = exact.ask(COMPLETIONS, {**prompt, **body})
        assert warm.is_exact
        assert warm.predicted == warm.cached > 0


def test_generated_tokens_are_known_to_be_cached_too(exact: ExactPool) -> None:
    prompt = [*map(ord, str(time.monotonic_ns())), *range(100, 150)]
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 150, "ignore_eos": True, "return_token_ids": True}
    answer = exact.pool.post({**asked, "temperature": 0}, path=COMPLETIONS).json()
    exact.settle()
    whole = exact.ask(COMPLETIONS, {"prompt": [*prompt, *answer["choices"][0]["token_ids"], 99]})
    assert whole.is_exact
    assert whole.predicted == whole.cached > len(prompt) + 64


def test_what_an_engine_evicts_is_not_predicted(exact: ExactPool) -> None:
    prompt = {"prompt": f"{time.monotonic_ns()}\n" + LONG}
    exact.ask(COMPLETIONS, prompt)
    kept = exact.ask(COMPLETIONS, prompt)
    assert kept.predicted == kept.cached > 0
    for number in range(8):
        found = exact.ask(COMPLETIONS, filler(number))
        assert found.predicted == found.cached
    evicted = exact.ask(COMPLETIONS, prompt)
    assert evicted.is_exact
    assert (evicted.predicted, evicted.cached) == (0, 0)


def test_a_reset_cache_is_known_from_the_next_step_of_the_engine_on(exact: ExactPool, engines: list[Server]) -> None:
    prompt = {"prompt": f"{time.monotonic_ns()}\n" + LONG}
    exact.ask(COMPLETIONS, prompt)
    for engine in engines:
        assert engine.post("/reset_prefix_cache").status_code == 200
        # An idle engine keeps the news until it computes.
        engine.post(COMPLETIONS, {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1}).raise_for_status()
    exact.settle()
    found = exact.ask(COMPLETIONS, prompt)
    assert (found.predicted, found.cached) == (0, 0)
    again = exact.ask(COMPLETIONS, prompt)
    assert again.is_exact
    assert again.predicted == again.cached > 0


def test_a_new_picker_knows_the_caches_from_a_replay(exact: ExactPool) -> None:
    prompt = {"prompt": f"{time.monotonic_ns()}\n" + LONG}
    first = exact.ask(COMPLETIONS, prompt)
    exact.kill_picker()
    found = exact.ask(COMPLETIONS, prompt)
    assert found.served == first.served
    assert found.is_exact
    assert found.predicted == found.cached > 0


def test_an_engine_that_began_anew_is_known_to_be_empty(
    tmp_path: Path, engines: list[Server], weights: Weights
) -> None:
    prompt = {"prompt": f"{time.monotonic_ns()}\n" + LONG}
    with ExitStack() as stack:
        made = exact_pool(stack, tmp_path, engines, f"local: {{path: {weights.model}}}", "direct")
        first = made.ask(COMPLETIONS, prompt)
        victim = next(engine for engine in engines if engine.address == first.served)
        victim.kill()
        try:
            until(lambda: made.pool.states()[victim.address] != "ready", why=made.pool.said)
            elsewhere = made.ask(COMPLETIONS, prompt)
            assert elsewhere.served != first.served
            assert elsewhere.predicted == elsewhere.cached == 0
        finally:
            victim.heal()
        until(lambda: made.pool.states()[victim.address] == "ready", why=made.pool.said)
        made.wait_fresh()
        found = made.ask(COMPLETIONS, prompt)
        assert found.served == elsewhere.served
        assert found.is_exact
        assert found.predicted == found.cached > 0
        # Of the one that is empty the same is known: what it computes now is found there later.
        assert made.pool.sample("shoal_kv_publisher_restarts_total") == 1
        there = {"model": "tiny", "max_tokens": 1, "temperature": 0, "prompt": f"{time.monotonic_ns()}\n" + LONG}
        victim.post(COMPLETIONS, there).raise_for_status()
        made.settle()
        learned = made.ask(COMPLETIONS, there)
        assert learned.served == victim.address
        assert learned.is_exact
        assert learned.predicted == learned.cached > 0


def test_blocks_of_the_default_size_are_known_as_well(tmp_path: Path, weights: Weights) -> None:
    with ExitStack() as stack:
        engine = vllm(weights.model, tmp_path / "engine.log")
        stack.callback(engine.close)
        engine.listening()
        made = exact_pool(stack, tmp_path / "pool", [engine], f"local: {{path: {weights.model}}}", "direct")
        body = {"messages": [says(LONG * 2)]}
        made.ask(CHAT, body)
        warm, longer = made.ask(CHAT, body), made.ask(CHAT, ExactPool.longer(body))
        assert warm.is_exact
        assert longer.is_exact
        assert warm.predicted == warm.cached
        assert longer.predicted == longer.cached
        assert warm.cached % 128 == longer.cached % 128 == 0
        assert warm.cached > 0


@pytest.mark.parametrize("plane", ["envoy", "direct"])
def test_an_engine_that_wants_a_key_renders_for_a_pool_that_has_it(plane: str, tmp_path: Path, guarded: Server) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    settings = f"backends: [{{url: '{guarded.url}', api_key_file: {tmp_path}/key}}]\n" + EXACT.format(
        backend="engine: {}"
    )
    with pool(plane, tmp_path, [], settings) as running:
        made = ExactPool(running)
        made.wait_fresh()
        # `/tokenize`, which needs no key, does not know of this field.
        body = made.fresh({"messages": [says(LONG)], "reasoning_effort": "low"})
        made.ask(CHAT, body)
        warm = made.ask(CHAT, body)
        assert warm.is_exact
        assert warm.predicted == warm.cached > 0
