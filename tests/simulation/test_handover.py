"""Prefill on one engine and decode on another: who does what, what is sent, and what happens when one of them dies."""

from functools import partial

import msgspec
import pytest

from shoal.kernel import ConfigError
from shoal.routing import Arrived, Command, Event, Forward
from shoal.routing.events import Evicted, Kept
from shoal.routing.journal import read, replay
from shoal.simulation import Cluster, ClusterConfig, Prompt, Result, Session, Turn, read_experiment, run_experiment
from shoal.simulation.experiment import nodes_of
from shoal.simulation.handover import Links
from shoal.simulation.loop import Rank
from shoal.simulation.recording import Recording
from shoal.simulation.results import Sample
from tests.routing.flowscript import flow_of

SPLIT = "fleet: [{count: 2, role: prefill}, {count: 2, role: decode}]\n"
CHATS = """
workload: {shape: multi-turn, sessions: 60, turns: [2, 4], system_tokens: 3000, say_tokens: [800, 4000],
  reply_tokens: [100, 200], think_s: 1}
arrivals: {kind: poisson, rate_per_s: 6}
"""
TOKEN_BYTES = 131_072
ROUND_ROBIN = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: round-robin-picker}]\n"
PRECISE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: precise-prefix-cache-producer}, {type: expected-wait-scorer}]
"""


def run(text: str, router: str = "") -> tuple[Result, list[Sample]]:
    return run_experiment(read_experiment(text, "test"), 1, router=router)


def cluster_of(fleet: str, **config: object) -> Cluster:
    nodes = nodes_of(read_experiment("workload: {shape: hot}\n" + fleet, "test"))
    return Cluster(msgspec.structs.replace(ClusterConfig(nodes=nodes, seed=1), **config))


def talk(*turns: Turn, at_s: float = 0.0) -> Session:
    return Session("s", partial(iter, turns), arrives_s=at_s)


def nodes_at(number: int) -> str:
    """The address of an engine of a cluster."""
    return f"10.0.0.{number}:8000"


def prompt_of(tokens: int) -> Prompt:
    return Prompt.empty(0).extend(7, tokens)


def ttfts(gb_per_s: float, *turns: Turn, mode: str = "step") -> list[float]:
    """Times to first token of a session on one engine of each role."""
    groups = (
        f"{{count: 1, role: {role}, mode: {mode}, transfer_gb_per_s: {gb_per_s}}}" for role in ("prefill", "decode")
    )
    cluster = cluster_of(f"fleet: [{', '.join(groups)}]\n")
    cluster.run([talk(*turns)])
    return [sample.ttft_s for sample in cluster.samples]


@pytest.mark.parametrize("mode", ["step", "aggregate"])
def test_kv_takes_its_bytes_over_the_bandwidth_to_where_it_is_decoded(mode: str) -> None:
    turn = Turn(prompt_of(8_000), 20)
    (fast,), (slow,) = (ttfts(rate, turn, mode=mode) for rate in (20.0, 10.0))
    assert slow - fast == pytest.approx(8_000 * TOKEN_BYTES / 20e9, rel=1e-6)


@pytest.mark.parametrize("mode", ["step", "aggregate"])
def test_what_the_decoding_engine_has_of_a_prompt_is_not_sent_again(mode: str) -> None:
    first = prompt_of(8_000)
    turns = Turn(first, 1), Turn(first.extend(8, 1_600), 20, think_s=5.0)
    fast, slow = (ttfts(rate, *turns, mode=mode) for rate in (20.0, 10.0))
    assert slow[1] - fast[1] == pytest.approx(1_600 * TOKEN_BYTES / 20e9, rel=0.02)


@pytest.mark.parametrize("mode", ["step", "aggregate"])
def test_an_answer_is_not_sent_to_the_engine_that_decoded_it(mode: str) -> None:
    asked, whole = prompt_of(800).grow((8, 800), (9, 1_600))
    turns = Turn(asked, 1_600, whole=whole), Turn(whole.extend(10, 1_600), 20, think_s=5.0)
    fast, slow = (ttfts(rate, *turns, mode=mode) for rate in (20.0, 10.0))
    assert slow[1] - fast[1] == pytest.approx(1_616 * TOKEN_BYTES / 20e9, rel=0.02)


def test_a_link_has_one_transfer_after_the_other_at_either_end() -> None:
    links = Links(0.5)
    assert links.send("p0", "d0", 2.0, 10.0) == 12.5
    assert links.send("p0", "d1", 2.0, 10.0) == 14.5
    assert links.send("p1", "d1", 1.0, 10.0) == 15.5
    assert links.send("p2", "d2", 1.0, 10.0) == 11.5


@pytest.mark.parametrize("mode", ["step", "aggregate"])
@pytest.mark.parametrize("router", ["", PRECISE], ids=["estimate", "exact"])
def test_each_engine_does_what_its_role_says(mode: str, router: str) -> None:
    fleet = f"fleet: [{{count: 2, role: prefill, mode: {mode}}}, {{count: 2, role: decode, mode: {mode}}}]\n"
    result, samples = run(CHATS + fleet, router)
    assert result.failed == 0
    assert result.prefilled_elsewhere > 0.9 * result.requests
    assert {sample.endpoint for sample in samples} == {"e2", "e3"}
    assert {sample.prefill_endpoint for sample in samples} - {""} == {"e0", "e1"}
    assert result.served["e2"] + result.served["e3"] == result.requests
    assert result.served["e0"] + result.served["e1"] == result.prefilled_elsewhere
    assert result.imbalance < 2.0
    assert 0.3 < result.hit_ratio < 0.9
    assert sum(part.token_share for part in result.endpoints.values()) == pytest.approx(1.0)


def test_answers_are_not_held_up_by_prompts_of_others_where_those_are_prefilled_elsewhere() -> None:
    together, apart = (run(CHATS + fleet)[0] for fleet in ("fleet: [{count: 4}]\n", SPLIT))
    assert together.prefilled_elsewhere == 0
    assert apart.tpot_p95_s < 0.8 * together.tpot_p95_s


def test_two_routers_decide_each_over_the_engines_of_a_role() -> None:
    placed: dict[int, set[str]] = {0: set(), 1: set()}
    asked: dict[int, list[Arrived]] = {0: [], 1: []}

    def watch(number: int, _now: float, event: Event, made: list[Command]) -> None:
        placed[number] |= {each for command in made if isinstance(command, Forward) for each in command.endpoints}
        if isinstance(event, Arrived):
            asked[number].append(event)

    nodes = nodes_of(read_experiment("workload: {shape: hot}\n" + SPLIT, "test"))
    cluster = Cluster(ClusterConfig(nodes=nodes, seed=1), on_step=watch)
    cluster.run([talk(Turn(prompt_of(2_000 + 100 * n), 123_457 % 900), at_s=0.1 * n) for n in range(40)])
    assert placed == {0: {nodes_at(2), nodes_at(3)}, 1: {nodes_at(0), nodes_at(1)}}
    assert len(asked[0]) == len(asked[1]) == 40
    # A prefill is a request for one token, with the same beginning.
    assert {each.request.max_output_tokens for each in asked[1]} == {1}
    assert [each.blocks for each in asked[0]] == [each.blocks for each in asked[1]]


def test_a_prompt_of_which_little_is_missing_is_prefilled_where_it_is_decoded() -> None:
    result, _ = run(CHATS + SPLIT + "handover: {least_tokens: 3000}\n")
    assert 0 < result.prefilled_elsewhere < result.requests
    assert result.failed == 0
    none, _ = run(CHATS + SPLIT + "handover: {least_tokens: 1000000}\n")
    assert none.prefilled_elsewhere == 0


def test_engines_of_both_roles_do_all_of_their_requests() -> None:
    result, samples = run(CHATS + "fleet: [{count: 1, role: prefill}, {count: 1, role: decode}, {count: 2}]\n")
    assert result.failed == 0
    assert {sample.endpoint for sample in samples if sample.prefill_endpoint} == {"e1"}
    assert {"e2", "e3"} <= {sample.endpoint for sample in samples if not sample.prefill_endpoint}


def test_without_an_engine_that_prefills_those_that_decode_do_it() -> None:
    dead = "incidents: [{at_s: 3, what: kill, endpoint: e0}, {at_s: 3, what: kill, endpoint: e1}]\n"
    result, samples = run(CHATS + SPLIT + dead)
    assert result.failed == 0
    late = [sample for sample in samples if sample.arrived_s > 6.0]
    assert late
    assert not any(sample.prefill_endpoint for sample in late)


def test_a_dead_engine_of_either_role_costs_only_what_had_begun() -> None:
    for name in ("e0", "e2"):
        dead = (
            f"incidents: [{{at_s: 3.05, what: kill, endpoint: {name}}}, {{at_s: 8, what: revive, endpoint: {name}}}]\n"
        )
        _, samples = run(CHATS + SPLIT + dead)
        ends = {round(sample.arrived_s + sample.duration_s, 6) for sample in samples if sample.is_failed}
        assert ends <= {3.05}
        assert name == "e2" or not ends
        assert any(name in (sample.endpoint, sample.prefill_endpoint) for sample in samples if sample.arrived_s > 11.0)


@pytest.mark.parametrize("at_s", [0.01, 0.2, 0.6])
def test_a_client_that_leaves_is_on_nobodys_books(at_s: float) -> None:
    """Before its prefill ends, while its KV is on its way, and while it is decoded."""
    slow = "fleet: [{count: 1, role: prefill, transfer_gb_per_s: 2}, {count: 1, role: decode}]\n"
    cluster = cluster_of(slow)
    cluster.loop.at(at_s, Rank.CLIENT, cluster.abort, "r1")
    cluster.run([talk(Turn(prompt_of(4_000), 400)), talk(Turn(prompt_of(100), 10), at_s=40.0)])
    assert [sample.is_failed for sample in cluster.samples] == [True, False]
    for pickers in (cluster.routers, cluster.prefill_routers):
        assert [router.status().inflight for router in pickers] == [0]


@pytest.mark.parametrize(
    ("fleet", "named"),
    [
        ("fleet: [{role: prefill}]", "need some of role decode"),
        ("fleet: [{role: decode}, {count: 2}]", "need some of role prefill"),
        ("fleet: [{role: prefill}, {role: decode, profile: h100-70b}]", "one model"),
        ("fleet: [{role: encode}, {role: decode}]", "role"),
        ("handover: {least_tokens: 5}", "no engine has the role"),
        (SPLIT + "handover: {least_tokens: 0}", "least_tokens"),
    ],
)
def test_what_cannot_be_is_said(fleet: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_experiment(CHATS + fleet, "test")


def test_no_router_is_told_how_long_an_answer_will_be_before_it_has_ended() -> None:
    secret = 123_457
    told: dict[int, list[bytes]] = {0: [], 1: []}

    def watch(number: int, _now: float, event: Event, _made: list[Command]) -> None:
        told[number].append(msgspec.json.encode(event))

    class Over(Exception):
        pass

    def over() -> None:
        raise Over

    nodes = nodes_of(read_experiment("workload: {shape: hot}\n" + SPLIT, "test"))
    cluster = Cluster(ClusterConfig(nodes=nodes, seed=1), on_step=watch)
    cluster.loop.at(30.0, Rank.WORLD, over)
    with pytest.raises(Over):
        cluster.run([talk(Turn(prompt_of(2_000 + 100 * n), secret), at_s=0.1 * n) for n in range(40)])
    assert all(len(each) > 100 for each in told.values())
    assert not any(str(secret).encode() in each for said in told.values() for each in said)


def test_prefills_may_be_placed_by_a_configuration_of_their_own() -> None:
    placed: dict[int, list[str]] = {0: [], 1: []}
    asked: list[str] = []

    def watch(number: int, _now: float, _event: Event, made: list[Command]) -> None:
        placed[number] += [command.endpoints[0] for command in made if isinstance(command, Forward)]

    def files(name: str) -> str:
        asked.append(name)
        return ROUND_ROBIN

    experiment = read_experiment(CHATS + SPLIT + "handover: {config: theirs.yaml}\n", "test", files)
    assert asked == ["theirs.yaml"]
    config = ClusterConfig(nodes=nodes_of(experiment), seed=1, handover=experiment.handover)
    Cluster(config, on_step=watch).run(
        [talk(Turn(prompt_of(3_000).extend(20 + n, 200), 20), at_s=0.5 * n) for n in range(20)]
    )
    # Prompts that begin alike stay with who has them, and go in turns where engines take turns.
    assert [placed[1].count(nodes_at(n)) for n in (0, 1)] == [10, 10]
    assert max(placed[0].count(nodes_at(n)) for n in (2, 3)) == 20
    with pytest.raises(ConfigError, match="handover: config"):
        read_experiment(CHATS + SPLIT + "handover: {config: theirs.yaml}\n", "test", lambda _: "kind: Nothing\n")


def test_each_router_of_a_split_fleet_has_a_journal_that_gives_the_same_commands_again() -> None:
    nodes = nodes_of(read_experiment("workload: {shape: hot}\n" + SPLIT, "test"))
    config = ClusterConfig(nodes=nodes, seed=1)
    recording = Recording(config)
    Cluster(config, on_step=recording).run([talk(Turn(prompt_of(3_000 + n), 20), at_s=0.2 * n) for n in range(20)])
    files = recording.files()
    assert len(files) == 2
    for each in files:
        same, other = replay(*read(each))
        assert same > 60
        assert other is None


@pytest.mark.parametrize("high_at_s", [0.02, 0.6, 1.5])
def test_a_low_request_gives_way_wherever_it_is_and_is_served_later(high_at_s: float) -> None:
    """While it is prefilled, while its KV is on its way, and while it is decoded, where it goes on."""
    config = flow_of(1, flow=", eviction: before-first-byte")
    slow = "fleet: [{count: 1, role: prefill, transfer_gb_per_s: 1}, {count: 1, role: decode}]\n"
    evicted: list[bool] = []

    def watch(number: int, _now: float, event: Event, _made: list[Command]) -> None:
        if isinstance(event, Evicted | Kept) and number == 0:
            evicted.append(isinstance(event, Evicted))

    nodes = nodes_of(read_experiment("workload: {shape: hot}\n" + slow, "test"))
    cluster = Cluster(ClusterConfig(nodes=nodes, router=config, seed=1), on_step=watch)
    low = talk(Turn(prompt_of(6_000), 300))._replace(headers={"x-llm-d-inference-objective": "low"})
    high = talk(Turn(Prompt.empty(0).extend(9, 2_000), 20), at_s=high_at_s)
    cluster.run([low, high._replace(id="h", headers={"x-llm-d-inference-objective": "high"})])
    assert [sample.is_failed for sample in cluster.samples] == [False, False]
    assert evicted == [high_at_s < 1.0]
    assert [sample.session for sample in cluster.samples] == (["h", "s"] if high_at_s < 1.0 else ["s", "h"])
    for router in (*cluster.routers, *cluster.prefill_routers):
        assert router.status().inflight == 0
