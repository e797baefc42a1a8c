"""Recipes: sessions have the shape that they are said to have, the same for the same seed each time they are asked."""

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.kernel import ConfigError
from shoal.simulation import Fork, Session, Turn, read_experiment, run_experiment
from shoal.simulation.workloads import Recipe

SHAPES: list[dict[str, Any]] = [
    {"shape": "multi-turn", "sessions": 6},
    {"shape": "hot", "requests": 6},
    {"shape": "zipf", "requests": 6},
    {"shape": "rollouts", "prompts": 2, "turns": [2, 3]},
    {"shape": "rollouts", "prompts": 4, "steps": 2},
    {"shape": "agents", "sessions": 3, "turns": [2, 4]},
    {"shape": "agent-tree", "sessions": 3, "depth": 2, "rounds": [1, 2], "fan_out": [1, 2]},
    {"shape": "shared_prefix", "num_groups": 2, "num_prompts_per_group": 3},
    {"shape": "conversation_replay", "num_conversations": 3},
    {"shape": "mix", "parts": [{"workload": {"shape": "hot", "requests": 3}, "tenant": "a"}]},
]


def make(shape: dict[str, Any], seed: int = 1) -> list[Session]:
    recipe: Recipe = msgspec.convert(shape, Recipe)
    return recipe.make(np.random.default_rng(seed))


def flat(session: Session) -> list[Turn]:
    """All turns of a session and of those that it starts, in the order of its own."""
    turns: list[Turn] = []
    for step in session.turns():
        turns += [step] if isinstance(step, Turn) else [turn for child in step.sessions for turn in flat(child)]
    return turns


def shared(one: Turn, two: Turn) -> int:
    return 16 * int(sum(a == b for a, b in zip(one.prompt.chain, two.prompt.chain, strict=False)))


def told(sessions: list[Session]) -> list[tuple[str, int, int, float, int]]:
    return [
        (session.id, turn.prompt.tokens, turn.output_tokens, turn.think_s, int(turn.prompt.chain[-1]))
        for session in sessions
        for turn in flat(session)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape["shape"]))
def test_a_recipe_makes_the_same_of_a_seed_and_another_of_another(shape: dict[str, Any]) -> None:
    sessions = make(shape)
    assert told(sessions) == told(sessions) == told(make(shape))
    assert told(sessions) != told(make(shape, 2))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape["shape"]))
def test_what_is_answered_is_known_to_engines_and_is_a_part_of_what_is_asked_next(shape: dict[str, Any]) -> None:
    for session in make(shape):
        turns = [turn for turn in session.turns() if isinstance(turn, Turn)]
        for turn in turns:
            held = turn.blocks(16)
            assert held[: turn.prompt.tokens // 16] == turn.prompt.blocks(16)
            assert len(held) == (turn.prompt.tokens + turn.output_tokens) // 16
        for turn, after in pairwise(turns):
            assert after.prompt.blocks(16)[: len(turn.blocks(16))] == turn.blocks(16)


def test_samples_of_one_prompt_are_answered_differently() -> None:
    sessions = make({"shape": "rollouts", "prompts": 1, "samples": 8, "reply_tokens_mean": 100, "reply_sigma": 0.0})
    turns = [turn for session in sessions for turn in flat(session)]
    assert len({turn.prompt.blocks(16) for turn in turns}) == 1
    assert len({turn.blocks(16) for turn in turns}) == 8


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape["shape"]))
def test_every_recipe_runs_to_its_end(shape: dict[str, Any]) -> None:
    text = msgspec.json.encode({"workload": shape, "seeds": [1]}).decode()
    result, _ = run_experiment(read_experiment(text, "test"), 1)
    assert result.failed == 0
    assert result.requests == sum(len(flat(session)) for session in make_as_run(text))


def make_as_run(text: str) -> list[Session]:
    from shoal.kernel import Chance

    workload = read_experiment(text, "test").workload
    return workload.make(Chance(1).stream("workload"))  # type: ignore[union-attr]


def test_a_tree_forks_waits_and_takes_the_results_over() -> None:
    shape = {"shape": "agent-tree", "sessions": 2, "rounds": [2, 2], "turns": [1, 1], "fan_out": [3, 3]}
    one, two = make(shape | {"sub_turns": [2, 2], "result_tokens": [500, 500], "tool_tokens": [16, 16]})
    steps = list(one.turns())
    assert [type(step) for step in steps] == [Turn, Fork, Turn, Fork, Turn]
    forks = [step for step in steps if isinstance(step, Fork)]
    assert [len(fork.sessions) for fork in forks] == [3, 3]
    assert len({child.id for fork in forks for child in fork.sessions}) == 6
    first, second, third = (step for step in steps if isinstance(step, Turn))
    assert second.prompt.tokens == first.prompt.tokens + first.output_tokens + 3 * 500 + 16
    assert shared(first, third) == first.prompt.tokens // 16 * 16
    children = [flat(child) for child in forks[0].sessions]
    assert [len(turns) for turns in children] == [2, 2, 2]
    # Subagents of all trees share their system prompt, and no more; agents theirs.
    assert shared(children[0][0], children[1][0]) + 16 >= 3000
    assert shared(children[0][0], children[1][0]) <= 3000
    assert shared(first, flat(two)[0]) == 8000
    assert shared(first, children[0][0]) == 0


def test_subagents_may_begin_with_all_that_their_parent_knows_and_start_their_own() -> None:
    shape = {"shape": "agent-tree", "sessions": 1, "depth": 2, "inherits_context": True, "turns": [2, 2]}
    (tree,) = make(shape)
    parents: list[Turn] = []
    for step in tree.turns():
        if isinstance(step, Turn):
            parents.append(step)
            continue
        child = flat(step.sessions[0])[0]
        assert shared(parents[-1], child) == parents[-1].prompt.tokens // 16 * 16
        assert any(isinstance(each, Fork) for each in step.sessions[0].turns())


def test_samples_of_a_prompt_share_it_and_are_cut_at_their_limit() -> None:
    sessions = make({"shape": "rollouts", "prompts": 3, "samples": 50, "reply_sigma": 1.5, "max_tokens": 2000})
    turns = [turn for session in sessions for turn in flat(session)]
    assert all(turn.prompt.chain.tolist() == turns[0].prompt.chain.tolist() for turn in turns[:50])
    assert max(turn.output_tokens for turn in turns) == 2000
    assert {turn.max_tokens for turn in turns} == {2000}


def test_training_steps_wait_for_the_longest_answer() -> None:
    shape = {"shape": "rollouts", "prompts": 4, "samples": 3, "steps": 2, "update_s": 7.0}
    text = msgspec.json.encode({"workload": shape, "arrivals": {"concurrency": 1}}).decode()
    _, samples = run_experiment(read_experiment(text, "test"), 1)
    begun = sorted(sample.arrived_s for sample in samples)
    first = [sample for sample in samples if sample.arrived_s == begun[0]]
    assert len(first) == 6
    assert begun[6:] == [max(sample.arrived_s + sample.duration_s for sample in first) + 7.0] * 6


def test_parts_of_a_mix_have_their_own_tenants_times_and_headers() -> None:
    hot = {"shape": "hot", "requests": 4}
    steady = {"kind": "constant", "rate_per_s": 2.0}
    parts = [
        {"workload": hot, "tenant": "a", "arrivals": steady, "begins_s": 10, "headers": {"X-Prio": "1"}},
        {"workload": hot, "tenant": "b"},
        {"workload": hot | {"requests": 2}, "tenant": "c"},
    ]
    sessions = make({"shape": "mix", "parts": parts})
    assert [session.arrives_s for session in sessions[:4]] == [10.5, 11.0, 11.5, 12.0]
    assert [session.tenant for session in sessions] == ["a"] * 4 + ["b", "c", "b", "b", "c", "b"]
    assert sessions[0].headers == {"x-prio": "1"}
    assert len({session.id for session in sessions}) == len(sessions)
    assert shared(flat(sessions[0])[0], flat(sessions[4])[0]) == 0


def test_tenants_get_their_share_of_the_sessions_and_their_headers_as_far_as_their_agents() -> None:
    shape = {"shape": "agent-tree", "sessions": 60, "rounds": [1, 1], "turns": [1, 1], "sub_turns": [1, 1]}
    tenants = {"big": {"share": 3, "headers": {"x-llm-d-inference-objective": "gold"}}, "small": {"share": 1}}
    text = msgspec.json.encode({"workload": shape, "tenants": tenants}).decode()
    result, samples = run_experiment(read_experiment(text, "test"), 1)
    assert set(result.tenants) == {"big", "small"}
    assert 0.55 < result.tenants["big"].requests / len(samples) < 0.92
    assert sum(part.token_share for part in result.tenants.values()) == pytest.approx(1.0)


def test_the_latency_that_clients_ask_for_is_judged() -> None:
    hasty, calm = {"X-LLM-D-SLO-TTFT-MS": "0.001"}, {"x-llm-d-slo-ttft-ms": "9e6"}
    tenants = {"hasty": {"headers": hasty}, "calm": {"headers": calm}}
    text = msgspec.json.encode({"workload": {"shape": "hot", "requests": 40}, "tenants": tenants}).decode()
    result, _ = run_experiment(read_experiment(text, "test"), 1)
    assert result.slo_requests == 40
    assert (result.tenants["hasty"].slo_ratio, result.tenants["calm"].slo_ratio) == (0.0, 1.0)


def test_a_tenant_that_headers_name_is_a_tenant_of_the_results() -> None:
    workload = {"shape": "hot", "requests": 4}
    headers = {"x-llm-d-inference-fairness-id": "acme"}
    text = msgspec.json.encode({"workload": workload, "headers": headers}).decode()
    assert set(run_experiment(read_experiment(text, "test"), 1)[0].tenants) == {"acme"}


@pytest.mark.parametrize(
    ("workload", "named"),
    [
        ("{shape: agents, turns: [5, 2]}", "turns begins at 5"),
        ("{shape: agents, sessions: 0}", "sessions"),
        ("{shape: agent-tree, depth: 9}", "depth"),
        ("{shape: rollouts, prompts: 2, steps: 3}", "steps"),
        ("{shape: mix, parts: []}", "parts"),
        ("{shape: mix, parts: [{workload: {shape: hot}, arrivals: {kind: closed}}]}", "closed"),
        ("{shape: mix, parts: [{workload: {shape: hot}, begins_s: 3}]}", "begins_s"),
        ("{shape: mix, parts: [{workload: {shape: mix, parts: []}}]}", "mix"),
    ],
)
def test_what_is_wrong_in_a_recipe_is_named(workload: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_experiment(f"workload: {workload}", "test")
