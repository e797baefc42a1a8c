"""Faults that other routers had where requests wait, as scripts that feed one router with flow control."""

from shoal.pool import ServedModel
from shoal.routing.events import EndpointLeft, ModelsSeen
from shoal.simulation.experiment import read_experiment, run_experiment
from shoal.simulation.timeline import Timeline
from tests.routing.flowscript import POOL, FlowPool, flow_of


def test_a_refused_request_leaves_the_quota_as_it_was_whatever_it_is_refused_for() -> None:
    tenants = "tenants: {t: {tokens_per_min: 1000}}\n"
    pool = FlowPool(POOL + "flow: {trust_headers: true}\n" + tenants, endpoints=1)
    assert pool.ask("unknown", tenant="t", model="nobody") == "model-not-found"
    pool.feed(EndpointLeft("e0"))
    assert pool.ask("nowhere", tenant="t") == "rejected-no-endpoints"
    pool.join("e0", "10.0.0.0:8000")
    assert pool.ask("served", tenant="t") == "sent"
    assert pool.ask("beyond", tenant="t") == "rejected-over-budget"


def test_a_model_whose_endpoints_are_all_gone_holds_its_requests_while_others_are_served() -> None:
    config = flow_of(2, control="  noEndpointRequestTTL: 30s\n")
    pool = FlowPool(config, endpoints=1)
    pool.join("rare", "10.0.0.9:8000", ("rare",))
    pool.feed(EndpointLeft("rare"))
    assert pool.ask("a", model="rare") == "waits"
    assert pool.ask("b") == "sent"
    assert pool.ask("typo", model="rar") == "model-not-found"
    pool.now += 5.0
    pool.join("again", "10.0.0.8:8000", ("rare",))
    assert pool.state("a") == "sent"
    pool.feed(EndpointLeft("again"))
    assert pool.ask("c", model="rare") == "waits"
    pool.tick(pool.now + 30.0)
    assert pool.state("c") == "rejected-no-endpoints"
    assert pool.refusal("c").refusal.retry_after_s is not None


def test_a_model_that_its_endpoint_lists_no_more_is_unknown_to_the_pool() -> None:
    pool = FlowPool(flow_of(2), endpoints=1)
    pool.feed(ModelsSeen("e0", (ServedModel(id="other"),)))
    assert pool.ask("a") == "model-not-found"


def test_demand_that_an_autoscaler_reads_grows_beyond_the_slots_of_the_pool() -> None:
    pool = FlowPool(flow_of(4), endpoints=2)
    for number in range(40):
        pool.ask(f"r{number}")
        status = pool.router.status()
        assert status.inflight + status.flow.requests == number + 1
    assert pool.router.status().inflight == 8


def test_a_system_prompt_that_all_agents_share_gathers_nobody_where_requests_wait() -> None:
    experiment = read_experiment(
        "workload: {shape: hot, requests: 400, prompt_tokens: 6144}\narrivals: {kind: closed, concurrency: 200}\n"
        "fleet: [{count: 4, profile: tiny}]\n",
        "test",
    )
    for seed in (1, 2):
        result, _ = run_experiment(
            experiment, seed, router=POOL + "flow: {enabled: true}\n", timeline=Timeline(["e0", "e1", "e2", "e3"])
        )
        assert result.failed == 0
        assert result.held_peak > 100
        assert result.imbalance < 1.3
        assert result.hit_ratio > 0.8
