"""Who a request belongs to, and what that gets it, through both data planes: keys decide, and no name in a header."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from shoal.hosts.keys import new_key
from tests.hosts.supervisor.pool_rig import body, until
from tests.scenarios.backends import Backend, backend
from tests.scenarios.pools import ONE_AT_A_TIME, ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TENANTS = """tenants:
  chat: {priority: 10, weight: 2}
  batch: {weight: 1}
  trial: {requests_per_s: 0.001, burst_requests: 1}
"""
NAMED = "x-llm-d-inference-fairness-id"


@pytest.fixture
def slow() -> Iterator[Backend]:
    """An engine that answers nothing until its gate is opened."""
    with backend() as running:
        running.close_gate()
        yield running


class Crowd:
    """Requests that come one after another and wait for one slow engine."""

    def __init__(self, running: ScenarioPool, clients: ThreadPoolExecutor) -> None:
        self._running = running
        self._clients = clients
        self._answers: list[Future[httpx.Response]] = []

    def come(self, name: str, headers: dict[str, str]) -> None:
        """Send a request and wait until it runs, or stands in the queue."""
        self._answers.append(self._clients.submit(self._running.post, body(f"of {name}", 4), headers))
        until(lambda: self.here() == len(self._answers), 30, why=self._running.said)

    def here(self) -> int:
        """How many run or wait."""
        snapshot = self._running.admin("/snapshot").json()
        return int(snapshot["flow"]["requests"]) + int(snapshot["inflight"])

    def statuses(self) -> list[int]:
        """What became of them, in the order in which they came."""
        return [answer.result(60).status_code for answer in self._answers]


def served(slow: Backend) -> list[str]:
    """Whose requests reached the engine, in order."""
    asked = [each.body.decode() for each in slow.seen if each.path == "/v1/chat/completions"]
    return [each.split("of ")[1].split('"')[0] for each in asked]


def test_a_keys_owner_is_the_tenant_whatever_its_headers_claim(slow: Backend, plane: str, tmp_path: Path) -> None:
    keys = {}
    lines = []
    for name in ("chat", "batch", "trial"):
        secret, line = new_key(name)
        keys[name] = {"authorization": f"Bearer {secret}"}
        lines.append(line)
    (tmp_path / "keys").write_text("\n".join(lines) + "\n")
    settings = f"auth: {{keys_file: {tmp_path}/keys}}\nflow: {{enabled: true}}\n{TENANTS}{ONE_AT_A_TIME}"
    with (
        pool(plane, tmp_path / "pool", ("--backend", slow.url), settings) as running,
        ThreadPoolExecutor(8) as clients,
    ):
        crowd = Crowd(running, clients)
        claim = {NAMED: "chat", "x-llm-d-inference-objective": "chat"}
        crowd.come("batch-1", keys["batch"])
        crowd.come("batch-2", keys["batch"] | claim)
        crowd.come("batch-3", keys["batch"] | {NAMED: "invented"})
        crowd.come("trial-1", keys["trial"] | {NAMED: "batch"})
        crowd.come("chat-1", keys["chat"] | {NAMED: "batch"})
        assert running.sample("llm_d_epp_flow_control_queue_size", fairness_id="batch") == 2
        assert running.sample("llm_d_epp_flow_control_queue_size", fairness_id="chat", priority="10") == 1
        over = running.post(body("of trial-2", 4), keys["trial"] | claim)
        assert over.status_code == 429
        assert over.headers["x-llm-d-request-dropped-reason"] == "rejected-over-budget"
        assert int(over.headers["retry-after"]) > 60
        assert running.post(body("of nobody", 4), claim).status_code == 401
        slow.open_gate()
        assert crowd.statuses() == [200] * 5
        # The priority first, then who has had least, and the requests of one tenant as they came.
        assert served(slow) == ["batch-1", "chat-1", "trial-1", "batch-2", "batch-3"]
        running.idle()
        used = {
            name: running.sample("shoal_tenant_tokens_total", fairness_id=name, kind="prompt")
            for name in ("batch", "chat", "trial", "invented")
        }
        assert used["batch"] > used["chat"] > 0
        assert used["chat"] == used["trial"]
        assert used["invented"] == 0
        assert "sk-" not in running.said()


@pytest.mark.parametrize(
    ("flow", "order"),
    [
        ("flow: {enabled: true}\n", ["run", "plain-1", "plain-2", "made-1", "made-2"]),
        ("flow: {enabled: true, trust_headers: true}\n", ["run", "made-1", "made-2", "plain-1", "plain-2"]),
    ],
    ids=["without trust", "with trust"],
)
def test_without_keys_an_invented_name_has_a_turn_of_its_own_only_where_headers_are_trusted(
    slow: Backend, plane: str, tmp_path: Path, flow: str, order: list[str]
) -> None:
    with (
        pool(plane, tmp_path, ("--backend", slow.url), flow + ONE_AT_A_TIME) as running,
        ThreadPoolExecutor(8) as clients,
    ):
        crowd = Crowd(running, clients)
        for name in ("run", "plain-1", "plain-2"):
            crowd.come(name, {})
        for name in ("made-1", "made-2"):
            crowd.come(name, {NAMED: name})
        slow.open_gate()
        assert crowd.statuses() == [200] * 5
        assert served(slow) == order
