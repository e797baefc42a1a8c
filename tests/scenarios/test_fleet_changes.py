"""The fleet and its configuration change while the pool runs, and nobody's request notices."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.cli import main
from tests.hosts.supervisor.pool_rig import until
from tests.scenarios.engines import EngineProcess, backends, engines
from tests.scenarios.pools import HEAD, ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """Two engines that are there from the start."""
    with engines(tmp_path_factory.mktemp("fleet"), [], []) as started:
        yield started


@pytest.fixture(scope="module")
def front(plane: str, tmp_path_factory: pytest.TempPathFactory, fleet: list[EngineProcess]) -> Iterator[ScenarioPool]:
    """A pool of two workers before them."""
    with pool(plane, tmp_path_factory.mktemp("front"), [*backends(fleet), "--workers", "2"], "") as running:
        until(lambda: list(running.states().values()) == ["ready"] * 2, why=running.said)
        until(lambda: len(running.worker_pids()) == 2 and not running.client.picture().is_partial, why=running.said)
        yield running


def verb(front: ScenarioPool, *words: str) -> int:
    """Run `shoal endpoint ...` on the pool."""
    return main(["endpoint", *words, "--run-dir", str(front.run_dir)])


def test_an_engine_that_is_still_loading_joins_when_it_is_ready_and_gets_nothing_before(
    front: ScenarioPool, tmp_path: Path
) -> None:
    with engines(tmp_path, ["--startup-delay", "3"]) as (late,):
        assert verb(front, "add", late.url) == 0
        until(lambda: front.states().get(late.address) == "loading", why=front.said)
        assert {front.chat(f"early {turn}").status_code for turn in range(10)} == {200}
        until(lambda: front.states()[late.address] == "ready", why=front.said)
        assert not [each for each in late.arrivals() if each["outcome"] != "200"]
        turns = iter(range(10_000))
        until(lambda: front.chat(f"later {next(turns)}").status_code == 200 and late.arrivals(), why=front.said)
        assert verb(front, "remove", late.address) == 0
        until(lambda: late.address not in front.states(), why=front.said)
        before = len(late.arrivals())
        assert {front.chat(f"removed {turn}").status_code for turn in range(10)} == {200}
        assert len(late.arrivals()) == before


def test_a_drain_waits_for_the_stream_in_flight_and_offers_nothing_new(
    front: ScenarioPool, fleet: list[EngineProcess]
) -> None:
    with front.send("drained", "keep me", 700) as stream, ThreadPoolExecutor(1) as thread:
        heard = stream.recv(65536)
        holder = next(engine for engine in fleet if engine.busy())
        drain = thread.submit(verb, front, "drain", holder.address)
        until(lambda: front.states().get(holder.address) == "draining", why=front.said)
        before = len(holder.arrivals())
        assert {front.chat(f"elsewhere {turn}").status_code for turn in range(10)} == {200}
        assert len(holder.arrivals()) == before
        assert not drain.done()
        while b"[DONE]" not in heard and (more := stream.recv(65536)):
            heard += more
        assert b"data: [DONE]" in heard
        assert drain.result() == 0
    assert holder.address not in front.states()
    assert verb(front, "add", holder.url) == 0
    until(lambda: list(front.states().values()) == ["ready"] * 2, why=front.said)


def test_a_reload_by_signal_keeps_books_index_and_streams(front: ScenarioPool) -> None:
    prompt = "remember this prefix " * 60
    for name in ("first", "second"):
        assert front.post({**_asked(prompt), "stream": False}, {"x-request-id": name}).status_code == 200
    front.idle()
    requests = front.client.picture().requests_total
    accepted = front.said().count("configuration accepted")
    with front.send("held", "over the reload", 600) as stream:
        heard = stream.recv(65536)
        os.kill(front.process.pid, signal.SIGHUP)
        until(lambda: front.said().count("configuration accepted") > accepted, why=front.said)
        assert front.client.picture().inflight == 1
        assert front.client.picture().requests_total == requests + 1
        while b"[DONE]" not in heard and (more := stream.recv(65536)):
            heard += more
        assert b"data: [DONE]" in heard
    assert front.sample("llm_d_epp_prefix_indexer_size") > 0
    hits = 0
    for turn in range(6):  # whichever worker takes it: both or at least one of them placed it before
        front.post({**_asked(prompt), "stream": False}, {"x-request-id": f"again-{turn}"})
        hits += max(each["matched_tokens"] for each in front.explained(f"again-{turn}")["candidates"]) > 200
    assert hits >= 3
    front.idle()


def _asked(prompt: str) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": 3}


def test_an_invalid_file_is_refused_and_the_old_configuration_goes_on(front: ScenarioPool) -> None:
    front.config.write_text(HEAD + "aliases: {friend: tiny}\n")
    until(lambda: front.post({**_asked("x"), "model": "friend"}).status_code == 200, why=front.said)
    refused = front.said().count("configuration refused")
    front.config.write_text(HEAD + "aliases: {friend: tiny}\nunknown_field: 1\n")
    until(lambda: front.said().count("configuration refused") > refused, why=front.said)
    assert "unknown_field" in front.said()
    os.kill(front.process.pid, signal.SIGHUP)
    until(lambda: front.said().count("configuration refused") > refused + 1, why=front.said)
    assert front.post({**_asked("x"), "model": "friend"}).status_code == 200
    assert front.sample("shoal_config_reloads_total", result="refused") >= 2


def test_a_request_that_either_worker_placed_is_explained_and_counted_as_by_one(
    front: ScenarioPool, capsys: pytest.CaptureFixture[str]
) -> None:
    # On connections of their own: the kernel shares these out, and all that a client keeps may be one worker's.
    names = [f"either-{turn}" for turn in range(20)]
    before = front.sample("llm_d_epp_request_total")
    with ThreadPoolExecutor(5) as threads:
        list(threads.map(lambda name: front.post(_asked(name), {"x-request-id": name, "connection": "close"}), names))
    pickers = set()
    for name in names:
        found = front.explained(name)
        pickers.add(found["picker"])
        assert front.client.explain(found["request_id"])["found"][0]["client_id"] == name
    assert pickers == {"0", "1"}
    until(lambda: front.sample("llm_d_epp_request_total") == before + len(names), why=front.said)
    capsys.readouterr()
    assert main(["status", "--json", "--run-dir", str(front.run_dir)]) == 0
    picture = json.loads(capsys.readouterr().out)
    assert len(picture["workers"]) == 2
    assert picture["requests_total"] == sum(worker["requests_total"] for worker in picture["workers"])


def test_status_warns_of_an_engine_without_a_metrics_page_and_says_what_to_do(
    front: ScenarioPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engines(tmp_path, ["--no-metrics"]) as (mute,):
        warning = f"the load of {mute.url} is not known: /metrics: HTTP 404; start SGLang with --enable-metrics"
        assert verb(front, "add", mute.url) == 0
        until(lambda: any(warning in each for each in front.client.picture().warnings), why=front.said)
        capsys.readouterr()
        assert main(["status", "--once", "--run-dir", str(front.run_dir)]) == 0
        assert f"! {warning}" in " ".join(capsys.readouterr().out.split())
        assert verb(front, "remove", mute.url) == 0
        until(lambda: not any(mute.url in each for each in front.client.picture().warnings), why=front.said)
