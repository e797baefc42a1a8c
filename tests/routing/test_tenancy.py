"""How long a request may wait for its client's sake: what clients say, and what the official ones say by themselves."""

import math

import anthropic
import openai
import pytest

from shoal.pool import Request
from shoal.routing.tenancy import DEADLINE_HEADERS, wait_limit_s
from shoal.wire.headers import read_headers
from tests.scenarios.backends import backend


def limit_s(headers: dict[str, str]) -> float:
    """As a pool with flow control reads them."""
    return wait_limit_s(Request(id="r", headers=read_headers(headers, DEADLINE_HEADERS).kept))


@pytest.mark.parametrize(
    ("headers", "expected_s"),
    [
        ({}, math.inf),
        ({"x-shoal-max-wait-ms": "1500"}, 1.5),
        ({"x-stainless-timeout": "600"}, 599.0),
        ({"x-stainless-read-timeout": "600.0"}, 599.0),
        ({"x-stainless-timeout": "2"}, 1.8),
        ({"x-stainless-read-timeout": "5", "x-stainless-timeout": "2"}, 1.8),
        ({"x-stainless-read-timeout": "2", "x-stainless-timeout": "5"}, 1.8),
        ({"x-stainless-timeout": "60", "x-shoal-max-wait-ms": "1500"}, 1.5),
        ({"x-stainless-timeout": "1", "x-shoal-max-wait-ms": "1500"}, 0.9),
    ],
)
def test_the_shortest_time_that_a_client_states_bounds_its_wait(headers: dict[str, str], expected_s: float) -> None:
    assert limit_s(headers) == pytest.approx(expected_s)


@pytest.mark.parametrize("value", ["0", "-5", "nan", "inf", "1e400", "soon", "None", "9" * 30, "NOT_GIVEN"])
def test_a_timeout_that_makes_no_sense_says_nothing(value: str) -> None:
    assert limit_s(dict.fromkeys(DEADLINE_HEADERS, value)) == math.inf


def test_the_official_clients_say_by_themselves_when_they_give_up() -> None:
    with backend() as server:
        for timeout_s, expected_s in ((30.0, 29.0), (4.0, 3.6)):
            asked = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", timeout=timeout_s, max_retries=0) as client:
                client.post("/chat/completions", body=asked, cast_to=object)
            with anthropic.Anthropic(base_url=server.url, api_key="k", timeout=timeout_s, max_retries=0) as other:
                other.post("/v1/messages", body={**asked, "max_tokens": 4}, cast_to=object)
            for seen in (server.seen[-2], server.seen[-1]):
                assert limit_s(dict(seen.headers)) == pytest.approx(expected_s)
