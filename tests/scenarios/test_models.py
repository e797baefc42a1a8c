"""Several models behind one endpoint, and what the official clients see of them."""

from collections import Counter
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest

from tests.hosts.supervisor.pool_rig import until
from tests.scenarios.engines import EngineProcess, backends, engines
from tests.scenarios.pools import ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SETTINGS = "aliases: {gpt-4: llama-3-8b}\n"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """Two engines of one model, one of them with an adapter, and one of another model."""
    llama, qwen = ["--model", "llama-3-8b"], ["--model", "qwen-2-7b", "--model", "qwen"]
    with engines(tmp_path_factory.mktemp("fleet"), [*llama, "--lora", "sql"], llama, qwen) as started:
        yield started


@pytest.fixture(scope="module")
def models(plane: str, tmp_path_factory: pytest.TempPathFactory, fleet: list[EngineProcess]) -> Iterator[ScenarioPool]:
    """One pool over all three."""
    with pool(plane, tmp_path_factory.mktemp("models"), backends(fleet), SETTINGS) as running:
        until(lambda: set(running.states().values()) == {"ready"} and len(running.states()) == 3, why=running.said)
        yield running


def ask(models: ScenarioPool, model: str, text: str = "hello") -> str:
    """One chat request; returns the model that the answer names."""
    client = models.openai
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], max_tokens=2)
    return answer.model


def served(fleet: list[EngineProcess]) -> list[int]:
    """Chat requests that arrived at each engine so far."""
    return [len(engine.arrivals()) for engine in fleet]


def test_a_request_reaches_only_engines_that_serve_its_model(models: ScenarioPool, fleet: list[EngineProcess]) -> None:
    before = served(fleet)
    for turn in range(6):
        assert ask(models, "qwen-2-7b", f"a {turn}") == "qwen-2-7b"
        assert ask(models, "llama-3-8b", f"a {turn}") == "llama-3-8b"
    first, second, third = (after - b for after, b in zip(served(fleet), before, strict=True))
    assert third == 6
    assert first + second == 6


def test_an_adapter_is_served_where_it_is_loaded_and_nowhere_else(
    models: ScenarioPool, fleet: list[EngineProcess]
) -> None:
    before = served(fleet)
    for turn in range(5):
        assert ask(models, "sql", f"adapter {turn}") == "sql"
    assert [after - b for after, b in zip(served(fleet), before, strict=True)] == [5, 0, 0]


def test_an_adapter_loaded_while_the_pool_runs_is_found(models: ScenarioPool, fleet: list[EngineProcess]) -> None:
    adapter = {"lora_name": "late", "lora_path": "/x"}
    assert httpx.post(f"{fleet[1].url}/v1/load_lora_adapter", json=adapter).status_code == 200
    until(lambda: "late" in {model.id for model in models.openai.models.list()}, why=models.said)
    before = served(fleet)
    assert ask(models, "late") == "late"
    assert [after - b for after, b in zip(served(fleet), before, strict=True)] == [0, 1, 0]
    assert httpx.post(f"{fleet[1].url}/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 200
    until(lambda: "late" not in {model.id for model in models.openai.models.list()}, why=models.said)


def test_an_alias_is_answered_by_its_model(models: ScenarioPool) -> None:
    assert ask(models, "gpt-4") == "llama-3-8b"


def test_the_list_of_models_is_merged_over_the_pool_without_repeats(models: ScenarioPool) -> None:
    listed = Counter(model.id for model in models.openai.models.list())
    assert listed == dict.fromkeys(["llama-3-8b", "sql", "qwen-2-7b", "qwen", "gpt-4"], 1)
    sql = next(model for model in models.openai.models.list() if model.id == "sql")
    assert sql.model_dump()["parent"] == "llama-3-8b"


def test_an_unknown_model_is_404_with_near_names_for_both_official_clients(models: ScenarioPool) -> None:
    with pytest.raises(openai.NotFoundError) as found:
        ask(models, "llama-3-8B-Instruct")
    body = found.value.body
    assert isinstance(body, dict)
    assert body["code"] == "model_not_found"
    assert body["param"] == "model"
    assert "Did you mean llama-3-8b" in body["message"]
    with pytest.raises(anthropic.NotFoundError) as said:
        models.anthropic.messages.create(model="qwen2", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    answer = said.value.body
    assert isinstance(answer, dict)
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "not_found_error"
    assert "qwen" in answer["error"]["message"]


def test_a_retry_never_leaves_the_engines_of_the_model(models: ScenarioPool, fleet: list[EngineProcess]) -> None:
    before = served(fleet)
    fleet[2].fault(fail_rate=1.0, fail_status=503)
    try:
        with pytest.raises(openai.InternalServerError) as failed:
            ask(models, "qwen", "retry me")
    finally:
        fleet[2].fault(fail_rate=0.0)
    assert failed.value.status_code == 503
    assert "Injected failure" in str(failed.value)
    after = served(fleet)
    assert after[:2] == before[:2]
    assert after[2] == before[2] + 1
    until(lambda: models.states()[fleet[2].address] == "ready", why=models.said)
