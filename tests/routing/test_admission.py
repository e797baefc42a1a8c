import msgspec
import pytest

from shoal.kernel import ConfigError
from shoal.pool import EndpointState, Outcome, Request
from shoal.routing import Arrived, Configured, Ended, Recorded
from shoal.routing.commands import Forward
from shoal.routing.config import effective, load
from shoal.routing.events import EndpointChanged, EndpointLeft, SessionAborted
from shoal.routing.flowplan import LONGEST_WAIT_S
from shoal.routing.whereabouts import Whereabouts
from tests.routing.flowscript import LLM_D, OBJECTIVES, POOL, FlowPool, flow_of
from tests.routing.script import Pool

# ------------------------------------------------------------------ waiting


def test_without_flow_control_nothing_waits() -> None:
    pool = Pool(1)
    for _ in range(500):
        assert pool.send().forward.waited is None
    assert pool.router.deadline() is None


def test_a_request_waits_while_there_is_no_room_and_goes_when_one_ends() -> None:
    pool = FlowPool()
    assert [pool.ask(name) for name in "abcd"] == ["sent", "sent", "waits", "waits"]
    pool.now += 3.0
    assert pool.finish("a") == ["c"]
    (_, forward) = pool.told["c"]
    assert isinstance(forward, Forward)
    assert forward.waited is not None
    assert forward.waited.queue_s == pytest.approx(3.0)
    assert pool.finish("b") == ["d"]


def test_a_dispatch_counts_at_once_whatever_the_metrics_say() -> None:
    config = (
        f"{LLM_D}featureGates: [flowControl]\nplugins:\n- type: utilization-detector\n"
        "flowControl: {saturationDetector: {pluginRef: utilization-detector}}\n"
    )
    pool = FlowPool(config)
    pool.load("e0", waiting=0, running=0, kv_usage_ratio=0.1)
    said = [pool.ask(f"r{number}") for number in range(20)]
    assert said.count("sent") == 5
    pool.load("e0", waiting=0, running=5, kv_usage_ratio=0.1)
    assert pool.router.status().flow.requests == 10


@pytest.mark.parametrize("is_streaming", [True, False])
def test_an_engine_in_which_nothing_waits_is_filled(is_streaming: bool) -> None:
    pool = FlowPool(POOL + "flow: {enabled: true}\n")
    under_way: dict[str, float] = {}

    done: set[str] = set()
    for number in range(200):
        pool.ask(f"r{number}", tokens=16, is_streaming=is_streaming)
    for _ in range(120):
        for name in [name for name in pool.told if pool.state(name) == "sent" and name not in done]:
            under_way.setdefault(name, pool.now)
        pool.now += 0.1
        pool.load("e0", waiting=0, running=len(under_way), kv_usage_ratio=0.1)
        for name, sent_at in list(under_way.items()):
            if pool.now - sent_at >= 2.0:
                del under_way[name]
                done.add(name)
                ttft_s = 0.03 if is_streaming else 2.0
                pool.finish(name, ttft_s=ttft_s, duration_s=2.0)
                pool.ask(f"{name}+", tokens=16, is_streaming=is_streaming)
    assert pool.router.status().flow.requests == 0
    assert len(under_way) == 200


def test_metrics_that_stop_coming_halt_nothing() -> None:
    config = (
        f"{LLM_D}featureGates: [flowControl]\nplugins:\n- type: utilization-detector\n"
        "flowControl: {saturationDetector: {pluginRef: utilization-detector}}\n"
    )
    pool = FlowPool(config)
    pool.load("e0", waiting=10, running=20, kv_usage_ratio=0.9)
    assert pool.ask("a") == "waits"
    pool.now += 30.0
    pool.tick()
    assert pool.state("a") == "sent"


def test_one_full_endpoint_does_not_hide_behind_the_mean() -> None:
    pool = FlowPool(flow_of(1), endpoints=3)
    sent = [pool.ask(name) for name in "abcd"]
    assert sent == ["sent", "sent", "sent", "waits"]
    forwards = [each for name in "abc" for each in pool.told[name] if isinstance(each, Forward)]
    assert len({forward.endpoints[0] for forward in forwards}) == 3


def test_a_client_that_leaves_is_dropped_from_the_queue() -> None:
    pool = FlowPool()
    for name in "abcd":
        pool.ask(name)
    pool.feed(Ended("c"))
    assert pool.state("c") == "rejected-context-cancelled"
    assert pool.finish("a") == ["d"]
    assert pool.router.status().errors_total == 0
    assert pool.feed(Ended("c")) == []


def test_a_model_whose_endpoints_are_full_does_not_hold_back_another() -> None:
    pool = FlowPool(flow_of(1))
    pool.join("other", "10.0.1.1:8000", ("n",))
    assert pool.ask("a") == "sent"
    assert pool.ask("b") == "waits"
    assert pool.ask("c", model="n") == "sent"


def test_turning_the_screw_looser_lets_more_through_at_once() -> None:
    pool = FlowPool()
    for name in "abcdef":
        pool.ask(name)
    pool.feed(Configured(flow_of(5)))
    assert [pool.state(name) for name in "abcdef"] == ["sent"] * 5 + ["waits"]


def test_a_reload_keeps_who_waits_and_turning_it_off_lets_them_go() -> None:
    pool = FlowPool()
    for name in "abcdef":
        pool.ask(name)
    pool.feed(Configured(flow_of(2)))
    assert [pool.state(name) for name in "cdef"] == ["waits"] * 4
    pool.feed(Configured(""))
    assert [pool.state(name) for name in "cdef"] == ["sent"] * 4
    for name in "abcdef":
        pool.finish(name)
    assert pool.router.status().flow.open_charges == 0


def test_flow_control_may_begin_with_a_reload() -> None:
    pool = FlowPool(POOL)
    assert [pool.ask(name) for name in "abc"] == ["sent"] * 3
    pool.feed(Configured(flow_of(2)))
    assert pool.ask("d") == "waits"
    assert pool.finish("a") == []
    assert pool.finish("b") == ["d"]


# ------------------------------------------------------------------ who goes first


def test_a_high_priority_passes_a_crowd_of_low_ones() -> None:
    pool = FlowPool()
    for number in range(200):
        pool.ask(f"low{number}", objective="low")
    assert pool.ask("urgent", objective="high") == "waits"
    assert pool.finish("low0") == ["urgent"]


def test_a_client_cannot_give_itself_a_priority_unless_it_is_trusted() -> None:
    pool = FlowPool(flow_of(1, trust=False))
    for name in ("a", "b", "c"):
        pool.ask(name)
    pool.ask("greedy", objective="high")
    pool.ask("modest", objective="low")
    pool.ask("late")
    order = []
    for name in ("a", "b", "c", "greedy", "late"):
        order += pool.finish(name)
    assert order == ["b", "c", "greedy", "late", "modest"]


def test_a_tenants_priority_counts_only_where_tenants_are_known_by_key() -> None:
    tenants = "tenants: {gold: {priority: 5}}\n"
    for keys, expected in (("", ["b", "c"]), ("auth: {keys_file: keys}\n", ["c", "b"])):
        pool = FlowPool(flow_of(1, trust=False, tenants=tenants + keys))
        pool.ask("a", tenant="x")
        pool.ask("b", tenant="y")
        pool.ask("c", tenant="gold")
        assert [*pool.finish("a"), *pool.finish(expected[0])] == expected


def test_the_objective_of_a_tenant_gives_its_priority() -> None:
    pool = FlowPool(flow_of(1, tenants="tenants: {gold: {objective: high}}\n"))
    pool.ask("a")
    pool.ask("b")
    pool.ask("c", tenant="gold")
    assert pool.finish("a") == ["c"]


def test_a_tenant_with_many_requests_does_not_starve_another() -> None:
    pool = FlowPool(flow_of(1))
    for number in range(50):
        pool.ask(f"many{number}", tenant="many")
    pool.ask("few", tenant="few")
    assert pool.finish("many0") == ["few"]


def test_a_later_turn_of_a_session_goes_before_first_turns() -> None:
    pool = FlowPool(flow_of(1))
    pool.ask("turn1", session_id="s")
    pool.ask("other")
    pool.finish("turn1")
    pool.now += 1.0
    pool.ask("first")
    pool.ask("turn2", session_id="s", tokens=1280)
    assert pool.finish("other") == ["turn2"]


SHORTEST = "  defaultPriorityBand: {orderingPolicyRef: shortest-work-ordering-policy}\n"


def test_what_is_cached_of_a_prompt_is_no_work_where_the_shortest_goes_first() -> None:
    pool = FlowPool(flow_of(1, control=SHORTEST), endpoints=2)
    for name in ("long", "other"):
        assert pool.ask(name, tokens=6400) == "sent"
    for name in ("long", "other"):
        pool.finish(name, prompt_tokens=6400)
    for name in ("busy-1", "busy-2"):
        assert pool.ask(name) == "sent"
    assert pool.ask("short", tokens=1600) == "waits"
    assert pool.ask("again", tokens=6400, prompt="long") == "waits"
    assert pool.ask("shortest", tokens=640) == "waits"
    assert [*pool.finish("busy-1"), *pool.finish("busy-2"), *pool.finish("again")] == ["again", "shortest", "short"]


def test_a_session_tells_what_is_cached_where_no_content_is_known() -> None:
    pool = FlowPool(flow_of(1, control=SHORTEST))
    pool.ask("turn1", session_id="s", tokens=6400)
    pool.finish("turn1")
    pool.ask("busy")
    request = Request(id="first", model="m", prompt_tokens=1600, body_bytes=1)
    for each in (request, msgspec.structs.replace(request, id="turn2", session_id="s", prompt_tokens=6500)):
        pool.feed(Arrived(each, b""))
    assert pool.finish("busy") == ["turn2"]


def test_only_an_order_that_asks_for_the_work_has_it_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def look(self: Whereabouts, request: Request, *of: object) -> float:
        looked.append(request.id)
        return 0.0

    monkeypatch.setattr(Whereabouts, "most_tokens", look)
    for control, expected in (("", []), (SHORTEST, ["b"])):
        pool = FlowPool(flow_of(1, control=control))
        assert [pool.ask("a"), pool.ask("b")] == ["sent", "waits"]
        assert looked == expected


def test_a_session_is_under_way_after_a_long_turn() -> None:
    pool = FlowPool(flow_of(1))
    pool.ask("turn1", session_id="s")
    pool.now += 300.0
    pool.finish("turn1")
    pool.now += 1.0
    pool.ask("other")
    pool.ask("first")
    pool.ask("turn2", session_id="s", tokens=1280)
    assert pool.finish("other") == ["turn2"]
    pool.now += 301.0
    pool.finish("turn2")
    pool.now += 300.0
    pool.ask("more")
    pool.ask("next")
    pool.ask("turn3", session_id="s", tokens=1920)
    assert pool.finish("more") == ["next"]


# ------------------------------------------------------------------ giving up and refusing


def test_a_request_gives_up_after_its_time_with_an_honest_hint() -> None:
    pool = FlowPool(flow_of(1, ttl="20s"))
    for number in range(40):
        pool.ask(f"r{number}")
    for number in range(10):
        pool.now += 1.0
        pool.finish(f"r{number}")
    pool.ask("late")
    assert pool.router.deadline() == pytest.approx(120.0)
    pool.tick(120.0)
    assert pool.state("r39") == "rejected-ttl-expired"
    retry_s = pool.refusal("r39").refusal.retry_after_s
    assert retry_s is not None
    # One a second was seen to go, then none for ten.
    assert 1.0 < retry_s < 120.0
    assert pool.state("late") == "waits"


def test_a_client_that_says_how_long_it_waits_is_answered_by_then() -> None:
    pool = FlowPool(flow_of(1))
    pool.ask("a")
    pool.ask("b", headers={"x-shoal-max-wait-ms": "1500"})
    assert pool.router.deadline() == pytest.approx(101.5)
    pool.tick(101.5)
    assert pool.state("b") == "rejected-ttl-expired"


def test_a_full_queue_refuses_with_the_time_it_takes_to_drain() -> None:
    pool = FlowPool(flow_of(1, control="  maxRequests: 4\n"))
    for number in range(5):
        pool.ask(f"r{number}")
    assert pool.ask("r5") == "rejected-saturated"
    for number in range(5):
        pool.now += 2.0
        pool.finish(f"r{number}")
        pool.ask(f"n{number}")
    assert pool.ask("one more") == "rejected-saturated"
    assert pool.refusal("one more").refusal.retry_after_s == pytest.approx(10.0, rel=0.3)


def test_a_pool_without_endpoints_holds_requests_for_the_first_one() -> None:
    pool = FlowPool(flow_of(2, control="  noEndpointRequestTTL: 5m\n"), endpoints=0)
    assert pool.ask("a") == "waits"
    assert pool.router.status().flow.requests == 1
    pool.now += 100.0
    pool.tick()
    pool.join("e0", "10.0.0.1:8000")
    assert pool.state("a") == "sent"


def test_a_pool_that_stays_empty_answers_503_in_the_end() -> None:
    pool = FlowPool(flow_of(2, control="  noEndpointRequestTTL: 5s\n"), endpoints=0)
    pool.ask("a")
    assert pool.router.deadline() == pytest.approx(105.0)
    pool.tick(105.0)
    assert pool.state("a") == "rejected-no-endpoints"


def test_an_endpoint_that_drains_gets_nothing_new_and_its_requests_end_in_peace() -> None:
    pool = FlowPool(flow_of(1), endpoints=2)
    for name in "abcd":
        pool.ask(name)
    forward = pool.told["a"][-1]
    assert isinstance(forward, Forward)
    drained = "e0" if forward.endpoints[0] == "10.0.0.0:8000" else "e1"
    pool.feed(EndpointChanged(drained, EndpointState.DRAINING))
    assert pool.finish("a") == []
    assert pool.finish("b") == ["c"]
    pool.feed(EndpointLeft(drained))
    assert pool.finish("c") == ["d"]


def test_a_failing_plugin_costs_only_the_request_that_met_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FlowPool(flow_of(1))
    for name in "abc":
        pool.ask(name)
    plugin = pool.router._scheduler
    dispatched = plugin.dispatched

    def failing(request: object, *rest: object) -> None:
        if getattr(request, "id", "") == "b":
            raise RuntimeError("of this plugin")
        dispatched(request, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(type(plugin), "dispatched", lambda _, *given: failing(*given))
    assert pool.finish("a") == ["c"]
    assert pool.state("b") == "internal"
    pool.finish("c")
    assert pool.router.status().inflight == 0


# ------------------------------------------------------------------ budgets


def test_a_budget_is_kept_and_told() -> None:
    pool = FlowPool(flow_of(100, tenants="tenants: {t: {requests_per_s: 2}}\n"))
    assert [pool.ask(f"r{number}", tenant="t") for number in range(3)] == ["sent", "sent", "rejected-over-budget"]
    assert pool.refusal("r2").refusal.retry_after_s == pytest.approx(0.5)
    assert pool.ask("other", tenant="u") == "sent"
    pool.now += 0.5
    assert pool.ask("r3", tenant="t") == "sent"


def test_a_request_without_an_endpoint_costs_no_quota() -> None:
    config = flow_of(1, tenants="tenants: {t: {tokens_per_min: 1000}}\n", control="  noEndpointRequestTTL: 1s\n")
    pool = FlowPool(config, endpoints=0)
    assert pool.ask("a", tenant="t") == "waits"
    pool.tick(101.0)
    assert pool.state("a") == "rejected-no-endpoints"
    pool.join("e0", "10.0.0.1:8000")
    assert pool.ask("b", tenant="t") == "sent"


def test_budgets_work_without_a_queue_and_settle_by_the_record() -> None:
    config = POOL + "tenants: {'*': {tokens_per_min: 2100}}\n"
    pool = FlowPool(config)
    assert pool.ask("a", tokens=700) == "sent"
    assert pool.ask("b", tokens=700) == "sent"
    assert pool.ask("c", tokens=700) == "rejected-over-budget"
    pool.finish("a", prompt_tokens=100, completion_tokens=10)
    assert pool.ask("d", tokens=700) == "sent"


@pytest.mark.parametrize("ttft_s", [None, 0.05])
def test_an_upstream_failure_gives_the_quota_back(ttft_s: float | None) -> None:
    pool = FlowPool(POOL + "tenants: {'*': {tokens_per_min: 1000}}\n")
    assert pool.ask("a", tokens=700) == "sent"
    pool.finish("a", status=503, is_upstream_failure=True, ttft_s=ttft_s, prompt_tokens=None, completion_tokens=None)
    assert pool.ask("b", tokens=700) == "sent"


# ------------------------------------------------------------------ configuration


def test_llm_ds_gate_gives_llm_ds_policies_and_shoals_flow_its_own() -> None:
    gated = load(LLM_D + "featureGates: [flowControl]\n", "").flow
    own = load(POOL + "flow: {enabled: true}\n", "").flow
    assert gated is not None
    assert own is not None
    assert gated.queue.fallback.fairness.type == "global-strict-fairness-policy"  # type: ignore[attr-defined]
    assert own.queue.fallback.fairness.type == "token-fairness-policy"  # type: ignore[attr-defined]
    assert own.queue.fallback.ordering.type == "turn-aware-ordering-policy"  # type: ignore[attr-defined]
    assert gated.ttl_s == own.ttl_s == 60.0
    assert load("", "").flow is None


@pytest.mark.parametrize(
    ("given", "ttl_s", "no_endpoint_s"),
    [
        ("", 60, 60),
        ("defaultRequestTTL: 20s", 20, 20),
        ("defaultRequestTTL: 0s", LONGEST_WAIT_S - 60, 60),
        ("defaultRequestTTL: 0", LONGEST_WAIT_S - 60, 60),
        ("noEndpointRequestTTL: 0", 60, LONGEST_WAIT_S - 60),
        ("defaultRequestTTL: 0, noEndpointRequestTTL: 10m", LONGEST_WAIT_S - 600, 600),
        ("defaultRequestTTL: 0, noEndpointRequestTTL: 0", LONGEST_WAIT_S / 2, LONGEST_WAIT_S / 2),
        ("defaultRequestTTL: 50m", 3000, LONGEST_WAIT_S - 3000),
    ],
)
def test_waits_without_a_limit_are_as_long_as_a_picker_may_take(given: str, ttl_s: float, no_endpoint_s: float) -> None:
    plan = load(LLM_D + f"featureGates: [flowControl]\nflowControl: {{{given}}}\n", "").flow
    assert plan is not None
    assert (plan.ttl_s, plan.queue.no_endpoint_ttl_s) == (ttl_s, no_endpoint_s)


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        (
            "flowControl: {defaultPriorityBand: {fairnessPolicyRef: queue-scorer}}\nplugins: [{type: queue-scorer}]\n",
            "flowControl.defaultPriorityBand.fairnessPolicyRef",
            "must name a fairness policy",
        ),
        (
            "flowControl: {usageLimitPolicyPluginRef: nope}\n",
            "flowControl.usageLimitPolicyPluginRef",
            "no plugin is named",
        ),
        (
            "flowControl: {priorityBands: [{priority: 1}, {priority: 1}]}\n",
            "flowControl.priorityBands[1].priority",
            "already a band of priority 1",
        ),
        (
            "flowControl: {defaultRequestTTL: 5h}\n",
            "flowControl.defaultRequestTTL",
            "must be under 58m together.*give shorter ones",
        ),
        (
            "flowControl: {noEndpointRequestTTL: 5h}\n",
            "flowControl.noEndpointRequestTTL",
            "must be under 58m together",
        ),
        (
            "flowControl: {defaultRequestTTL: 20m, noEndpointRequestTTL: 38m}\n",
            "flowControl.noEndpointRequestTTL",
            "must be under 58m together",
        ),
    ],
)
def test_what_is_wrong_with_it_is_told_with_its_path(text: str, path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(LLM_D + "featureGates: [flowControl]\n" + text, "pool.yaml")
    assert caught.value.path == path


def test_an_objective_that_a_tenant_names_must_be_there() -> None:
    with pytest.raises(ConfigError, match="no InferenceObjective of this file is named 'hihg'") as caught:
        load(POOL.lstrip("-\n") + "tenants: {gold: {objective: hihg}}\n" + OBJECTIVES, "pool.yaml")
    assert caught.value.path == "tenants.gold.objective"
    assert caught.value.line


def test_the_effective_configuration_of_flow_control_reads_back_to_itself() -> None:
    text = flow_of(
        3, tenants="tenants: {gold: {objective: high, weight: 2}}\n", control="  priorityBands: [{priority: 3}]\n"
    )
    written = effective(load(text, ""))
    again = load(written, "")
    assert effective(again) == written
    assert again.flow is not None
    assert again.flow.priorities == (3,)
    assert again.pool.tenants["gold"].weight == 2


def test_a_record_after_the_end_settles_once() -> None:
    pool = FlowPool()
    pool.ask("a")
    pool.feed(Ended("a"))
    assert pool.router.status().flow.open_charges == 1
    pool.feed(Recorded("a", Outcome(status=200)))
    pool.feed(Recorded("a", Outcome(status=200)))
    assert pool.router.status().flow.open_charges == 0


def test_aborting_a_session_ends_what_waits_of_it_too() -> None:
    pool = FlowPool(flow_of(1))
    pool.ask("a", session_id="s")
    pool.ask("b", session_id="s")
    pool.ask("c", session_id="other")
    pool.feed(SessionAborted("s"))
    assert pool.state("b") not in ("waits", "sent")
    assert pool.state("c") == "waits"
    assert pool.router.status().flow.requests == 1


def test_who_wants_its_prefix_or_nothing_waits_only_where_somebody_holds_it() -> None:
    pool = FlowPool(flow_of(1))
    wish = {"prefer": "if-available"}
    assert pool.ask("first", prompt="shared", tokens=2000) == "sent"
    assert pool.ask("nowhere", headers=wish, tokens=2000) == "precondition-failed"
    assert pool.ask("somewhere", prompt="shared", headers=wish, tokens=2000) == "waits"
    assert pool.ask("anything", headers={"prefer": "return=minimal"}) == "waits"
    assert pool.finish("first") == ["somewhere"]
