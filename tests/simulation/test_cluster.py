"""The pool in virtual time: laws that hold for every run."""

import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import pytest

from shoal.kernel import ConfigError
from shoal.routing import Arrived, Event
from shoal.routing.events import BlocksStored
from shoal.simulation import Cluster, ClusterConfig, Prompt, Result, Session, Turn, read_experiment, run_experiment
from shoal.simulation.cluster import LEFT_RUNS
from shoal.simulation.experiment import Trace, arriving, build, nodes_of
from shoal.simulation.results import Sample

SMALL = """
workload: {shape: multi-turn, sessions: 24, turns: [2, 4], think_s: 0.5}
fleet: [{count: 3}]
arrivals: {concurrency: 12}
"""
ROUND_ROBIN = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: round-robin-picker}]\n"
PRECISE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: precise-prefix-cache-producer}, {type: expected-wait-scorer}]
"""


def run(text: str, seed: int = 1, router: str = "") -> Result:
    return run_experiment(read_experiment(text, "test"), seed, router=router)[0]


def ends_of_failed(samples: Sequence[Sample]) -> set[float]:
    """When requests failed; those that an engine had begun to answer end with it."""
    return {round(sample.arrived_s + sample.duration_s, 6) for sample in samples if sample.is_failed}


def test_every_request_ends_once_and_all_sessions_are_served() -> None:
    result, samples = run_experiment(read_experiment(SMALL, "test"), 1)
    assert result.failed == 0
    assert result.requests == len(samples) == sum(result.served.values())
    assert 48 <= result.requests <= 96


@pytest.mark.parametrize("router", ["", PRECISE, ROUND_ROBIN])
def test_the_same_seed_gives_the_same_bytes_and_another_one_others(router: str) -> None:
    first, again, other = (msgspec.json.encode(run(SMALL, seed, router)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_figures_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    script = (
        "import msgspec; from shoal.simulation import *; "
        f"print(msgspec.json.encode(run_experiment(read_experiment({SMALL!r}, 'x'), 1)[0]).decode())"
    )
    shown = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(shown) == 1


def test_the_default_profile_finds_more_in_caches_than_round_robin() -> None:
    ours, theirs = run(SMALL), run(SMALL, router=ROUND_ROBIN)
    assert ours.hit_ratio > theirs.hit_ratio + 0.05
    assert ours.ttft_mean_s < theirs.ttft_mean_s


def test_a_dead_engine_cuts_what_it_had_begun_and_costs_no_request_that_could_go_elsewhere() -> None:
    incident = SMALL + "incidents: [{at_s: 3, what: kill, endpoint: e1}, {at_s: 8, what: revive, endpoint: e1}]\n"
    result, samples = run_experiment(read_experiment(incident, "test"), 1)
    assert 0 < result.failed < 12
    assert ends_of_failed(samples) == {3.0}
    after = [sample for sample in samples if 3.0 < sample.arrived_s < 7.0]
    assert after
    assert all(sample.endpoint != "e1" for sample in after)


def test_a_slow_engine_gets_less() -> None:
    slow = run(SMALL + "incidents: [{at_s: 0, what: slow, endpoint: e1, factor: 8}]\n")
    assert slow.served["e1"] < min(slow.served["e0"], slow.served["e2"])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_engine_of_several_equal_ones_is_overrun(seed: int) -> None:
    """Documents that hardly fit the caches: hits turn into misses, and the books of a busy engine are wrong."""
    crowded = """
    fleet: [{count: 8, blocks: 4000}]
    workload: {shape: zipf, requests: 800, documents: 100, document_tokens: 4000, reply_tokens: [20, 60]}
    arrivals: {concurrency: 64}
    """
    ours, theirs = run(crowded, seed), run(crowded, seed, ROUND_ROBIN)
    assert ours.ttft_p95_s < 1.1 * theirs.ttft_p95_s
    assert ours.duration_s < 0.7 * theirs.duration_s


@pytest.mark.parametrize("seed", [3, 4])
def test_a_prompt_that_everybody_sends_is_spread_over_engines_that_nobody_has_tried_yet(seed: int) -> None:
    """The first engines that hold it must not keep it for themselves while the others are on trial."""
    hot = """
    fleet: [{count: 4, profile: h100-8b}]
    workload: {shape: hot, requests: 1500, prompt_tokens: 8000}
    arrivals: {kind: bursty, rate_per_s: 50, cv: 2}
    """
    ours, theirs = run(hot, seed), run(hot, seed, ROUND_ROBIN)
    assert ours.ttft_p95_s < 1.4 * theirs.ttft_p95_s
    assert ours.imbalance < 1.5


def test_aggregate_engines_give_nearly_the_figures_of_single_steps() -> None:
    step, aggregate = run(SMALL), run(SMALL.replace("count: 3", "count: 3, mode: aggregate"))
    assert aggregate.requests == step.requests
    assert aggregate.ttft_mean_s == pytest.approx(step.ttft_mean_s, rel=0.03)
    assert aggregate.e2e_p50_s == pytest.approx(step.e2e_p50_s, rel=0.03)
    assert aggregate.hit_ratio == pytest.approx(step.hit_ratio, abs=0.01)


@pytest.mark.parametrize("router", ["", PRECISE])
def test_aggregate_engines_die_and_come_back_as_others_do(router: str) -> None:
    incident = "incidents: [{at_s: 3, what: kill, endpoint: e1}, {at_s: 8, what: revive, endpoint: e1}]\n"
    text = SMALL.replace("count: 3", "count: 3, mode: aggregate") + incident
    result, samples = run_experiment(read_experiment(text, "test"), 1, router=router)
    assert ends_of_failed(samples) == {3.0}
    assert result.served["e1"] > 0


def test_sessions_that_come_one_by_one_are_served_as_a_list_of_them() -> None:
    experiment = read_experiment(SMALL.replace("concurrency: 12", "kind: poisson, rate_per_s: 5"), "test")
    rng = np.random.default_rng(1)
    assert not isinstance(experiment.workload, Trace)
    sessions = experiment.arrivals.spread(experiment.workload.make(rng), rng)
    at_once, one_by_one = (Cluster(ClusterConfig(nodes=nodes_of(experiment))) for _ in range(2))
    at_once.run(sessions)
    one_by_one.run(iter(sessions))
    assert one_by_one.samples == at_once.samples


def test_two_pickers_that_share_place_as_one_does() -> None:
    one, two = run(SMALL), run(SMALL + "router: {count: 2}\n")
    assert two.hit_ratio > one.hit_ratio - 0.05


@pytest.mark.parametrize("shape", ["hot", "zipf", "rollouts", "agents"])
def test_every_shape_runs_to_its_end(shape: str) -> None:
    sizes = {
        "hot": "requests: 40",
        "zipf": "requests: 40",
        "rollouts": "prompts: 4",
        "agents": "sessions: 6, turns: [2, 4]",
    }
    result = run(f"workload: {{shape: {shape}, {sizes[shape]}}}\narrivals: {{kind: bursty, rate_per_s: 20}}\n")
    assert result.failed == 0
    assert result.requests >= 12


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("workload: {shape: hot, prompts: 3}", "prompts"),
        ("workload: {shape: hott}", "hott"),
        ("workload: {shape: hot}\nfleet: [{profile: h1000}]", "h1000"),
        ("workload: {shape: hot}\nseeds: []", "seeds"),
        ("workload: {shape: hot}\nincidents: [{at_s: 1, what: kill, endpoint: e9}]", "e9"),
        ("fleet: 3", "fleet"),
        ("seeds: [1]", "workload"),
        ("a: [", "test"),
    ],
)
def test_what_is_wrong_in_a_document_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_experiment(text, "test")


def test_an_engine_that_joins_gets_requests_and_one_that_leaves_answers_what_it_has() -> None:
    text = SMALL + "incidents: [{at_s: 2, what: leave, endpoint: e0}, {at_s: 2, what: join, endpoint: e2}]\n"
    result, samples = run_experiment(read_experiment(text, "test"), 1, router=ROUND_ROBIN)
    assert result.failed == 0
    assert all(sample.arrived_s > 2.0 for sample in samples if sample.endpoint == "e2")
    assert {sample.endpoint for sample in samples if sample.arrived_s < 2.0} == {"e0", "e1"}
    left = [sample for sample in samples if sample.endpoint == "e0"]
    assert all(sample.arrived_s <= 2.0 for sample in left)
    assert any(sample.arrived_s + sample.duration_s > 2.0 for sample in left)
    assert {sample.endpoint for sample in samples if sample.arrived_s > 2.0} == {"e1", "e2"}


def test_an_engine_that_left_may_join_again() -> None:
    text = SMALL + "incidents: [{at_s: 1, what: leave, endpoint: e0}, {at_s: 6, what: join, endpoint: e0}]\n"
    result, samples = run_experiment(read_experiment(text, "test"), 1, router=ROUND_ROBIN)
    assert result.failed == 0
    served = [sample.arrived_s for sample in samples if sample.endpoint == "e0"]
    assert not any(1.0 < arrived_s < 6.0 for arrived_s in served)
    assert any(arrived_s > 6.0 for arrived_s in served)


def test_an_engine_that_joins_before_it_has_left_stays_with_what_it_has() -> None:
    text = SMALL + "incidents: [{at_s: 2, what: leave, endpoint: e0}, {at_s: 2.01, what: join, endpoint: e0}]\n"
    result, samples = run_experiment(read_experiment(text, "test"), 1, router=ROUND_ROBIN)
    assert result.failed == 0
    assert any(each.arrived_s < 2.0 < each.arrived_s + each.duration_s for each in samples if each.endpoint == "e0")
    assert any(each.arrived_s > 2.01 for each in samples if each.endpoint == "e0")


@pytest.mark.parametrize(
    ("incidents", "said"),
    [
        ("{at_s: 1, what: revive, endpoint: e0}", "revive of e0 at 1 s: it is there"),
        ("{at_s: 1, what: kill, endpoint: e0}, {at_s: 2, what: kill, endpoint: e0}", "kill of e0 at 2 s: it is dead"),
        ("{at_s: 2, what: join, endpoint: e0}, {at_s: 1, what: slow, endpoint: e0}", "join of e0 at 2 s: it is there"),
        ("{at_s: 1, what: kill, endpoint: e0}, {at_s: 1, what: leave, endpoint: e0}", "leave of e0 at 1 s: it is dead"),
        ("{at_s: 1, what: leave, endpoint: e0}, {at_s: 3, what: revive, endpoint: e0}", "it has left"),
        ("{at_s: 2, what: join, endpoint: e0}, {at_s: 1, what: slow, endpoint: e0, factor: 2}", "it is there"),
    ],
)
def test_an_incident_that_cannot_come_when_it_does_is_named(incidents: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_experiment(SMALL + f"incidents: [{incidents}]\n", "test")


def test_one_that_leaves_may_die_before_it_has_answered_what_it_has_and_join_again() -> None:
    text = SMALL + (
        "incidents: [{at_s: 2, what: leave, endpoint: e0}, {at_s: 2.01, what: kill, endpoint: e0}, "
        "{at_s: 6, what: join, endpoint: e0}]\n"
    )
    _, samples = run_experiment(read_experiment(text, "test"), 1, router=ROUND_ROBIN)
    assert not any(2.01 < each.arrived_s < 6.0 for each in samples if each.endpoint == "e0")
    assert any(each.arrived_s > 6.0 for each in samples if each.endpoint == "e0")


@pytest.mark.parametrize("fleet", ["[]", "[{count: 20000}, {count: 1}]"])
def test_a_fleet_has_some_engines_and_no_more_than_can_be_simulated(fleet: str) -> None:
    with pytest.raises(ConfigError, match="it may have 1 to 20,000"):
        read_experiment(f"workload: {{shape: hot}}\nfleet: {fleet}\n", "test")


def test_delays_of_an_experiment_are_those_of_its_pool() -> None:
    near, far = (run(SMALL + f"delays: {{network_s: {network_s}}}\n") for network_s in (0.0005, 0.3))
    assert far.ttft_p50_s > near.ttft_p50_s + 0.25


def test_an_answer_that_its_engine_cut_counts_as_failed_there() -> None:
    result = run(SMALL + "incidents: [{at_s: 1.5, what: kill, endpoint: e1}]\n")
    assert result.failed > 0
    assert {name: part.failed for name, part in result.endpoints.items()} == {"e0": 0, "e1": result.failed, "e2": 0}


def test_nothing_is_left_of_a_run_once_some_more_have_gone() -> None:
    experiment = read_experiment("workload: {shape: hot, requests: 4}\nfleet: [{count: 1}]\n", "test")
    first = build(experiment, 1)
    first.run(arriving(experiment, 1))
    left = weakref.ref(first)
    del first
    for seed in range(LEFT_RUNS):
        run_experiment(experiment, seed)
    assert left() is None


def test_jitter_is_added_to_the_network_and_is_none_unless_it_is_asked_for() -> None:
    steady, same, shaken = (run(SMALL + f"delays: {{jitter_s: {table}}}\n") for table in ("[]", "[0, 0]", "[0, 0, 2]"))
    assert steady == same == run(SMALL)
    assert shaken.ttft_p50_s < steady.ttft_p50_s + 0.3
    assert shaken.ttft_mean_s == pytest.approx(steady.ttft_mean_s + 0.5, abs=0.2)


PROMPT = Prompt.empty(0).extend(1, 800)
ANSWERED = PROMPT.extend(2, 160)
HELD_TOKENS = 944
"""Of 800 and 160, whole blocks of 16; the last token was sampled and never computed."""


def ask_again(whole: Prompt | None, *, mode: str = "step", router: str = "") -> tuple[Cluster, list[Event]]:
    """Ask, and ask again behind the answer, on one engine."""
    turns = Turn(PROMPT, 160, whole=whole), Turn(ANSWERED.extend(3, 400), 20, think_s=1.0)
    (node,) = nodes_of(read_experiment(f"workload: {{shape: hot}}\nfleet: [{{count: 1, mode: {mode}}}]", "test"))
    node = msgspec.structs.replace(node, engine=msgspec.structs.replace(node.engine, has_cache_events=bool(router)))
    told: list[Event] = []
    cluster = Cluster(
        ClusterConfig(nodes=(node,), router=router, seed=1),
        on_step=lambda _number, _now, event, _ordered: told.append(event),
    )
    cluster.run([Session("s", partial(iter, turns))])
    return cluster, told


@pytest.mark.parametrize("mode", ["step", "aggregate"])
def test_an_answer_that_comes_back_in_a_prompt_is_found_in_the_cache(mode: str) -> None:
    cached = [[sample.cached_tokens for sample in ask_again(whole, mode=mode)[0].samples] for whole in (ANSWERED, None)]
    assert cached == [[0, HELD_TOKENS], [0, 800]]


@pytest.mark.parametrize("mode", ["step", "aggregate"])
def test_pickers_see_prompts_only_and_hear_of_the_blocks_of_answers(mode: str) -> None:
    _, told = ask_again(ANSWERED, mode=mode, router=PRECISE)
    first, second = (place for place, event in enumerate(told) if isinstance(event, Arrived))
    asked = told[first]
    assert isinstance(asked, Arrived)
    assert (asked.request.prompt_tokens, asked.blocks) == (800, PROMPT.hashes())
    stored = b"".join(event.keys for event in told[first:second] if isinstance(event, BlocksStored))
    assert set(_keys(ANSWERED.keys(16)[: 8 * HELD_TOKENS // 16])) <= set(_keys(stored))


def _keys(packed: bytes) -> list[bytes]:
    return [packed[at : at + 8] for at in range(0, len(packed), 8)]
