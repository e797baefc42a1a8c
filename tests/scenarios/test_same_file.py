"""What flow control, agents and predictions do in virtual time they do through a real pool, with the same file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hosts.supervisor.pool_rig import body, until
from tests.scenarios.asks import CONFIGS, Ask, Told, as_a_crowd, in_virtual_time, order, refused, through
from tests.scenarios.backends import Backend, backend
from tests.scenarios.pools import ScenarioPool, pool

FLOW, AGENTS, LATENCY = CONFIGS / "flow.yaml", CONFIGS / "agents.yaml", CONFIGS / "latency.yaml"


@contextmanager
def gated(plane: str, directory: Path, config: Path, *behind: Backend) -> Iterator[ScenarioPool]:
    """A pool whose engines answer nothing yet."""
    for each in behind:
        each.close_gate()
    urls = [flag for each in behind for flag in ("--backend", each.url)]
    with pool(plane, directory, [*urls, "--config", str(config)]) as running:
        until(lambda: list(running.states().values()) == ["ready"] * len(behind), why=running.said)
        yield running


# ---------------------------------------------------------------------- flow control

_LOW, _HIGH = ({"x-llm-d-inference-objective": name} for name in ("low", "high"))
CROWD = [
    Ask("low-1", 0.001, headers=_LOW, output_tokens=100),
    Ask("low-2", 0.002, headers=_LOW),
    Ask("low-3", 0.003, headers=_LOW),
    Ask("high-1", 0.004, headers=_HIGH),
    Ask("low-4", 0.005, headers=_LOW),
]


def check_crowd(told: dict[str, Told]) -> None:
    assert order(told) == ["low-1", "high-1", "low-2", "low-3"]
    assert refused(told) == {"low-4": "rejected-saturated"}
    assert [told[name].explained["ahead"] for name in order(told)] == [0, 0, 0, 1]
    assert [told[name].explained["priority"] for name in order(told)] == [-1, 10, -1, -1]


def test_a_high_request_passes_low_ones_and_what_is_too_much_is_refused() -> None:
    check_crowd(in_virtual_time(FLOW, CROWD))


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_same_crowd_gets_the_same_from_a_running_pool(plane: str, tmp_path: Path) -> None:
    with backend() as slow, gated(plane, tmp_path, FLOW, slow) as running:
        check_crowd(as_a_crowd(running, CROWD, slow.open_gate))


# ---------------------------------------------------------------------- agents

PROGRAMS = [
    Ask("a-1", 0.001, "a", output_tokens=100),
    *[Ask(f"a-{number}", number * 0.001, "a") for number in (2, 3, 4)],
    Ask("b-1", 0.005, "b"),
    Ask("a-5", 0.006, "a", headers={"x-shoal-priority": "10"}),
]
AT_ONCE = [Ask("c-1", 0.001, "c", output_tokens=100), Ask("d-1", 0.002, "d", output_tokens=100)]
_OR_NOTHING = {"prefer": "if-available"}
LATER = [
    Ask("d-2", 20.0, "d"),
    Ask("c-2", 30.0, "c"),
    Ask("nowhere", 40.0, "e", headers=_OR_NOTHING, prompt="long", words=900),
    Ask("anywhere", 50.0, "e", prompt="long", words=900),
    Ask("there", 60.0, "f", headers=_OR_NOTHING, prompt="long", words=900),
]


def check_programs(told: dict[str, Told]) -> None:
    """What an agent says is urgent goes first, then the program that had nothing."""
    assert order(told) == ["a-1", "a-5", "b-1", "a-2", "a-3", "a-4"]
    assert told["a-5"].explained["priority"] == 10


def check_sessions(told: dict[str, Told]) -> None:
    served = {name: each.explained["chosen"][0] for name, each in told.items() if not each.refused}
    assert served["c-1"] != served["d-1"]
    assert (served["c-2"], served["d-2"]) == (served["c-1"], served["d-1"])
    assert refused(told) == {"nowhere": "precondition-failed"}
    assert served["there"] == served["anywhere"]


def test_programs_are_served_fairly_and_an_agents_word_counts() -> None:
    check_programs(in_virtual_time(AGENTS, PROGRAMS))


def test_sessions_return_to_their_engines_and_a_prefix_that_is_nowhere_is_not_made() -> None:
    check_sessions(in_virtual_time(AGENTS, [*AT_ONCE, *LATER], engines=2))


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_same_programs_get_the_same_from_a_running_pool(plane: str, tmp_path: Path) -> None:
    with backend() as slow, gated(plane, tmp_path, AGENTS, slow) as running:
        check_programs(as_a_crowd(running, PROGRAMS, slow.open_gate))


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_same_sessions_return_in_a_running_pool(plane: str, tmp_path: Path) -> None:
    with backend() as one, backend() as other, gated(plane, tmp_path, AGENTS, one, other) as running:

        def open_gates() -> None:
            one.open_gate()
            other.open_gate()

        told = as_a_crowd(running, AT_ONCE, open_gates)
        for ask in LATER:
            running.idle()
            told[ask.name] = through(running, ask)
        check_sessions(told)


# ---------------------------------------------------------------------- predicted latency

_AT_ONCE_MS, _IN_A_MINUTE_MS = ({"x-llm-d-slo-ttft-ms": value} for value in ("1", "60000"))
COLD = [Ask("untried", 2.0, headers=_LOW | _AT_ONCE_MS)]
LESSONS = [
    Ask(f"lesson-{number}", 30.0 + 2.0 * number, words=400 + 160 * (number * 7 % 13), output_tokens=8)
    for number in range(48)
]
WARM = [
    Ask("hopeless", 202.0, headers=_LOW | _AT_ONCE_MS),
    Ask("patient", 202.1, headers=_LOW | _IN_A_MINUTE_MS),
    Ask("normal", 202.2, headers=_AT_ONCE_MS),
]


def busy(name: str, at_s: float) -> Ask:
    """One that keeps the engine busy and a part of its cache full."""
    return Ask(name, at_s, words=2400, output_tokens=3000)


def check_predictions(told: dict[str, Told]) -> None:
    """Who asks for the impossible is refused, once predictions are trusted, and only of a negative priority."""
    assert refused(told) == {"hopeless": "rejected-not-admitted"}
    for name, is_trusted in (("untried", False), ("patient", True), ("normal", True)):
        explained = told[name].explained
        assert explained["is_prediction_trusted"] is is_trusted
        assert ("not trusted" in explained["profile"]) is not is_trusted
        assert all(each["predicted_ttft_s"] > 0.001 for each in explained["candidates"])


def test_what_no_engine_is_predicted_to_keep_is_refused_once_predictions_are_trusted() -> None:
    asks = [busy("before", 0.0), *COLD, *LESSONS, busy("after", 200.0), *WARM]
    told = in_virtual_time(LATENCY, asks)
    check_predictions({ask.name: told[ask.name] for ask in (*COLD, *WARM)})


@contextmanager
def kept_busy(running: ScenarioPool, name: str) -> Iterator[None]:
    """While an answer runs, and its share of the cache was read."""
    ask = busy(name, 0.0)
    asked = body(ask.text, ask.output_tokens, stream=True)
    with running.http.stream("POST", f"{running.url}/v1/chat/completions", json=asked, headers=ask.sent) as answer:
        next(answer.iter_raw())
        until(lambda: (running.client.picture().endpoints[0].kv_usage_ratio or 0.0) > 0.05, why=running.said)
        yield


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_same_is_refused_by_a_running_pool(plane: str, tmp_path: Path) -> None:
    with pool(plane, tmp_path, ["--engines", "1", "--config", str(LATENCY)]) as running:
        with kept_busy(running, "before"):
            told = {ask.name: through(running, ask) for ask in COLD}
        running.idle()
        for number in range(8):
            asks = [ask._replace(name=f"{ask.name}-{number}") for ask in LESSONS]
            learned = [through(running, ask, is_streaming=True) for ask in asks]
            if learned[-1].explained["is_prediction_trusted"]:
                break
        with kept_busy(running, "after"):
            told |= {ask.name: through(running, ask) for ask in WARM}
        check_predictions(told)
