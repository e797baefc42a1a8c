"""What clients do: turns wait for answers, forks for all of their sessions, and nobody comes before their time."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from shoal.pool import Request
from shoal.pool.request import Hints
from shoal.routing import Arrived, Command, Event
from shoal.simulation import Cluster, ClusterConfig, NodeConfig, Prompt, Session, Turn
from shoal.simulation.experiment import nodes_of, read_experiment, run_experiment
from shoal.simulation.loop import Rank
from shoal.simulation.sessions import Fork
from shoal.simulation.timeline import MAX_LOOKS, Timeline

NODES: tuple[NodeConfig, ...] = nodes_of(read_experiment("workload: {shape: hot}\nfleet: [{count: 2}]", "test"))
PROMPT = Prompt.empty(0).extend(1, 800)


def run(*sessions: Session, config: ClusterConfig | None = None, timeline: Timeline | None = None) -> Cluster:
    cluster = Cluster(config or ClusterConfig(nodes=NODES))
    cluster.timeline = timeline
    cluster.run(sessions)
    return cluster


def plan(*steps: Turn | Fork) -> "partial[Iterator[Turn | Fork]]":
    return partial(iter, steps)


def test_a_fork_goes_on_when_all_of_its_sessions_have_ended() -> None:
    child = Session("child", plan(Turn(PROMPT, 20), Turn(PROMPT, 40, think_s=1.0)))
    tree = Session("tree", plan(Turn(PROMPT, 10), Fork((child, child), think_s=0.5), Fork(()), Turn(PROMPT, 30)))
    samples = run(tree).samples
    first, *children, last = sorted(samples, key=lambda sample: sample.arrived_s)
    assert [sample.session for sample in samples].count("child") == 4
    begun = [sample.arrived_s for sample in children]
    assert begun[0] == begun[1] == first.arrived_s + first.duration_s + 0.5
    assert last.arrived_s == max(sample.arrived_s + sample.duration_s for sample in children)


def test_a_child_that_fails_ends_alone() -> None:
    long = Session("child", plan(Turn(Prompt.empty(0).extend(1, 3_000_000), 10), Turn(PROMPT, 10)))
    samples = run(
        Session("tree", plan(Fork((long, Session("other", plan(Turn(PROMPT, 10))))), Turn(PROMPT, 10)))
    ).samples
    assert [(sample.session, sample.is_failed) for sample in sorted(samples, key=lambda each: each.session)] == [
        ("child", True),
        ("other", False),
        ("tree", False),
    ]


def test_a_turn_does_not_come_before_its_time_nor_before_the_answer_to_the_one_before() -> None:
    session = Session(
        "s", plan(Turn(PROMPT, 10), Turn(PROMPT, 2000, at_s=4.0), Turn(PROMPT, 10, at_s=5.0)), arrives_s=1.0
    )
    first, second, third = run(session).samples
    assert (first.arrived_s, second.arrived_s) == (1.0, 5.0)
    assert third.arrived_s == second.arrived_s + second.duration_s > 6.0


def test_progress_is_told_in_requests_and_in_shares_of_sessions() -> None:
    told: list[tuple[int, float]] = []
    cluster = Cluster(ClusterConfig(nodes=NODES, concurrency=4))
    cluster.on_progress = lambda count, share: told.append((count, share))
    cluster.run([Session(f"s{n}", plan(Turn(PROMPT, 5))) for n in range(200)])
    assert [count for count, _ in told] == [50, 100, 150, 200]
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert 0.2 < shares[0] < 0.3


def test_a_timeline_sees_who_runs_what_and_who_is_down() -> None:
    timeline = Timeline([node.id for node in NODES])
    cluster = Cluster(ClusterConfig(nodes=NODES, concurrency=8))
    cluster.timeline = timeline
    cluster.loop.at(2.1, Rank.WORLD, cluster.kill, "e1")
    cluster.run([Session(f"s{n}", plan(Turn(PROMPT, 400))) for n in range(24)])
    running = timeline.running
    assert running.shape == (len(timeline.times_s), 2)
    assert running[timeline.times_s < 2.0].max() >= 4
    assert (running[timeline.times_s > 2.5][:, 1] != running[timeline.times_s > 2.5][:, 1]).all()  # NaN: down
    assert timeline.prompt_tokens[-1, 0] > 0


def test_a_long_run_is_looked_at_less_often_and_evenly() -> None:
    timeline = Timeline(["a"])
    for step in range(5000):
        if timeline.wants():
            timeline.tick(step * 0.5, step)
    times = timeline.times_s
    assert MAX_LOOKS / 2 <= len(times) <= MAX_LOOKS
    assert len(set(np.diff(times))) == 1
    assert timeline.running.shape == (len(times), 1)


def test_headers_of_a_session_reach_the_router_as_a_picker_would_read_them() -> None:
    config = (
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: agent-identity\n---\n"
        "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nagents: {trust_hints: true}\n"
    )
    cluster = Cluster(ClusterConfig(nodes=NODES, router=config))
    arrived: list[Request] = []
    handle = cluster.routers[0].handle

    def watched(event: Event, now: float) -> list[Command]:
        if isinstance(event, Arrived):
            arrived.append(event.request)
        return handle(event, now)

    setattr(cluster.routers[0], "handle", watched)  # noqa: B010
    headers = {"x-slo-ttft-ms": "250", "x-llm-d-inference-objective": "low", "x-shoal-expected-output-tokens": "7"}
    child = Session("child", plan(Turn(PROMPT, 10)))
    cluster.run([Session("tree", plan(Turn(PROMPT, 10), Fork((child,))), headers=headers)])
    assert [request.session_id for request in arrived] == ["tree", "child"]
    for request in arrived:
        assert request.headers["x-llm-d-slo-ttft-ms"] == "250"
        assert request.objective == "low"
        assert request.tenant_id == f"agent:{request.session_id}"
        assert request.hints == Hints(output_tokens=7)


def test_an_experiment_sends_its_headers_with_every_request() -> None:
    document = "workload: {shape: hot, requests: 8, prompt_tokens: 600}\nheaders: {X-Llm-D-Model-Name-Rewrite: MODEL}\n"
    for model, failed in (("m", 0), ("no-such-model", 8)):
        result, _ = run_experiment(read_experiment(document.replace("MODEL", model), "test"), 1)
        assert result.failed == failed
