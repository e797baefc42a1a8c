"""What a pool writes down: journals that replay, traces that arrive, and prompts that are in none of it."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.cli import main
from shoal.routing import Forward
from shoal.routing.journal import MAGIC, Step, encode, read
from tests.hosts.supervisor.pool_rig import body, until
from tests.scenarios.engines import EngineProcess, engines
from tests.scenarios.pools import HEAD, ScenarioPool, pool
from tests.scenarios.traces import Receiver, receiver

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CANARY = "melodious-canary-at-midnight"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    """Where traces go."""
    with receiver() as running:
        yield running


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """Two engines, and one that comes later."""
    with engines(tmp_path_factory.mktemp("fleet"), [], [], []) as started:
        yield started


@pytest.fixture(scope="module")
def written(
    plane: str, tmp_path_factory: pytest.TempPathFactory, fleet: list[EngineProcess], collector: Receiver
) -> Iterator[ScenarioPool]:
    """A pool that writes everything down, with two workers."""
    folder = tmp_path_factory.mktemp("written")
    settings = settings_of(folder, collector)
    flags = ["--backend", fleet[0].url, "--backend", fleet[1].url, "--workers", "2", "--log-level", "debug"]
    with pool(plane, folder, flags, settings) as running:
        yield running


def settings_of(folder: Path, collector: Receiver, usage: str = "observe") -> str:
    """The configuration with journal and traces."""
    return (
        f"journal: {{path: {folder}/journal}}\nusage: {usage}\n"
        f"tracing: {{otlp_endpoint: '{collector.url}', sample_ratio: 1.0}}\n"
    )


def journals(written: ScenarioPool) -> list[Path]:
    """The journal files."""
    return sorted((written.log.parent / "journal").glob("*.journal"))


def everything_said(written: ScenarioPool, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """All that the pool shows or writes, by where it stands."""
    flags = ["--run-dir", str(written.run_dir)]
    capsys.readouterr()
    main(["explain", "canary", *flags])
    main(["explain", "canary", "--json", *flags])
    main(["status", "--once", *flags])
    shown = capsys.readouterr()
    files = {
        str(path): path.read_bytes().decode("latin-1")
        for path in written.log.parent.rglob("*")
        if path.is_file() and path != written.log
    }
    return {
        "logs": written.said(),
        "verbs": shown.out + shown.err,
        "metrics": written.admin("/metrics").text,
        "snapshot": written.client.snapshot_json().decode(),
        "explanation": json.dumps(written.client.explain("canary")),
        **files,
    }


def test_a_prompt_is_in_no_log_journal_metric_status_explanation_or_trace(
    written: ScenarioPool, collector: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": CANARY, "parameters": {}}}]
    message = {"role": "user", "content": CANARY * 40, "name": "x"}
    asked: dict[str, Any] = {**body(CANARY), "messages": [message], "tools": tools, "user": CANARY}
    assert written.post(asked, {"x-request-id": "canary"}).status_code == 200
    for path in ("/v1/completions", "/v1/embeddings", "/tokenize", "/v1/responses", "/v1/messages"):
        written.post({**asked, "prompt": CANARY, "input": CANARY, "system": CANARY}, path=path)
    broken = f'{{"model": "tiny", "messages": "{CANARY}'.encode()
    assert written.http.post(f"{written.url}/v1/chat/completions", content=broken).status_code == 400
    assert written.post({"model": "tiny", "messages": {CANARY: 1}}).status_code in (400, 200)
    with written.send("canary-left", CANARY * 200, 4000) as connection:
        connection.recv(100)
    written.idle()
    until(lambda: "gateway.request" in {name for name, _ in collector.spans()}, why=written.said)
    for where, text in everything_said(written, capsys).items():
        assert CANARY not in text, where
    assert CANARY not in str([body.decode("latin-1") for body in collector.bodies])
    assert journals(written)


def test_spans_of_a_request_join_the_clients_trace(written: ScenarioPool, collector: Receiver) -> None:
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "traced"}
    assert written.post(body("traced"), headers).status_code == 200
    until(lambda: TRACE in collector.trace_ids(), why=written.said)
    assert {"gateway.request", "queue", "decision", "forward"} <= {name for name, _ in collector.spans()}
    (request,) = [values for name, values in collector.spans() if "traced" in values.get("gen_ai.request.id", "")]
    assert "tiny" in request["gen_ai.request.model"]


def test_a_journal_of_load_reload_and_fleet_changes_replays_command_by_command(
    written: ScenarioPool, fleet: list[EngineProcess], collector: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--run-dir", str(written.run_dir)]

    def turn(number: int) -> int:
        return written.chat(f"session {number % 5} " * 40 + str(number)).status_code

    with ThreadPoolExecutor(8) as threads:
        first = [threads.submit(turn, number) for number in range(40)]
        assert main(["endpoint", "add", fleet[2].url, *flags]) == 0
        accepted = written.said().count("configuration accepted")
        written.config.write_text(HEAD + settings_of(written.log.parent, collector, usage="inject"))
        until(lambda: written.said().count("configuration accepted") > accepted, why=written.said)
        until(lambda: written.states().get(fleet[2].address) == "ready", why=written.said)
        second = [threads.submit(turn, number) for number in range(40)]
        assert main(["endpoint", "drain", fleet[0].url.removeprefix("http://"), *flags]) == 0
        third = [threads.submit(turn, number) for number in range(20)]
        assert {each.result() for each in first + second + third} == {200}
    with written.send("left", "left", 4000) as connection:
        connection.recv(100)
    written.idle()
    for pid in written.worker_pids():
        os.kill(pid, signal.SIGTERM)  # its last words are on the disk when it has ended
    until(lambda: len(journals(written)) == 4 and not written.client.picture().is_partial, why=written.said)
    capsys.readouterr()
    for path in journals(written)[:]:
        assert main(["replay", str(path)]) == 0, path
        assert "every command the same" in capsys.readouterr().out
    assert sum(path.stat().st_size for path in journals(written)) > 20_000


def test_a_journal_with_another_choice_in_it_is_told_apart(
    written: ScenarioPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = max(journals(written), key=lambda each: each.stat().st_size)
    opening, steps = read(path.read_bytes())
    changed = tmp_path / path.name
    with changed.open("wb") as file:
        file.write(MAGIC + encode(opening))
        for step in steps:
            commands = [
                msgspec.structs.replace(command, endpoints=command.endpoints[::-1])
                if isinstance(command, Forward)
                else command
                for command in step.commands
            ]
            file.write(encode(Step(step.now, step.event, commands)))
    assert main(["replay", str(changed)]) == 1
    assert "differs" in capsys.readouterr().out


def test_an_id_that_is_no_utf8_costs_nobody_a_record(written: ScenarioPool) -> None:
    asked, url = body("hello there", 4), f"{written.url}/v1/chat/completions"
    assert written.http.post(url, json=asked, headers=[(b"x-request-id", b"odd-\xff\xfe")]).status_code == 200
    assert written.post(asked, {"x-request-id": "even"}).status_code == 200
    assert [written.explained(name)["status"] for name in ("odd-\xff\xfe", "even")] == [200, 200]
