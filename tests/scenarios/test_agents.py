"""Predicted latency and what agents say, through a real pool in both data planes."""

from collections.abc import Iterator

import pytest

from tests.hosts.supervisor.pool_rig import body, until
from tests.scenarios.pools import ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SETTINGS = """\
agents: {trust_hints: true}
---
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: latency-scorer
- type: agent-identity
  parameters: {additionalSessionHeaders: [x-my-agent]}
"""


@pytest.fixture(scope="module")
def front(plane: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScenarioPool]:
    """A pool of two engines."""
    with pool(plane, tmp_path_factory.mktemp("agents"), ["--engines", "2"], SETTINGS) as running:
        yield running


def long(word: str) -> str:
    return f"{word} " * 900


def test_a_stream_is_predicted_and_compared_with_what_was_measured(front: ScenarioPool) -> None:
    for number in range(3):
        with front.http.stream(
            "POST",
            f"{front.url}/v1/chat/completions",
            json=body(long(f"p{number}"), 8, stream=True),
            headers={"x-request-id": f"predicted-{number}", "x-llm-d-slo-ttft-ms": "0.001"},
        ) as answer:
            assert answer.status_code == 200
            answer.read()
    explained = front.explained("predicted-2")
    assert explained["predicted_ttft_s"] > 0
    assert explained["ttft_s"] > 0
    assert all(each["predicted_ttft_s"] > 0 for each in explained["candidates"])
    until(lambda: front.sample("llm_d_epp_request_slo_violation_total", type="ttft") >= 3, why=front.said)
    assert front.sample("llm_d_epp_request_predicted_ttft_seconds_count") >= 3


def test_a_client_that_wants_its_prefix_or_nothing_gets_412_where_it_is_nowhere(front: ScenarioPool) -> None:
    wish = {"prefer": "if-available"}
    refused = front.post(body(long("nobody-has-this"), 4), wish)
    assert refused.status_code == 412
    assert refused.json()["error"]["code"] == "precondition_failed"
    assert front.post(body(long("somebody-has-this"), 4)).status_code == 200
    assert front.post(body(long("somebody-has-this"), 4), wish).status_code == 200


def test_a_preference_counts_in_whichever_of_two_fields_of_that_name_it_stands(front: ScenarioPool) -> None:
    for values in (("if-available", "return=minimal"), ("return=minimal", "if-available")):
        fields = [("prefer", value) for value in values]
        asked = body(long(f"nobody has this {values[0]}"), 4)
        refused = front.http.post(f"{front.url}/v1/chat/completions", json=asked, headers=fields)
        assert refused.status_code == 412


def test_a_session_that_calls_a_tool_comes_back_to_its_engine(front: ScenarioPool) -> None:
    for number in range(4):
        agent = {"x-my-agent": f"agent-{number}"}
        went = {"x-request-id": f"went-{number}", "x-shoal-returns-within-ms": "60000", **agent}
        assert front.post(body(long(f"turn-{number}"), 4), went).status_code == 200
        first = front.explained(f"went-{number}")["served"]
        front.idle()
        back = {"x-request-id": f"back-{number}", **agent}
        assert front.post(body(long(f"other-{number}"), 4), back).status_code == 200
        assert front.explained(f"back-{number}")["served"] == first
