"""A pool that follows the KV events of `shoal engine`: ranks of one endpoint, adapters loaded anew, keys of engines."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from shoal.cli import main
from shoal.hosts.engine.kvforms import KvForm
from tests.hosts.certificates import make_certificate
from tests.hosts.supervisor.pool_rig import until
from tests.scenarios.engines import EngineProcess, engines, free_port
from tests.scenarios.pools import pool
from tests.vllm.exactpool import EXACT, ExactPool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

COMPLETIONS = "/v1/completions"
EVENTS = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}'
BLOCK = 16
KEY = "engine-secret"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One endpoint of two ranks, each with room for a few prompts, and with an adapter."""
    shape = ["--data-parallel-size", "2", "--blocks", "60", "--block-size", str(BLOCK), "--lora", "sql"]
    with engines(tmp_path_factory.mktemp("ranks"), [*shape, "--kv-events-config", EVENTS]) as (started,):
        yield started


@pytest.fixture(scope="module")
def exact(plane: str, tmp_path_factory: pytest.TempPathFactory, engine: EngineProcess) -> Iterator[ExactPool]:
    """A pool before it."""
    settings = EXACT.format(backend="engine: {}")
    with pool(plane, tmp_path_factory.mktemp("exact"), ["--backend", engine.url], settings) as running:
        made = ExactPool(running)
        made.wait_fresh()
        # How large blocks are is known with the first one.
        made.ask(COMPLETIONS, {"prompt": prompt()})
        yield made


def prompt(tokens: int = 320) -> list[int]:
    """One that nobody has asked before."""
    return [1 + int(digit) for digit in f"{time.monotonic_ns():020}"] + list(range(100, 80 + tokens))


def ask(exact: ExactPool, tokens: list[int], rank: int, **body: Any) -> tuple[int, int]:
    """Ask a rank for a prompt; returns the tokens that the picker promised and those that were cached."""
    found = exact.ask(COMPLETIONS, {"prompt": tokens, "max_tokens": 1, **body}, x_data_parallel_rank=str(rank))
    assert found.is_exact
    return found.predicted, found.cached


def test_each_rank_of_an_endpoint_is_followed_for_itself(exact: ExactPool) -> None:
    assert exact.pool.sample("llm_d_epp_kv_cache_events_active_subscribers") == 2
    first, second = prompt(), prompt()
    for rank, tokens in enumerate((first, second)):
        assert ask(exact, tokens, rank) == (0, 0)
        assert ask(exact, tokens, rank) == (320 - BLOCK, 320 - BLOCK)
    # The picker cannot say which rank serves: what one of them holds is promised, and never the sum.
    assert ask(exact, first, 1) == (320 - BLOCK, 0)
    assert ask(exact, first, 1) == (320 - BLOCK, 320 - BLOCK)
    # Full is full on one rank alone.
    for _ in range(4):
        assert ask(exact, prompt(), 1) == (0, 0)
    assert ask(exact, second, 1) == (0, 0)
    assert ask(exact, first, 0) == (320 - BLOCK, 320 - BLOCK)


def test_all_ranks_are_caught_up_with_by_a_new_picker(exact: ExactPool) -> None:
    known = [prompt(), prompt()]
    for rank, tokens in enumerate(known):
        ask(exact, tokens, rank)
    exact.kill_picker()
    for rank, tokens in enumerate(known):
        assert ask(exact, tokens, rank) == (320 - BLOCK, 320 - BLOCK)


def test_a_worker_has_the_memory_for_exact_caches_before_the_first_block(plane: str, tmp_path: Path) -> None:
    budget = 256 << 20
    settings = EXACT.format(backend="engine: {}").rstrip() + f"\n  parameters: {{budgetBytes: {budget}}}\n"
    with pool(plane, tmp_path, ["--engines", "1"], settings) as running:
        (worker,) = running.worker_pids()
        until(lambda: psutil.Process(worker).memory_info().rss > budget, why=running.said)
        assert running.sample("shoal_kv_ledger_blocks") == 0


def test_an_adapter_that_is_loaded_anew_under_its_name_empties_what_is_believed(
    exact: ExactPool, engine: EngineProcess
) -> None:
    tokens = prompt()
    assert ask(exact, tokens, 0, model="sql") == (0, 0)
    assert ask(exact, tokens, 0, model="sql") == (320 - BLOCK, 320 - BLOCK)
    path = f"/adapters/sql-{time.monotonic_ns()}"
    changed = {"lora_name": "sql", "lora_path": path, "load_inplace": True}
    told = exact.pool.said().count("sql was loaded anew")
    httpx.post(f"{engine.url}/v1/load_lora_adapter", json=changed).raise_for_status()
    until(lambda: exact.pool.said().count("sql was loaded anew") > told, 30.0, why=exact.pool.said)
    exact.settle()
    assert ask(exact, tokens, 0, model="sql") == (0, 0)
    assert ask(exact, tokens, 0, model="sql") == (320 - BLOCK, 320 - BLOCK)


@pytest.mark.only_plane("direct", "what engines tell reaches the workers of both alike")
@pytest.mark.parametrize("form", KvForm)
def test_every_form_of_events_is_followed_from_the_gpu_to_the_host_and_to_the_end(
    plane: str, form: KvForm, tmp_path: Path
) -> None:
    port, replay = free_port(), free_port()
    told = {"enable_kv_cache_events": True, "publisher": "zmq"}
    told |= {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay}"}
    shape = ["--blocks", "60", "--block-size", str(BLOCK), "--kv-events-format", form]
    # The oldest form has no word for another tier.
    has_host = form is not KvForm.VLLM_ARRAY_OLD
    shape += ["--host-blocks", "600"] if has_host else []
    shape += ["--kv-events-config", json.dumps(told)]
    with engines(tmp_path, shape) as (started,):
        kv = f"kv_events: {port}, kv_replay: {replay}"
        settings = f"backends: [{{url: '{started.url}', engine: shoal, {kv}}}]\n" + EXACT.format(backend="engine: {}")
        with pool(plane, tmp_path / "pool", [], settings) as running:
            made = ExactPool(running)
            made.wait_fresh()
            made.ask(COMPLETIONS, {"prompt": prompt()})
            first = prompt()
            assert ask(made, first, 0) == (0, 0)
            assert ask(made, first, 0) == (320 - BLOCK, 320 - BLOCK)
            for _ in range(4):
                assert ask(made, prompt(), 0) == (0, 0)
            kept = 320 - BLOCK if has_host else 0
            assert ask(made, first, 0) == (kept, kept)
            started.kill()
            started.start()
            started.listening()
            until(lambda: list(running.states().values()) == ["ready"], why=running.said)
            made.wait_fresh()
            made.ask(COMPLETIONS, {"prompt": prompt()})
            assert ask(made, first, 0) == (0, 0)
            assert main(["endpoint", "remove", started.address, "--run-dir", str(running.run_dir)]) == 0
            until(lambda: running.sample("shoal_kv_ledger_blocks") == 0, 1.0, why=running.said)
            assert running.sample("llm_d_epp_kv_cache_events_active_subscribers") == 0


def test_an_engine_behind_a_key_and_a_private_authority_is_asked_for_tokens(plane: str, tmp_path: Path) -> None:
    chain, key = make_certificate(tmp_path, "engine")
    (tmp_path / "key").write_text(f"{KEY}\n")
    flags = ["--api-key", KEY, "--tls-cert", chain, "--tls-key", key, "--kv-events-config", EVENTS]
    with engines(tmp_path, flags) as (guarded,):
        # As another engine than the embedded one it is asked over HTTP.
        backend = f"{{url: 'https://{guarded.address}', api_key_file: {tmp_path}/key, ca_file: {chain}, engine: vllm}}"
        settings = f"backends: [{backend}]\n" + EXACT.format(backend="engine: {}")
        with pool(plane, tmp_path / "pool", [], settings) as running:
            made = ExactPool(running)
            made.wait_fresh()
            body = {"messages": [{"role": "user", "content": "a long question " * 40}]}
            cold, warm = (made.ask("/v1/chat/completions", body) for _ in range(2))
            assert warm.is_exact
            assert (cold.cached, warm.predicted) == (0, warm.cached)
            assert warm.cached > 0
        with httpx.Client(verify=False) as client:
            asked = client.get(f"https://{guarded.address}/requests").json()
    shown = {each["path"]: dict(each["headers"]) for each in asked}
    for path in ("/v1/chat/completions/render", "/tokenize"):
        found = {name.lower(): value for name, value in shown[path].items()}
        assert found["authorization"] == f"Bearer {KEY}"
