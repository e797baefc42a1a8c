"""Requests that wait in the pool's own queue, under both data planes: served in turn, refused, dropped when left."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.hosts.supervisor.pool_rig import until
from tests.scenarios.pools import ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ONE_AT_A_TIME = """flow: {enabled: true}
---
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: concurrency-detector
  parameters: {maxConcurrency: 1}
- type: static-usage-limit-policy
flowControl:
  maxRequests: 4
  saturationDetector: {pluginRef: concurrency-detector}
  usageLimitPolicyPluginRef: static-usage-limit-policy
"""


@pytest.fixture
def crowded(tmp_path_factory: pytest.TempPathFactory, plane: str) -> Iterator[ScenarioPool]:
    with pool(plane, tmp_path_factory.mktemp("flow"), ("--engines", "1"), ONE_AT_A_TIME) as running:
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


def test_a_client_that_leaves_while_it_waits_costs_nobody_anything(crowded: ScenarioPool) -> None:
    busy = crowded.send("busy", "hello", 400)
    until(lambda: crowded.client.picture().inflight == 1, 30)
    waiting = crowded.send("left", "hello", 4)
    until(lambda: queued(crowded) == 1, 30)
    waiting.close()
    until(lambda: queued(crowded) == 0, 30)
    assert crowded.sample("llm_d_epp_flow_control_requests_total", outcome="EvictedContextCancelled") == 1
    busy.close()
    assert crowded.chat("hello", 4).status_code == 200
