import msgspec
import pytest

from shoal.measures import Fold, render
from shoal.pool import RefusalReason
from shoal.routing import Command, Ended
from shoal.routing.status import LatencyStatus
from tests.routing.flowscript import FlowPool, flow_of
from tests.routing.script import Pool


def page_of(pool: Pool, fold: Fold) -> dict[str, float]:
    lines = render(fold.families(pool.router.status())).splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


class Counted(Pool):
    """A pool whose every step is folded."""

    fold: Fold

    def feed(self, event: object) -> list[object]:  # type: ignore[override]
        if not hasattr(self, "fold"):
            self.fold = Fold()
        commands = super().feed(event)
        self.fold.observe(event, commands)  # type: ignore[arg-type]
        return commands  # type: ignore[return-value]


class CountedFlow(FlowPool):
    """The same with flow control."""

    fold: Fold

    def feed(self, event: object) -> list[Command]:
        if not hasattr(self, "fold"):
            self.fold = Fold()
        commands = super().feed(event)
        self.fold.observe(event, commands)  # type: ignore[arg-type]
        return commands


def total(page: dict[str, float], name: str) -> float:
    return sum(value for key, value in page.items() if key.partition("{")[0] == name)


def test_every_request_is_counted_once_and_every_gauge_returns_to_zero() -> None:
    pool = Counted()
    sent = [pool.send(f"p{number}") for number in range(30)]
    page = page_of(pool, pool.fold)
    assert total(page, "llm_d_epp_request_running") == 30
    assert total(page, "llm_d_epp_inflight_requests") == 30
    assert total(page, "llm_d_epp_inflight_tokens") > 0
    for number, one in enumerate(sent):
        one.finish(
            prompt_tokens=640, cached_tokens=64 * (number % 2), completion_tokens=10, is_client_gone=number % 3 == 0
        )
    page = page_of(pool, pool.fold)
    assert total(page, "llm_d_epp_request_total") == 30
    assert total(page, "llm_d_epp_request_duration_seconds_count") == 30
    assert total(page, "llm_d_epp_request_output_tokens_sum") == 300
    assert total(page, "shoal_reported_cached_tokens_total") == 64 * 15
    assert total(page, "shoal_client_gone_total") == 10
    for gauge in (
        "llm_d_epp_request_running",
        "llm_d_epp_inflight_requests",
        "llm_d_epp_inflight_tokens",
        "shoal_flights_open",
    ):
        assert total(page, gauge) == 0


def test_refusals_are_errors_with_their_reason() -> None:
    pool = Counted()
    pool.send(model="nobody")
    pool.fold.refused_at_door(RefusalReason.UNAUTHORIZED)
    page = page_of(pool, pool.fold)
    codes = {key.partition('error_code="')[2].partition('"')[0] for key in page if "error_code" in key}
    assert codes == {"model-not-found", "unauthorized"}
    assert total(page, "llm_d_epp_request_total") == 2


def test_cut_answers_and_moved_requests_are_seen() -> None:
    pool = Counted()
    cut = pool.send()
    cut.finish(is_cut=True, status=200)
    moved = pool.send("other")
    moved.finish(served_address=moved.forward.endpoints[1], attempts=2)
    page = page_of(pool, pool.fold)
    assert total(page, "shoal_response_cut_total") == 1
    assert total(page, "shoal_request_moved_total") == 1
    assert total(page, "shoal_request_retries_total") == 1


def test_an_engine_that_says_nothing_of_its_queue_is_nan_and_not_zero() -> None:
    pool = Counted(1)
    page = page_of(pool, pool.fold)
    queue = next(value for key, value in page.items() if key.startswith("llm_d_epp_per_endpoint_queue_size"))
    assert queue != queue
    pool.load("e0", waiting=3, running=1)
    page = page_of(pool, pool.fold)
    assert next(value for key, value in page.items() if key.startswith("llm_d_epp_per_endpoint_queue_size")) == 3


def test_what_was_promised_of_a_cache_is_compared_with_what_was_found() -> None:
    pool = Counted()
    pool.send().finish(cached_tokens=1600, prompt_tokens=2000)
    pool.send().finish()
    moved = pool.send()
    moved.finish(served_address=moved.forward.endpoints[1], attempts=2, cached_tokens=5)
    page = page_of(pool, pool.fold)
    below = {
        key.partition('le="')[2].partition('"')[0]: value
        for key, value in page.items()
        if key.startswith("shoal_cache_prediction_error_blocks_bucket")
    }
    assert [below[bound] for bound in ("-256.0", "-64.0", "+Inf")] == [0, 1, 1]


def test_waits_are_counted_by_how_they_ended_and_the_queue_is_shown() -> None:
    pool = CountedFlow(flow_of(1, control="  maxRequests: 3\n"))
    router, fold = pool.router, pool.fold
    pool.ask("a", tenant="x")
    pool.ask("b", tenant="x", objective="high")
    pool.ask("c", tenant="y")
    pool.ask("d", tenant="y")
    pool.ask("e", tenant="y")
    page = render(fold.families(router.status()))
    assert 'flow_control_queue_size{fairness_id="y",priority="0",inference_pool="shoal"} 2' in page
    assert 'flow_control_queue_size{fairness_id="x",priority="10",inference_pool="shoal"} 1' in page
    assert 'flow_control_requests_total{outcome="RejectedCapacity",priority="0",inference_pool="shoal"} 1' in page
    assert 'flow_control_global_capacity_utilization_requests{inference_pool="shoal"} 1' in page
    assert 'request_total{model_name="m",target_model_name="m",fairness_id="x",priority="10"} 1' in page
    pool.now += 2.0
    pool.finish("a", prompt_tokens=640, cached_tokens=40, completion_tokens=10)
    pool.feed(Ended("c"))
    page = render(fold.families(router.status()))
    assert 'flow_control_requests_total{outcome="Dispatched",priority="10",inference_pool="shoal"} 1' in page
    assert (
        'flow_control_requests_total{outcome="EvictedContextCancelled",priority="0",inference_pool="shoal"} 1' in page
    )
    assert 'queue_duration_seconds_sum{fairness_id="x",priority="10",outcome="Dispatched"' in page
    assert 'shoal_tenant_tokens_total{fairness_id="x",kind="prompt"} 640' in page
    assert 'shoal_tenant_tokens_total{fairness_id="x",kind="cached"} 40' in page
    assert 'shoal_tenant_tokens_total{fairness_id="x",kind="completion"} 10' in page


@pytest.mark.parametrize(
    ("record", "used"),
    [
        ({}, {"prompt": 640, "cached": 512}),
        ({"is_client_gone": True, "completion_tokens": 7}, {"prompt": 640, "cached": 512, "completion": 7}),
        ({"is_client_gone": True, "status": 0, "ttft_s": None}, {"prompt": 640, "cached": 512}),
        ({"prompt_tokens": 650, "completion_tokens": 7}, {"prompt": 650, "completion": 7}),
        ({"prompt_tokens": 650, "cached_tokens": 32}, {"prompt": 650, "cached": 32}),
        ({"status": 503, "is_upstream_failure": True}, {}),
        ({"status": 400, "ttft_s": None}, {}),
    ],
)
def test_what_no_engine_said_of_a_tenants_use_is_the_estimate(
    record: dict[str, object], used: dict[str, float]
) -> None:
    pool = Counted(1)
    pool.send("history", 512).finish(prompt_tokens=512, cached_tokens=0)
    pool.send("history", 640, tenant_id="x").finish(**record)
    page = page_of(pool, pool.fold)
    name = 'shoal_tenant_tokens_total{fairness_id="x",kind="'
    assert {key.removeprefix(name)[:-2]: value for key, value in page.items() if key.startswith(name)} == used


def test_how_well_latency_is_predicted_stands_on_the_page() -> None:
    reports = [
        LatencyStatus(
            model="m", kind="fast", what="ttft", records=9, mape=0.25, median_ratio=0.125, coverage_ratio=0.875,
            is_trusted=True,
        ),
        LatencyStatus(
            model="m", kind="fast", what="tpot", records=9, mape=0.75, median_ratio=0.5, coverage_ratio=0.625,
            is_trusted=False,
        ),
    ]  # fmt: skip
    lines = render(Fold().families(msgspec.structs.replace(Pool(1).router.status(), latency=reports))).splitlines()
    assert {line for line in lines if line.startswith("shoal_latency_")} == {
        'shoal_latency_mape_ratio{model_name="m",kind="fast",type="ttft"} 0.25',
        'shoal_latency_error_ratio{model_name="m",kind="fast",type="ttft"} 0.125',
        'shoal_latency_coverage_ratio{model_name="m",kind="fast",type="ttft"} 0.875',
        'shoal_latency_trusted{model_name="m",kind="fast",type="ttft"} 1',
        'shoal_latency_mape_ratio{model_name="m",kind="fast",type="tpot"} 0.75',
        'shoal_latency_error_ratio{model_name="m",kind="fast",type="tpot"} 0.5',
        'shoal_latency_coverage_ratio{model_name="m",kind="fast",type="tpot"} 0.625',
        'shoal_latency_trusted{model_name="m",kind="fast",type="tpot"} 0',
    }
