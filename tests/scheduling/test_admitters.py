import numpy as np
import pytest

from shoal.pool import RefusalReason
from shoal.routing.comebacks import UNKNOWN_S
from shoal.scheduling.admitters import ProbabilisticAdmitter
from tests.routing.flowscript import LLM_D, OBJECTIVES, POOL, FlowPool, flow_of
from tests.scheduling.script import NAN, request, view


def refused(waiting: list[float], kv_usage: list[float], priority: int = -1, **parameters: float) -> float:
    """The share of 2,000 requests that is refused."""
    made = ProbabilisticAdmitter(**parameters)
    made.draw_from(np.random.default_rng(1))
    seen = view(waiting=waiting, kv_usage=kv_usage)
    return sum(made.objection(request(100), priority, seen) != "" for _ in range(2000)) / 2000


def test_the_share_that_is_refused_follows_the_saturation() -> None:
    assert refused([0, 0], [0, 0]) == 0
    assert refused([1, 1], [0, 0]) == pytest.approx(300 * 0.2**5, abs=0.02)
    assert refused([0, 0], [0.2, 0.2]) == pytest.approx(300 * 0.25**5, abs=0.03)
    assert refused([2, 2], [0, 0]) == 1
    assert refused([1, 1], [0, 0], k=10, power=1) == 1


def test_the_fuller_of_queue_and_cache_counts_and_the_mean_of_the_endpoints() -> None:
    assert refused([1, 0], [0.0, 0.16]) == pytest.approx(300 * 0.2**5, abs=0.02)


def test_an_endpoint_without_metrics_counts_as_full() -> None:
    assert refused([NAN, 0], [0, 0]) == 1


def test_only_what_may_be_shed_is_refused() -> None:
    assert refused([99, 99], [1, 1], priority=0) == 0


@pytest.mark.parametrize(
    "parameters", [{"power": 0}, {"k": -1}, {"queue_depth_threshold": 0}, {"kv_cache_util_threshold": 1.5}]
)
def test_figures_that_make_no_sense_are_refused(parameters: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        ProbabilisticAdmitter(**parameters)


@pytest.mark.parametrize("flow", ["", "flow: {enabled: true}\n"], ids=["alone", "with flow control"])
def test_a_request_that_is_not_let_in_is_refused_at_once_and_never_waits(flow: str) -> None:
    config = f"{LLM_D}plugins:\n- type: probabilistic-admitter\n{POOL}{flow}{OBJECTIVES}"
    pool = FlowPool(config, endpoints=2)
    for name in ("e0", "e1"):
        pool.load(name, waiting=4.0, running=4.0, kv_usage_ratio=0.1)
    assert pool.ask("low", objective="low") == RefusalReason.NOT_ADMITTED
    assert pool.ask("plain") == "sent"
    assert pool.refusal("low").refusal.retry_after_s == UNKNOWN_S


def test_who_is_not_let_in_is_told_to_come_when_an_endpoint_is_through_with_what_it_has() -> None:
    pool = FlowPool(f"{LLM_D}plugins:\n- type: probabilistic-admitter\n{POOL}{OBJECTIVES}")
    for tokens in (20_000, 60_000):
        pool.ask(f"long {tokens}", tokens=tokens)
        pool.load("e0", waiting=9.0, running=4.0, kv_usage_ratio=0.1)
        pool.ask(f"low {tokens}", objective="low")
    # At the speed that is assumed of an engine of which nothing was seen, 0.1 ms a token.
    waits = [pool.refusal(f"low {tokens}").refusal.retry_after_s for tokens in (20_000, 60_000)]
    assert waits == [pytest.approx(2.0, rel=0.3), pytest.approx(8.0, rel=0.3)]


def test_who_is_not_let_in_is_told_how_seldom_requests_end() -> None:
    config = f"{LLM_D}plugins:\n- type: probabilistic-admitter\n{POOL}{OBJECTIVES}"
    for pause_s in (0.5, 5.0, 40.0):
        pool = FlowPool(config, endpoints=2)
        for number in range(24):
            pool.ask(f"r{number}", tokens=16)
            pool.now += pause_s
            pool.finish(f"r{number}")
        for name in ("e0", "e1"):
            pool.load(name, waiting=9.0, running=4.0, kv_usage_ratio=0.1)
        pool.ask("low", objective="low")
        assert pool.refusal("low").refusal.retry_after_s == pytest.approx(pause_s, rel=0.6)


def test_who_is_not_let_in_comes_again_behind_those_who_wait() -> None:
    plugins = "plugins:\n- type: concurrency-detector\n"
    config = flow_of(1).replace(plugins, "plugins:\n- type: probabilistic-admitter\n- type: concurrency-detector\n")
    pool = FlowPool(config)
    for number in range(11):
        pool.ask(f"r{number}", tokens=16)
    for number in range(10):
        pool.now += 2.0
        pool.finish(f"r{number}")
    assert {pool.ask(f"low{number}", objective="low") for number in range(10)} == {"waits"}
    pool.load("e0", waiting=9.0, running=1.0, kv_usage_ratio=0.1)
    pool.now += 2.0
    pool.finish("r10")
    # The turn of the first one has come, and it is not let in; nine others wait, and one went every two seconds.
    assert pool.refusal("low0").refusal.retry_after_s == pytest.approx(20.0, rel=0.35)
