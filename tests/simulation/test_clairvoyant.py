"""The clairvoyant reference: it never loses to a policy, and where all places can be tried it is the best there is."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from shoal.kernel import Chance
from shoal.simulation import Cluster, Experiment, Prompt, Run, Session, Timeline, Turn, read_experiment, run_experiment
from shoal.simulation.clairvoyant import Future, find_reference, search
from shoal.simulation.experiment import build
from shoal.simulation.regret import Scale, quantiles, waits, with_regret
from shoal.simulation.results import columns

FOLDER = Path(__file__).parents[2] / "examples/policies"
POLICIES = {"default": ""} | {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.yaml"))}
CHATS = "workload: {shape: multi-turn, sessions: 10, turns: [2, 4], systems: 2}\nfleet: [{count: 3}]\n"
TREES = "workload: {shape: agent-tree, sessions: 3, turns: [2, 3], fan_out: [2, 3]}\nfleet: [{count: 3}]\n"
KILLED = CHATS + "incidents: [{at_s: 2, what: kill, endpoint: e1}, {at_s: 6, what: revive, endpoint: e1}]\n"
MIXED = "workload: {shape: rollouts, prompts: 4, samples: 6}\nfleet: [{count: 1}, {count: 2, slow_factor: 2.5}]\n"
TINY = "workload: {shape: hot}\nfleet: [{count: 2}]\n"


def experiment_of(text: str) -> Experiment:
    return read_experiment(text, "test")


def run_of(text: str, policy: str, seed: int = 1, sessions: list[Session] | None = None) -> Run:
    experiment = experiment_of(text)
    result, samples = run_experiment(experiment, seed, router=POLICIES[policy], sessions=sessions)
    return Run(policy, None, seed, result, columns(samples), Timeline(list(result.served)))


@pytest.mark.parametrize("text", [CHATS, TREES, MIXED], ids=["chats", "trees", "mixed"])
@pytest.mark.parametrize("policy", ["default", "round-robin", "sglang-cache-aware"])
def test_the_places_of_a_policy_give_its_run_to_the_last_digit(text: str, policy: str) -> None:
    experiment = experiment_of(text)
    _, samples = run_experiment(experiment, 1, router=POLICIES[policy])
    future = Future(experiment, 1)
    plan = future.plan_of(columns(samples))
    assert future.count == len(samples)
    assert future.play(plan).samples == samples
    assert future.play(plan, Timeline(future.endpoints)).samples == samples
    assert sorted(future.waits(plan)) == sorted(sample.ttft_s for sample in samples)


def test_what_is_placed_on_a_dead_endpoint_goes_on_to_the_next() -> None:
    future = Future(experiment_of(KILLED), 1)
    samples = future.play((1,) * future.count).samples
    assert {sample.endpoint for sample in samples if not sample.is_failed} == {"e1", "e2"}
    late = [sample for sample in samples if 2.0 <= sample.arrived_s <= 6.0]
    assert late
    assert {sample.endpoint for sample in late} == {"e2"}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("text", [CHATS, TREES, KILLED, MIXED], ids=["chats", "trees", "killed", "mixed"])
def test_the_reference_never_loses_to_a_policy(text: str, seed: int) -> None:
    runs = [run_of(text, policy, seed) for policy in POLICIES]
    found = find_reference(experiment_of(text), runs, trials=12)
    judged = with_regret([*runs, found])
    regrets = {run.policy: run.result.regret_ratio for run in judged}
    assert all(regret is not None and regret >= 0.0 for regret in regrets.values())
    assert regrets[found.policy] == 0.0
    # Shared beginnings are there to be used: who spreads evenly is not the best.
    assert regrets["round-robin"]


def asks(seed: int) -> list[Session]:
    """Seven requests with prompts of a few origins, some of which come while others wait."""
    rng = np.random.default_rng(seed)
    sessions = []
    for number in range(7):
        prompt = Prompt.empty(0).extend(int(rng.integers(3)), 4_000).extend(100 + number, int(rng.integers(50, 2_000)))
        turn = Turn(prompt, int(rng.integers(20, 400)))
        sessions.append(Session(f"s{number}", partial(_once, turn), arrives_s=float(rng.uniform(0.0, 0.6))))
    return sessions


def _once(turn: Turn) -> Iterator[Turn]:
    yield turn


def brute_force(sessions: list[Session], scale: Scale) -> float:
    """The lowest cost of all places, each tried in a pool of its own."""
    experiment = experiment_of(TINY)
    costs = []
    for chosen in product(("e0", "e1"), repeat=len(sessions)):
        of_session = {session.id: (endpoint,) for session, endpoint in zip(sessions, chosen, strict=True)}
        cluster: Cluster = build(experiment, 1, places=of_session.__getitem__)
        cluster.run(sessions)
        p50, p95 = quantiles(np.array([sample.ttft_s for sample in cluster.samples]))
        costs.append((p50 / scale.p50_s + p95 / scale.p95_s) / 2)
    assert len(set(costs)) > 20
    return min(costs)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_on_a_tiny_instance_the_reference_equals_brute_force(seed: int) -> None:
    sessions = asks(seed)
    runs = [run_of(TINY, policy, sessions=sessions) for policy in ("default", "round-robin", "random")]
    scale = Scale.of(runs)
    lowest = brute_force(sessions, scale)
    found = find_reference(experiment_of(TINY), runs, sessions=sessions, trials=2**7)
    assert scale.cost(waits(found, 7)) == pytest.approx(lowest, rel=1e-12)
    # One trial fewer, and it has to search.
    searched = find_reference(experiment_of(TINY), runs, sessions=sessions, trials=2**7 - 1)
    assert scale.cost(waits(searched, 7)) == pytest.approx(lowest, rel=0.02)


def test_a_longer_search_is_no_worse_and_the_same_search_finds_the_same() -> None:
    experiment = experiment_of(CHATS)
    runs = [run_of(CHATS, "round-robin")]
    scale = Scale.of(runs)
    future = Future(experiment, 1)
    start = future.plan_of(runs[0].requests)
    chance = [Chance(1).stream("clairvoyant") for _ in range(2)]
    first, again = (list(search(future, scale.cost, start, 40, rng)) for rng in chance)
    assert first == again
    costs = [scale.cost(future.waits(plan)) for plan in first]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] == 1.0
    assert costs[-1] < 0.9


def test_a_search_that_is_interrupted_leaves_the_best_so_far() -> None:
    runs = [run_of(CHATS, "round-robin")]
    told = []

    def progress(requests: int, share: float) -> None:
        told.append((requests, share))
        if len(told) == 30:
            raise KeyboardInterrupt

    cut = find_reference(experiment_of(CHATS), runs, trials=60, progress=progress)
    assert told[-1] == (30 * cut.result.requests, 0.5)
    assert cut.result.is_partial
    scale = Scale.of(runs)
    assert scale.cost(waits(cut, cut.result.requests)) < 1.0


def test_a_run_of_the_reference_is_a_run_as_any_other() -> None:
    runs = [run_of(CHATS, "default")]
    found = find_reference(experiment_of(CHATS), runs, trials=5)
    assert found.result.requests == runs[0].result.requests == sum(found.result.served.values())
    assert len(found.timeline.times_s) > 1
