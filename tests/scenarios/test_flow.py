"""Requests that wait in the pool's own queue, under both data planes: served in turn, refused, dropped when left.

Also what becomes of them when the fleet grows from nothing or shrinks under load.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from shoal.cli import main
from tests.hosts.supervisor.pool_rig import body, until
from tests.measures.test_dashboard import WORDS, expressions
from tests.scenarios.backends import Backend, backend
from tests.scenarios.engines import EngineProcess, backends, engines
from tests.scenarios.pools import ONE_AT_A_TIME, ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FEW = f"flow: {{enabled: true}}\n{ONE_AT_A_TIME}  maxRequests: 4\n"


@pytest.fixture
def crowded(tmp_path_factory: pytest.TempPathFactory, plane: str) -> Iterator[ScenarioPool]:
    with pool(plane, tmp_path_factory.mktemp("flow"), ("--engines", "1"), FEW) as running:
        yield running


def queued(running: ScenarioPool) -> int:
    return int(running.admin("/snapshot").json()["flow"]["requests"])


def test_a_crowd_waits_and_is_served_and_what_is_too_much_is_told_when_to_come_back(crowded: ScenarioPool) -> None:
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda number: crowded.chat(f"hello {number}", 60, f"r{number}"), range(8)))
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200] * 5 + [429] * 3
    for answer in answers:
        if answer.status_code == 429:
            assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
            assert int(answer.headers["retry-after"]) >= 1
    waits = sorted(
        crowded.explained(f"r{number}")["queue_s"] for number, answer in enumerate(answers) if answer.is_success
    )
    assert waits[0] == 0.0
    assert waits[1] > 0.0
    assert crowded.sample("llm_d_epp_flow_control_requests_total", outcome="Dispatched") == 4
    assert crowded.sample("llm_d_epp_flow_control_requests_total", outcome="RejectedCapacity") == 3
    assert queued(crowded) == 0
    refused = next(number for number, answer in enumerate(answers) if answer.status_code == 429)
    (found,) = crowded.client.explain(f"r{refused}")["found"]
    assert (found["state"], found["reason"]) == ("refused", "rejected-saturated")
    assert found["ahead_by"] == [{"priority": 0, "tenant": "", "requests": 4}]
    (band,) = crowded.admin("/snapshot").json()["flow"]["bands"]
    assert band["wait_p95_s"] >= band["wait_p50_s"] > 0
    assert band["shares"][0]["share_ratio"] == 1.0
    assert band["shares"][0]["computed_tokens_per_s"] > 0


def test_what_the_dashboard_draws_is_on_the_metrics_page_of_a_pool_with_flow_control(crowded: ScenarioPool) -> None:
    busy = crowded.send("busy", "hello", 4000)
    until(lambda: crowded.client.picture().inflight == 1, 30)
    with ThreadPoolExecutor(1) as client:
        waits = client.submit(crowded.chat, "hello", 4)
        until(lambda: queued(crowded) == 1, 30)
        busy.close()
        assert waits.result(60).is_success
    crowded.idle()
    page = crowded.admin("/metrics").text
    families = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    asked = {name for expression in expressions() for name in WORDS.findall(expression)}
    assert {name for name in asked if not {name, re.sub("_(bucket|sum|count)$", "", name)} & families} == set()
    drawn = {line.split("{")[0] for line in page.splitlines() if not line.startswith("#")}
    assert {name for name in asked if "flow_control" in name or "tenant" in name} <= drawn


def test_a_client_that_leaves_while_it_waits_costs_nobody_anything(
    crowded: ScenarioPool, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = crowded.send("busy", "hello", 4000)
    until(lambda: crowded.client.picture().inflight == 1, 30)
    waiting = crowded.send("left", "hello", 4)
    until(lambda: queued(crowded) == 1, 30)
    (found,) = crowded.client.explain("left")["found"]
    assert (found["state"], found["ahead"], found["queue_s"] > 0) == ("waiting", 0, True)
    capsys.readouterr()
    assert main(["explain", "left", "--run-dir", str(crowded.run_dir)]) == 0
    assert "in band 0, place 1: nobody ahead" in capsys.readouterr().out
    assert main(["status", "--once", "--interval", "0.1", "--run-dir", str(crowded.run_dir)]) == 0
    assert "band 0: 1 wait, the first for" in capsys.readouterr().out
    waiting.close()
    until(lambda: queued(crowded) == 0, 30)
    (found,) = crowded.client.explain("left")["found"]
    assert (found["state"], found["reason"]) == ("refused", "rejected-context-cancelled")
    assert found["queue_s"] > 0
    assert crowded.sample("llm_d_epp_flow_control_requests_total", outcome="EvictedContextCancelled") == 1
    busy.close()
    assert crowded.chat("hello", 4).status_code == 200


def test_a_pool_scaled_to_zero_holds_a_request_shows_it_and_serves_it_when_an_engine_comes(
    plane: str, tmp_path: Path
) -> None:
    with (
        engines(tmp_path / "engines", []) as (engine,),
        pool(plane, tmp_path / "pool", backends([engine]), "flow: {enabled: true}\n") as running,
        ThreadPoolExecutor(1) as client,
    ):
        where = ["--run-dir", str(running.run_dir)]
        assert main(["endpoint", "remove", engine.address, *where]) == 0
        engine.kill()
        until(lambda: not running.states(), why=running.said)
        asked = client.submit(running.chat, "hello", 4, "early")
        until(lambda: queued(running) == 1, 30, why=running.said)
        assert running.sample("llm_d_epp_flow_control_queue_size") == 1
        assert running.sample("llm_d_epp_ready_endpoints") == 0
        engine.start()
        engine.listening()
        assert main(["endpoint", "add", engine.url, *where]) == 0
        assert asked.result(60).status_code == 200
        assert running.explained("early")["queue_s"] > 0
        assert queued(running) == 0


def test_scaling_down_under_load_costs_no_request(plane: str, tmp_path: Path) -> None:
    """The engine is drained, and killed as soon as that is done."""
    with (
        engines(tmp_path / "engines", [], []) as fleet,
        pool(plane, tmp_path / "pool", backends(fleet), "flow: {enabled: true}\n") as running,
        ThreadPoolExecutor(17) as clients,
    ):
        until(lambda: list(running.states().values()) == ["ready"] * 2, why=running.said)
        load = [clients.submit(running.chat, f"hello {number}", 150) for number in range(60)]
        until(lambda: fleet[0].busy() > 0, why=running.said)
        _scale_down(running, fleet[0])
        assert [each.result(120).status_code for each in load] == [200] * 60
        assert running.sample("shoal_response_cut_total") == 0


def _scale_down(running: ScenarioPool, engine: EngineProcess) -> None:
    assert main(["endpoint", "drain", engine.address, "--run-dir", str(running.run_dir)]) == 0
    assert engine.busy() == 0
    engine.kill()


def test_an_sdk_is_refused_before_it_gives_up_and_told_when_to_come_back(
    slow: Backend, plane: str, tmp_path: Path
) -> None:
    """Their own timeouts are longer here than what they say of them, so that no clock of the test decides."""
    with pool(plane, tmp_path, ("--backend", slow.url), FEW) as running, ThreadPoolExecutor(1) as client:
        first = client.submit(running.chat, "hello", 4)
        until(lambda: len(chats(slow)) == 1, 15, why=running.said)
        turn: Any = [{"role": "user", "content": "hello"}]
        with pytest.raises(openai.RateLimitError) as refused:
            running.openai.chat.completions.create(
                model="tiny", messages=turn, extra_headers={"x-stainless-read-timeout": "0.5"}
            )
        with pytest.raises(anthropic.RateLimitError) as turned_away:
            running.anthropic.messages.create(
                model="tiny", messages=turn, max_tokens=4, extra_headers={"x-stainless-timeout": "0.5"}
            )
        for headers in (refused.value.response.headers, turned_away.value.response.headers):
            assert headers["x-llm-d-request-dropped-reason"] == "rejected-ttl-expired"
            assert int(headers["retry-after"]) >= 1
        slow.open_gate()
        assert first.result(60).status_code == 200
        assert len(chats(slow)) == 1
        assert not [each for each in slow.seen if each.path == "/v1/messages"]
        assert queued(running) == 0


OBJECTIVES = "".join(
    f"---\napiVersion: llm-d.ai/v1alpha2\nkind: InferenceObjective\nmetadata: {{name: {name}}}\n"
    f"spec: {{priority: {priority}}}\n"
    for name, priority in (("high", 10), ("low", -1))
)


@pytest.fixture
def slow() -> Iterator[Backend]:
    """An engine that answers nothing until its gate is opened."""
    with backend() as running:
        running.close_gate()
        yield running


def ask(running: ScenarioPool, objective: str) -> tuple[int, str]:
    answer = running.post(body(f"of {objective}", 4), {"x-llm-d-inference-objective": objective})
    return answer.status_code, answer.headers.get("x-llm-d-request-dropped-reason", "")


def chats(seen_by: Backend) -> list[bytes]:
    """The bodies of the chat requests that reached it."""
    return [each.body for each in seen_by.seen if each.path == "/v1/chat/completions"]


@pytest.mark.parametrize("eviction", ["before-first-byte", "always"])
def test_a_low_request_that_runs_gives_way_to_a_high_one(
    slow: Backend, plane: str, eviction: str, tmp_path: Path
) -> None:
    """Envoy cannot give a request back: it goes on there, or ends with 429 where answers may be cut."""
    settings = FEW.replace("enabled: true", f"enabled: true, trust_headers: true, eviction: {eviction}")
    with (
        pool(plane, tmp_path, ("--backend", slow.url), settings + OBJECTIVES) as running,
        ThreadPoolExecutor(2) as clients,
    ):
        low = clients.submit(ask, running, "low")
        until(lambda: len(chats(slow)) == 1, 15, why=running.said)
        high = clients.submit(ask, running, "high")
        if plane == "envoy" and eviction == "before-first-byte":
            until(lambda: running.sample("shoal_evictions_total", result="kept") == 1, why=running.said)
            assert queued(running) == 1
            slow.open_gate()
            assert (low.result(60), high.result(60)) == ((200, ""), (200, ""))
            assert len(chats(slow)) == 2
            return
        until(lambda: len(chats(slow)) == 2, 15, why=running.said)
        assert b"of high" in chats(slow)[1]
        if plane == "envoy":
            assert low.result(60) == (429, "evicted-priority")
        else:
            assert running.sample("shoal_evictions_total", result="requeued") == 1
            assert not low.done()
        slow.open_gate()
        assert high.result(60) == (200, "")
        if plane == "direct":
            assert low.result(60) == (200, "")
            assert [b"of low" in each for each in chats(slow)] == [True, False, True]
        running.idle()


def test_an_answer_that_has_begun_is_cut_only_where_the_file_says_so(tmp_path: Path) -> None:
    """In the direct data plane, with an event that says why."""
    for eviction in ("before-first-byte", "always"):
        settings = FEW.replace("enabled: true", f"enabled: true, trust_headers: true, eviction: {eviction}")
        flags = ("--engines", "1")
        with (
            pool("direct", tmp_path / eviction[:6], flags, settings + OBJECTIVES) as running,
            ThreadPoolExecutor(1) as client,
        ):
            wish = {"x-llm-d-inference-objective": "low"}
            asked = body("hello", 300, stream=True)
            with running.http.stream("POST", f"{running.url}/v1/chat/completions", json=asked, headers=wish) as low:
                heard = low.iter_raw()
                begun = next(heard)
                high = client.submit(ask, running, "high")
                rest = begun
                with suppress(httpx.RemoteProtocolError):
                    for piece in heard:
                        rest += piece
            assert high.result(60) == (200, "")
            if eviction == "always":
                assert b"evicted" in rest
                assert b"[DONE]" not in rest
            else:
                assert b"[DONE]" in rest
            assert running.sample("shoal_evictions_total", result="requeued") == 0
            running.idle()
