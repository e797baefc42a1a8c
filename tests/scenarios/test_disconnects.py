"""A client that leaves: the engine hears of it at once, and nothing of the request stays in the books."""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.hosts.supervisor.pool_rig import until
from tests.scenarios.engines import EngineProcess, backends, engines
from tests.scenarios.pools import ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LONG = 8_000
"""Tokens that take minutes."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine whose first token of a long prompt takes seconds."""
    with engines(tmp_path_factory.mktemp("engine"), ["--slow-factor", "3"]) as (started,):
        yield started


@pytest.fixture(scope="module")
def front(plane: str, tmp_path_factory: pytest.TempPathFactory, engine: EngineProcess) -> Iterator[ScenarioPool]:
    """The pool before it."""
    with pool(plane, tmp_path_factory.mktemp("front"), backends([engine])) as running:
        yield running


def hear_a_token(connection: socket.socket) -> None:
    """Read until the engine has said a word."""
    heard = b""
    while not re.search(rb'"content":"[^"]', heard):
        heard += connection.recv(65536)


@pytest.mark.parametrize(
    ("is_streaming", "is_begun"),
    [(True, False), (True, True), (False, False)],
    ids=["stream-before-its-first-token", "stream-after-its-first-token", "whole-answer"],
)
def test_a_client_that_leaves_stops_the_engine(
    is_streaming: bool, is_begun: bool, front: ScenarioPool, engine: EngineProcess
) -> None:
    name = f"leaves-{is_streaming}-{is_begun}"
    prompt = "begun" if is_begun else f"{name} {'long prompt ' * 4000}"
    with closing(front.send(name, prompt, LONG, is_streaming)) as connection:
        until(lambda: engine.busy() == 1)
        if is_begun:
            hear_a_token(connection)
        assert front.client.picture().inflight == 1
    left_at = time.monotonic()
    until(lambda: engine.busy() == 0, 30.0)
    # 1 s on a machine of one's own; the rest is room for a crowded one.  Left alone it would work on for minutes.
    assert time.monotonic() - left_at < 10.0
    assert engine.arrivals()[-1]["outcome"] == "left"
    front.idle()
    assert front.explained(name)["is_cut"] is False


def test_a_client_that_leaves_is_counted_and_is_no_failure_of_the_engine(
    front: ScenarioPool, engine: EngineProcess
) -> None:
    before = front.sample("shoal_client_gone_total")
    for turn in range(4):
        with closing(front.send(f"turn-{turn}", "hello", LONG)) as connection:
            hear_a_token(connection)
    front.idle()
    until(lambda: front.sample("shoal_client_gone_total") == before + 4, why=front.said)
    assert front.states()[engine.address] == "ready"
    assert front.sample("shoal_endpoint_failures_total") == 0
    assert front.sample("llm_d_epp_request_running") == 0
