"""Configurations of inference-perf are played as it plays them: as much, as fast, and what its prompts share."""

from typing import Any

import numpy as np
import pytest
import yaml

from shoal.kernel import InvalidInput
from shoal.simulation import Session, Turn
from shoal.simulation.inferenceperf import Distribution, read_perf

SHARED: dict[str, Any] = {
    "data": {
        "type": "shared_prefix",
        "shared_prefix": {
            "num_groups": 4,
            "num_prompts_per_group": 3,
            "system_prompt_len": 640,
            "question_len": 160,
            "output_len": 32,
        },
    },
    "load": {"type": "poisson", "stages": [{"rate": 2, "duration": 9}, {"rate": 4, "duration": 9}]},
    "server": {"type": "vllm", "base_url": "http://0.0.0.0:8000"},
}
REPLAY: dict[str, Any] = {
    "data": {
        "type": "conversation_replay",
        "conversation_replay": {
            "seed": 42,
            "num_conversations": 3,
            "shared_system_prompt_len": 800,
            "dynamic_system_prompt_len": {"type": "fixed", "mean": 320},
            "turns_per_conversation": {"type": "fixed", "mean": 4},
            "input_tokens_per_turn": {"type": "fixed", "mean": 160},
            "output_tokens_per_turn": {"type": "lognormal", "min": 16, "max": 64, "mean": 32, "std_dev": 16},
            "tool_call_latency_sec": {"type": "uniform", "min": 1, "max": 3},
        },
    },
    "load": {"type": "concurrent", "stages": [{"num_requests": 18, "concurrency_level": 5}]},
}


def make(document: dict[str, Any], stage: int = 0) -> list[Session]:
    recipe, _ = read_perf(yaml.safe_dump(document), stage)
    return recipe.make(np.random.default_rng(1))


def turns(session: Session) -> list[Turn]:
    return [turn for turn in session.turns() if isinstance(turn, Turn)]


def shared(one: Turn, two: Turn) -> int:
    return 16 * int(sum(a == b for a, b in zip(one.prompt.chain, two.prompt.chain, strict=False)))


def with_data(document: dict[str, Any], **changed: Any) -> dict[str, Any]:
    kind = document["data"]["type"]
    return document | {"data": {"type": kind, kind: document["data"][kind] | changed}}


def test_a_stage_of_shared_prefixes_sends_rate_times_duration_requests() -> None:
    _, first = read_perf(yaml.safe_dump(SHARED))
    _, second = read_perf(yaml.safe_dump(SHARED), 1)
    assert (first.kind, first.rate_per_s, second.rate_per_s) == ("poisson", 2.0, 4.0)
    sessions = make(SHARED)
    assert len(sessions) == 18
    asked = [turns(session)[0] for session in sessions]
    assert {(turn.prompt.tokens, turn.output_tokens, turn.max_tokens) for turn in asked} == {(800, 32, 32)}
    # 12 prompts, then the first ones again.
    assert [shared(asked[n], asked[n + 12]) for n in range(6)] == [800] * 6
    kinds = [sum(shared(one, two) >= 640 for two in asked[:12]) for one in asked[:12]]
    assert kinds == [3] * 12


def test_turns_of_shared_prefixes_follow_their_answers_and_the_pace_of_the_load() -> None:
    sessions = make(with_data(SHARED, enable_multi_turn_chat=True), 1)
    assert sum(len(turns(session)) for session in sessions) == 36
    first, second, third = turns(sessions[0])
    assert second.prompt.tokens == 800 + 32 + 160
    assert shared(first, second) == 800
    assert (second.at_s, third.at_s) == (3.0, 6.0)


def test_conversations_grow_pause_for_tools_and_begin_again() -> None:
    _, arrivals = read_perf(yaml.safe_dump(REPLAY))
    assert (arrivals.kind, arrivals.concurrency) == ("closed", 5)
    sessions = make(REPLAY)
    assert [len(turns(session)) for session in sessions] == [4, 4, 4, 4, 2]
    first, second, *_ = turns(sessions[0])
    assert first.prompt.tokens == 800 + 320 + 160
    assert second.prompt.tokens == first.prompt.tokens + first.output_tokens + 160
    assert first.think_s == 0.0
    assert 1.0 <= second.think_s <= 3.0
    other, again = turns(sessions[1])[0], turns(sessions[3])
    assert shared(first, other) == 800
    assert shared(first, again[0]) == 1280
    assert shared(second, again[1]) == 1280  # the answer is another one


def test_a_conversation_ends_at_the_longest_context() -> None:
    lengths = [len(turns(session)) for session in make(with_data(REPLAY, max_model_len=1600))]
    assert set(lengths) == {2}


@pytest.mark.parametrize(
    ("kind", "mean", "deviation"),
    [("normal", 100, 20), ("lognormal", 100, 80), ("uniform", 500, 289), ("poisson", 100, 10)],
)
def test_distributions_have_their_mean_and_deviation_and_stay_within_bounds(
    kind: Any, mean: float, deviation: float
) -> None:
    rng = np.random.default_rng(1)
    spec = Distribution(type=kind, min=0, max=1000, mean=mean, std_dev=deviation)
    drawn = np.array([spec.draw(rng) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(mean, rel=0.03)
    assert drawn.std() == pytest.approx(deviation, rel=0.06)
    narrow = Distribution(type=kind, min=90, max=110, mean=100, std_dev=80)
    assert all(90 <= narrow.draw(rng) <= 110 for _ in range(1000))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"data": {"type": "shareGPT"}}, "shareGPT"),
        ({"load": {"type": "trace_replay", "stages": [{}]}}, "trace_replay"),
        ({"load": {"type": "constant", "stages": []}}, "at least one stage"),
        ({"load": {"type": "constant", "stages": [{"rate": 1}]}}, "duration"),
        ({"load": {"type": "concurrent", "stages": [{"rate": 1, "duration": 3}]}}, "concurrency_level"),
        ({"data": {"type": "shared_prefix", "shared_prefix": {"groups": 3}}}, "groups"),
        ({"data": {"type": "shared_prefix", "shared_prefix": {"question_len": {"min": 5, "max": 3}}}}, "min is 5"),
        (
            {"data": {"type": "shared_prefix", "shared_prefix": {"question_len": {"type": "skew_normal"}}}},
            "skew_normal",
        ),
        ({"data": None}, "not a configuration"),
    ],
)
def test_what_cannot_be_played_is_named(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        read_perf(yaml.safe_dump(SHARED | changed))


def test_a_stage_that_is_not_there_and_a_broken_file_are_named() -> None:
    with pytest.raises(InvalidInput, match="2 stages"):
        read_perf(yaml.safe_dump(SHARED), 2)
    with pytest.raises(InvalidInput, match="not a configuration"):
        read_perf("a: [")
    with pytest.raises(InvalidInput, match="concurrent"):
        read_perf(yaml.safe_dump(REPLAY | {"load": {"type": "poisson", "stages": [{"rate": 1, "duration": 3}]}}))


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -1, 4_000_001])
@pytest.mark.parametrize("name", ["min", "max", "mean", "std_dev"])
def test_lengths_that_no_prompt_has_are_refused(name: str, figure: float) -> None:
    with pytest.raises(InvalidInput, match=rf"{name}(: must be a finite number| must be 0 to 4,000,000)"):
        make(with_data(REPLAY, input_tokens_per_turn={"type": "normal", name: figure}))


@pytest.mark.parametrize(
    ("document", "stage"),
    [
        (SHARED, {"rate": float("inf"), "duration": 9}),
        (SHARED, {"rate": 2, "duration": float("nan")}),
        (SHARED, {"rate": 1e200, "duration": 1e200}),
        (REPLAY, {"concurrency_level": -1, "num_requests": 5}),
        (REPLAY, {"concurrency_level": 1, "num_requests": -5}),
    ],
)
def test_loads_that_nobody_sends_are_refused(document: dict[str, Any], stage: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match=r"load\.stages"):
        make(document | {"load": document["load"] | {"stages": [stage]}})


def test_a_date_that_is_none_is_no_yaml() -> None:
    with pytest.raises(InvalidInput, match="not a configuration"):
        read_perf("name: 2020-13-45")
