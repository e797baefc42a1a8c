"""What the death of the picker costs, fail-open and fail-closed, and how load looks after its return.

Behind Envoy a picker carries nothing, so its streams go on.  A worker of the direct plane carries its own.
"""

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.hosts.supervisor.pool_rig import Pool, body, until
from tests.scenarios.engines import EngineProcess, backends, engines
from tests.scenarios.pools import ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """Four engines for both pools."""
    with engines(tmp_path_factory.mktemp("fleet"), [], [], [], []) as started:
        yield started


@pytest.fixture(scope="module")
def opened(plane: str, tmp_path_factory: pytest.TempPathFactory, fleet: list[EngineProcess]) -> Iterator[ScenarioPool]:
    """A pool with the default failure mode."""
    with pool(plane, tmp_path_factory.mktemp("open"), backends(fleet)) as running:
        until(lambda: list(running.states().values()) == ["ready"] * 4, why=running.said)
        yield running


class Running:
    """One stream in a thread, on a connection of its own; lines: what came so far."""

    def __init__(self, front: ScenarioPool, tokens: int) -> None:
        self.lines: list[str] = []
        self.headers = httpx.Headers()
        self._url = front.url
        self._tokens = tokens
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        until(lambda: len(self.lines) > 4)

    def _read(self) -> None:
        asked = body("stream", self._tokens, True)
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", f"{self._url}/v1/chat/completions", json=asked, timeout=60.0) as answer,
        ):
            self.headers = answer.headers
            for line in answer.iter_lines():
                self.lines.append(line)

    def ended_well(self) -> bool:
        """Wait for its end; whether it was whole."""
        self._thread.join()
        return "data: [DONE]" in self.lines


def kill_picker(front: ScenarioPool) -> int:
    """Kill the one worker; returns its pid."""
    (victim,) = front.worker_pids()
    os.kill(victim, signal.SIGKILL)
    return victim


def replaced(front: ScenarioPool, victim: int) -> None:
    """Wait until another worker is in its place and answers."""
    until(lambda: front.worker_pids() not in ([], [victim]), why=front.said)
    until(lambda: not front.client.picture().is_partial, why=front.said)


def passed(front: ScenarioPool) -> float:
    """Requests that Envoy let through without a picker."""
    return front.sample("shoal_envoy_watched_total", name="http.public.ext_proc.failure_mode_allowed")


@pytest.mark.only_plane("envoy", "the streams of a worker end with it")
def test_killing_the_picker_costs_no_stream_and_no_new_request(
    opened: ScenarioPool, fleet: list[EngineProcess]
) -> None:
    stream = Running(opened, 400)
    before = [len(engine.arrivals()) for engine in fleet]
    unrouted = passed(opened)
    victim = kill_picker(opened)
    statuses = Counter(opened.chat(f"meanwhile {turn}").status_code for turn in range(40))
    assert statuses == {200: 40}
    arrived = [len(engine.arrivals()) - was for engine, was in zip(fleet, before, strict=True)]
    # The stream keeps one engine busy, and the picker is soon back and spares it; the others share the rest.
    busy = stream.headers["x-shoal-endpoint"]
    assert all(count for engine, count in zip(fleet, arrived, strict=True) if engine.address != busy), arrived
    assert max(arrived) <= 20, arrived
    assert stream.ended_well()
    replaced(opened, victim)
    until(lambda: passed(opened) > unrouted, why=opened.said)
    routed = opened.client.picture().requests_total
    assert opened.chat("again").status_code == 200
    assert opened.client.picture().requests_total == routed + 1
    opened.idle()


@pytest.mark.only_plane("envoy", "the streams of a worker end with it, so nothing is at full load after it")
def test_a_picker_restarted_at_full_load_places_evenly_from_its_first_request(
    opened: ScenarioPool, fleet: list[EngineProcess]
) -> None:
    opened.idle()
    with ExitStack() as open_streams:
        for turn in range(24):
            open_streams.enter_context(opened.send(f"held-{turn}", f"held {turn}", 12_000))
        until(lambda: sum(engine.busy() for engine in fleet) == 24)
        replaced(opened, kill_picker(opened))
        for turn in range(24):
            open_streams.enter_context(opened.send(f"more-{turn}", f"more {turn}", 12_000))
        until(lambda: sum(engine.busy() for engine in fleet) == 48)
        load = [engine.busy() for engine in fleet]
    assert max(load) / 12 < 1.5, load
    until(lambda: sum(engine.busy() for engine in fleet) == 0)
    opened.idle()


@pytest.mark.only_plane("envoy", "without workers nobody is there to refuse: connections wait for the next one")
def test_closed_mode_refuses_new_requests_without_a_picker_and_cuts_no_stream(
    plane: str, tmp_path: Path, fleet: list[EngineProcess]
) -> None:
    with pool(plane, tmp_path, backends(fleet), "failure_mode: closed\n") as closed:
        stream = Running(closed, 400)
        victim = kill_picker(closed)
        answers: list[httpx.Response] = []
        while closed.client.picture().is_partial or not answers:
            answers.append(closed.chat("meanwhile"))
        refused = [answer for answer in answers if answer.status_code != 200]
        assert refused
        assert {answer.status_code for answer in refused} == {503}
        assert refused[0].json()["error"]["code"] == "picker_unavailable"
        assert refused[0].headers["retry-after"] == "1"
        assert stream.ended_well()
        replaced(closed, victim)
        until(lambda: closed.chat("again").status_code == 200, why=closed.said)


@pytest.mark.only_plane("direct", "behind Envoy a picker has no connections of clients")
def test_killing_the_only_worker_costs_its_streams_and_no_new_connection(
    opened: ScenarioPool, fleet: list[EngineProcess]
) -> None:
    stream = Running(opened, 4000)
    victim = kill_picker(opened)
    # Each on a connection of its own: those that come while there is no worker wait for the next one.
    statuses = Counter(Pool.chat(opened, f"meanwhile {turn}").status_code for turn in range(40))
    assert statuses == {200: 40}
    assert not stream.ended_well()
    replaced(opened, victim)
    # The engine hears that its client has gone.
    until(lambda: sum(engine.busy() for engine in fleet) == 0)
    opened.idle()


@pytest.mark.only_plane("direct", "behind Envoy a picker has no connections of clients")
def test_killing_one_of_two_workers_costs_only_its_own_streams(
    plane: str, tmp_path: Path, fleet: list[EngineProcess]
) -> None:
    with pool(plane, tmp_path, [*backends(fleet), "--workers", "2"]) as two:
        streams = [Running(two, 600) for _ in range(12)]
        first, second = two.client.picture().workers
        assert first.pid is not None
        assert first.inflight + second.inflight == 12
        assert min(first.inflight, second.inflight) > 0  # of twelve connections none: once in two thousand
        os.kill(first.pid, signal.SIGKILL)
        statuses = Counter(Pool.chat(two, f"meanwhile {turn}").status_code for turn in range(40))
        assert statuses == {200: 40}
        assert sum(stream.ended_well() for stream in streams) == second.inflight
        until(lambda: two.worker_pids()[:1] not in ([], [first.pid]), why=two.said)
        until(lambda: not two.client.picture().is_partial, why=two.said)
