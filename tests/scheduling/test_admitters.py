import numpy as np
import pytest

from shoal.pool import RefusalReason
from shoal.scheduling.admitters import ProbabilisticAdmitter
from tests.routing.flowscript import LLM_D, OBJECTIVES, POOL, FlowPool
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
    assert pool.refusal("low").refusal.retry_after_s == 1.0
