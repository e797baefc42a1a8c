"""An engine that dies, hangs or fails while four of them are at work."""

import threading
import time
from collections.abc import Iterator
from itertools import count

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.hosts.supervisor.pool_rig import body, until
from tests.scenarios.engines import EngineProcess, backends, engines
from tests.scenarios.pools import ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LOST = (openai.APIError, httpx.TransportError)
"""A cut stream, as the official client tells it: the direct plane says so in a last event before it breaks off."""

SETTINGS = "ejection: {failures: 3, base_s: 2, max_s: 4}\n"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """Four engines."""
    with engines(tmp_path_factory.mktemp("fleet"), [], [], [], []) as started:
        yield started


@pytest.fixture(scope="module")
def four(plane: str, tmp_path_factory: pytest.TempPathFactory, fleet: list[EngineProcess]) -> Iterator[ScenarioPool]:
    """The pool before them."""
    with pool(plane, tmp_path_factory.mktemp("four"), backends(fleet), SETTINGS) as running:
        until(lambda: list(running.states().values()) == ["ready"] * 4, why=running.said)
        yield running


@pytest.fixture(autouse=True)
def whole_again(four: ScenarioPool, fleet: list[EngineProcess]) -> Iterator[None]:
    """Every test starts with four good engines that are all offered."""
    yield
    for engine in fleet:
        engine.heal()
    turns = count()
    until(lambda: four.chat(f"heal {next(turns)}") and list(four.states().values()) == ["ready"] * 4, 60.0, four.said)


class Streams:
    """Streams by the official client from several threads, until told to stop.

    whole, cut, refused: how they ended.  A stream counts as whole only when its last chunk and `[DONE]` came.
    """

    def __init__(self, four: ScenarioPool, threads: int = 8, tokens: int = 200) -> None:
        self.whole = 0
        self.cut: list[Exception] = []
        self.refused: list[openai.APIStatusError] = []
        self._four = four
        self._tokens = tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            finish: str | None = None
            try:
                stream = self._four.openai.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": f"{number} {turn}"}],
                    max_tokens=self._tokens,
                    stream=True,
                )
                for chunk in stream:
                    finish = chunk.choices[0].finish_reason or finish
            except openai.APIStatusError as error:
                self.refused.append(error)
            except LOST as error:
                assert finish is None
                self.cut.append(error)
            else:
                assert finish == "length"
                self.whole += 1


def test_an_engine_killed_mid_load_costs_only_the_streams_it_had_begun_and_returns_by_itself(
    four: ScenarioPool, fleet: list[EngineProcess]
) -> None:
    errors = four.sample("llm_d_epp_request_error_total", error_code="cut")
    with Streams(four) as load:
        until(lambda: load.whole > 4)
        begun = four.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "long"}], max_tokens=4000, stream=True
        )
        assert next(begun).choices
        victim = next(engine for engine in fleet if engine.address == begun.response.headers["x-shoal-endpoint"])
        victim.kill()
        with pytest.raises(LOST):
            list(begun)
        until(lambda: four.states()[victim.address] == "loading", why=four.said)
        sent = four.sample("shoal_endpoint_requests_total", endpoint_name=victim.address)
        mark = load.whole
        until(lambda: load.whole > mark + 16)
        assert four.sample("shoal_endpoint_requests_total", endpoint_name=victim.address) == sent
    assert load.refused == []
    assert len(load.cut) <= 8
    four.idle()
    assert four.sample("llm_d_epp_request_error_total", error_code="cut") == errors + 1 + len(load.cut)
    victim.start()
    victim.listening()
    with Streams(four) as load:
        until(lambda: victim.arrivals(), why=four.said)
    assert load.refused == load.cut == []


def test_a_stream_cut_in_the_middle_raises_in_the_official_client_and_has_no_done(
    four: ScenarioPool, fleet: list[EngineProcess]
) -> None:
    for engine in fleet:
        engine.fault(cut_after=5)
    stream = four.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "cut"}], max_tokens=40, stream=True
    )
    chunks: list[ChatCompletionChunk] = []
    with pytest.raises(LOST):
        chunks.extend(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert {chunk.choices[0].finish_reason for chunk in chunks} == {None}
    heard: list[bytes] = []
    with four.http.stream("POST", f"{four.url}/v1/chat/completions", json=body("cut", 40, True)) as raw:
        assert raw.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            heard.extend(raw.iter_raw())
    assert b"data: " in b"".join(heard)
    assert b"[DONE]" not in b"".join(heard)
    assert (b"engine was lost" in b"".join(heard)) is (four.plane == "direct")


def test_a_cut_answer_is_an_error_in_the_metrics_and_no_credit_to_the_engine(
    four: ScenarioPool, fleet: list[EngineProcess]
) -> None:
    for engine in fleet:
        engine.fault(cut_after=5)
    prompt = "credit " * 2000
    cut = four.sample("shoal_response_cut_total")
    headers = {"x-request-id": "cut-1"}
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{four.url}/v1/chat/completions", json=body(prompt, 40, True), headers=headers, timeout=60.0)
    explained = four.explained("cut-1")
    assert explained["is_cut"] is True
    assert four.sample("shoal_response_cut_total") == cut + 1
    assert four.sample("shoal_endpoint_failures_total", endpoint_name=explained["served"]) >= 1


def test_an_engine_that_answers_500_gets_next_to_no_traffic_until_it_recovers(
    four: ScenarioPool, fleet: list[EngineProcess]
) -> None:
    bad, turns = fleet[2], count()
    bad.fault(fail_rate=1.0)
    until(lambda: four.chat(f"a {next(turns)}") and four.states()[bad.address] == "ejected", why=four.said)
    before, began = len(bad.arrivals()), time.monotonic()
    statuses = [four.chat(f"b {turn}").status_code for turn in range(100)]
    probes = len(bad.arrivals()) - before
    assert statuses.count(200) == 100 - probes
    # Ejected for 2 s, then for 4 s each time: one request now and then finds out whether it is well again.
    assert probes <= 1 + (time.monotonic() - began) / 2
    bad.fault(fail_rate=0.0)
    until(lambda: four.chat(f"c {next(turns)}") and four.states()[bad.address] == "ready", why=four.said)


def test_an_engine_that_dies_before_its_head_is_replaced_without_the_client_noticing(
    four: ScenarioPool, fleet: list[EngineProcess]
) -> None:
    dying = fleet[3]
    failures = four.sample("shoal_endpoint_failures_total", endpoint_name=dying.address)
    retried = four.sample("shoal_request_retries_total")
    dying.fault(cut_after=0)
    assert [four.chat(f"dying {turn}").status_code for turn in range(24)] == [200] * 24
    four.idle()
    assert four.sample("shoal_request_retries_total") > retried
    assert four.sample("shoal_endpoint_failures_total", endpoint_name=dying.address) > failures


@pytest.mark.parametrize(("how", "tries"), [("header", 1), ("body", 1), ("not at all", 3)])
def test_a_request_that_refuses_retries_is_sent_once(
    how: str, tries: int, four: ScenarioPool, fleet: list[EngineProcess]
) -> None:
    for engine in fleet:
        engine.fault(fail_rate=1.0, fail_status=503)
    before = sum(len(engine.arrivals()) for engine in fleet)
    asked = {**body("once"), **({"disable_fallbacks": True} if how == "body" else {})}
    headers = {"x-shoal-no-retry": "true"} if how == "header" else {}
    once = httpx.post(f"{four.url}/v1/chat/completions", json=asked, headers=headers, timeout=60.0)
    assert once.status_code == 503
    assert "Injected failure" in once.text
    assert sum(len(engine.arrivals()) for engine in fleet) == before + tries
