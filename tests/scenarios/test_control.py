"""An operator's orders to engines and to requests while the pool runs: pause, resume, reset, new weights, abort."""

import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import msgspec
import pytest

from shoal.cli import main
from tests.hosts.supervisor.pool_rig import body, until
from tests.scenarios.engines import EngineProcess, backends, engines
from tests.scenarios.pools import ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LONG = 8_000
"""Tokens that take minutes."""
COMPLETE = b"data: [DONE]"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """Two engines."""
    with engines(tmp_path_factory.mktemp("fleet"), [], []) as started:
        yield started


@pytest.fixture(scope="module")
def front(plane: str, tmp_path_factory: pytest.TempPathFactory, fleet: list[EngineProcess]) -> Iterator[ScenarioPool]:
    """A pool of two workers before them."""
    with pool(plane, tmp_path_factory.mktemp("front"), [*backends(fleet), "--workers", "2"]) as running:
        ready(running)
        until(lambda: len(running.worker_pids()) == 2 and not running.client.picture().is_partial, why=running.said)
        yield running


def ready(front: ScenarioPool) -> None:
    until(lambda: list(front.states().values()) == ["ready"] * 2, why=front.said)


def verb(front: ScenarioPool, *words: str) -> int:
    """Run a verb on the pool."""
    return main([*words, "--run-dir", str(front.run_dir)])


def send(front: ScenarioPool, session: str, prompt: str, tokens: int, is_streaming: bool = True) -> socket.socket:
    """Send a chat request of a session."""
    url = httpx.URL(front.url)
    content = msgspec.json.encode(body(prompt, tokens, is_streaming))
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"x-session-id: {session}\r\nx-request-id: {session}\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection((url.host, url.port or 80), timeout=60.0)
    connection.sendall(head.encode() + content)
    return connection


def hear(connection: socket.socket, wanted: bytes = rb'"content":"[^"]') -> bytes:
    """Read until the answer says `wanted`, or ends."""
    heard = b""
    while not re.search(wanted, heard) and (more := read(connection)):
        heard += more
    return heard


def read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


def rest(connection: socket.socket) -> bytes:
    """Read to the end of the answer, or of the connection."""
    return hear(connection, re.escape(COMPLETE))


def busy(fleet: list[EngineProcess]) -> float:
    return sum(engine.busy() for engine in fleet)


def test_the_abort_of_a_session_ends_its_requests_at_client_and_engine_and_no_other(
    front: ScenarioPool, fleet: list[EngineProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["doomed", "doomed", "doomed", "spared"]
    streams = [send(front, name, f"{name} {turn}", LONG) for turn, name in enumerate(names)]
    try:
        assert all(hear(stream) for stream in streams)
        assert verb(front, "abort", "--session", "doomed") == 0
        assert capsys.readouterr().out == "ended 3 requests of session doomed\n"
        for stream in streams[:3]:
            assert COMPLETE not in rest(stream)
        until(lambda: busy(fleet) == 1, why=front.said)
        assert front.client.picture().inflight == 1
        assert hear(streams[3])
    finally:
        for stream in streams:
            stream.close()
    front.idle()
    assert front.sample("shoal_endpoint_failures_total") == 0
    assert {engine.arrivals()[-1]["outcome"] for engine in fleet} == {"left"}


def test_a_request_that_is_aborted_before_its_answer_gets_an_error_that_clients_do_not_try_again(
    front: ScenarioPool, fleet: list[EngineProcess]
) -> None:
    with closing(send(front, "early", "answered in minutes", LONG, is_streaming=False)) as connection:
        until(lambda: front.client.picture().inflight == 1 and busy(fleet) == 1, why=front.said)
        assert verb(front, "abort", "--session", "early") == 0
        answer = hear(connection, rb"\}\}")
    assert answer.startswith(b"HTTP/1.1 410 ")
    assert b'"code":"aborted"' in answer
    until(lambda: busy(fleet) == 0, why=front.said)
    front.idle()
    assert front.explained("early")["status"] == 410


def test_the_abort_of_a_session_without_requests_does_nothing(
    front: ScenarioPool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb(front, "abort", "--session", "nobody") == 0
    assert capsys.readouterr().out == "ended 0 requests of session nobody\n"


def test_a_paused_endpoint_gets_nothing_and_its_requests_go_on(front: ScenarioPool, fleet: list[EngineProcess]) -> None:
    with closing(send(front, "plain", "keep me", 300)) as stream:
        assert hear(stream)
        holder = next(engine for engine in fleet if engine.busy())
        assert verb(front, "endpoint", "pause", holder.address) == 0
        until(lambda: front.states()[holder.address] == "paused", why=front.said)
        before = len(holder.arrivals())
        assert {front.chat(f"elsewhere {turn}").status_code for turn in range(10)} == {200}
        assert len(holder.arrivals()) == before
        assert COMPLETE in rest(stream)
    assert verb(front, "endpoint", "resume", holder.address) == 0
    ready(front)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_the_mode_of_a_pause_says_what_becomes_of_running_requests(
    mode: str, front: ScenarioPool, fleet: list[EngineProcess]
) -> None:
    with closing(send(front, mode, f"paused by {mode}", 500)) as stream, ThreadPoolExecutor(1) as thread:
        assert hear(stream)
        holder = next(engine for engine in fleet if engine.busy())
        pause = thread.submit(verb, front, "endpoint", "pause", holder.address, "--mode", mode)
        if mode == "keep":
            assert pause.result() == 0
            assert holder.busy() == 1
            assert verb(front, "endpoint", "resume", holder.address) == 0
        heard = rest(stream)
        assert COMPLETE in heard
        assert (b'"finish_reason":"abort"' in heard) == (mode == "abort")
        assert pause.result() == 0
    before = len(holder.arrivals())
    if mode != "keep":
        assert front.states()[holder.address] == "paused"
        assert {front.chat(f"{mode} {turn}").status_code for turn in range(6)} == {200}
        assert len(holder.arrivals()) == before
        assert verb(front, "endpoint", "resume", holder.address) == 0
    ready(front)
    turns = iter(range(10_000))
    until(lambda: front.chat(f"{mode} again {next(turns)}").status_code == 200 and len(holder.arrivals()) > before)


def matched(front: ScenarioPool, name: str, prompt: str) -> float:
    """Send a prompt and return what the picker expected any endpoint to hold of it."""
    assert front.post(body(prompt, 3), {"x-request-id": name}).status_code == 200
    return max(each["matched_tokens"] for each in front.explained(name)["candidates"])


def warm(front: ScenarioPool, name: str, prompt: str) -> None:
    """Send a prompt until whichever worker takes it knows where it is."""
    turns = iter(range(10_000))
    known = 0
    while known < 4:
        known = known + 1 if matched(front, f"{name}-{next(turns)}", prompt) > 200 else 0


def test_after_a_reset_the_same_prompt_is_not_expected_in_a_cache(
    front: ScenarioPool, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "remember this prefix " * 60
    warm(front, "warm", prompt)
    capsys.readouterr()
    assert verb(front, "endpoint", "reset", "--all") == 0
    assert capsys.readouterr().out.count("its prefix cache is empty") == 2
    assert matched(front, "after-reset", prompt) == 0
    found = front.explained("after-reset")
    assert not found["cached_tokens"]


def test_a_cache_in_use_is_reset_only_when_running_requests_may_be_computed_anew(
    front: ScenarioPool, fleet: list[EngineProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(send(front, "running", "in use", LONG)) as stream:
        assert hear(stream)
        holder = next(engine for engine in fleet if engine.busy())
        capsys.readouterr()
        assert verb(front, "endpoint", "reset", holder.address) == 1
        assert "--running" in capsys.readouterr().err
        assert verb(front, "endpoint", "reset", holder.address, "--running") == 0
        assert hear(stream)
    front.idle()


def test_a_new_weight_version_empties_what_is_believed_of_a_cache(
    plane: str, front: ScenarioPool, fleet: list[EngineProcess]
) -> None:
    prompts = [f"of the old weights, part {part} " * 60 for part in range(5)]
    for part, prompt in enumerate(prompts):
        warm(front, f"weights-{part}", prompt)
    # Pools of other tests serve the same engines, and another try of this one must change something, too.
    version = f"step-{plane}-{time.monotonic_ns()}"
    for engine in fleet:
        httpx.post(f"{engine.url}/update_weight_version", json={"new_version": version}).raise_for_status()
    until(lambda: front.said().count(f"new={version}") == len(fleet), 60.0, why=front.said)
    # The workers hear a moment after the line; asking for a prompt makes it known again, so each is asked for once.
    for part, prompt in enumerate(prompts):
        if matched(front, f"new-weights-{part}", prompt) == 0:
            return
        time.sleep(0.5)
    pytest.fail("the old caches are still believed in")
