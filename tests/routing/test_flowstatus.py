"""What the gate says of itself: waits and what tenants got, by band."""

import pytest

from shoal.kernel.spans import quantile_s
from shoal.routing import Ended
from shoal.routing.flowstatus import BandStatus
from tests.routing.flowscript import FlowPool, flow_of

TENANTS = "tenants: {a: {weight: 3}, b: {weight: 1}}\n"


def bands(pool: FlowPool) -> dict[int, BandStatus]:
    # The page is read at the time of the last event.
    pool.tick()
    return {band.priority: band for band in pool.router.status().flow.bands}


def test_a_band_tells_how_long_its_first_request_has_waited() -> None:
    pool = FlowPool(flow_of(1))
    pool.ask("runs")
    pool.ask("first")
    pool.now += 4.0
    pool.ask("second")
    pool.ask("above", objective="high")
    pool.now += 3.0
    assert {name: band.longest_s for name, band in bands(pool).items()} == {10: 3.0, 0: 7.0}
    pool.feed(Ended("first"))
    assert bands(pool)[0].longest_s == 3.0
    pool.feed(Ended("second"))
    assert bands(pool)[0].longest_s == 0.0


def test_waits_of_late_are_of_all_that_wait_no_more() -> None:
    pool = FlowPool(flow_of(1, ttl="20s"))
    for name in ("at-once", "served", "left", "expired"):
        pool.ask(name)
    pool.now += 5.0
    pool.finish("at-once")
    pool.now += 5.0
    pool.feed(Ended("left"))
    pool.tick(pool.now + 10.0)
    assert pool.state("expired") == "rejected-ttl-expired"
    waits = bands(pool)[0].waits
    assert sum(waits.values()) == 4
    for q, wait_s in ((0.25, 0.0), (0.5, 5.0), (0.75, 10.0), (1.0, 20.0)):
        assert quantile_s(waits, q) == pytest.approx(wait_s, rel=0.1)
    # Who was refused at the door did not wait.
    pool.ask("unknown", model="nobody")
    assert sum(bands(pool)[0].waits.values()) == 4


def test_tenants_are_shown_with_their_weight_what_they_got_and_what_waits_of_them() -> None:
    pool = FlowPool(flow_of(2, tenants=TENANTS))
    pool.ask("a0", tenant="a")
    pool.ask("b0", tenant="b")
    for number in range(2):
        pool.ask(f"c{number}", tenant="c")
    pool.now += 10.0
    pool.finish("a0", prompt_tokens=900, cached_tokens=300, completion_tokens=100)
    pool.finish("b0", prompt_tokens=200, cached_tokens=0, completion_tokens=50)
    pool.ask("a1", tenant="a")
    pool.ask("a2", tenant="a")
    band = bands(pool)[0]
    found = {each.tenant: each for each in band.shares}
    assert list(found) == ["a", "b"]
    assert (found["a"].weight, found["b"].weight) == (3.0, 1.0)
    # Of late began when the first request went: ten seconds ago.
    assert (found["a"].tokens_per_s, found["a"].computed_tokens_per_s) == (100.0, 70.0)
    assert (found["b"].tokens_per_s, found["b"].computed_tokens_per_s) == (25.0, 25.0)
    assert band.computed_tokens_per_s == pytest.approx(95.0)
    assert found["a"].waiting == 2
    assert band.tenants == {"a": 2}


def test_what_was_not_served_is_in_nobodys_share() -> None:
    pool = FlowPool(flow_of(1))
    pool.ask("fails", tenant="a")
    pool.now += 1.0
    pool.finish(
        "fails", status=503, is_upstream_failure=True, ttft_s=None, prompt_tokens=None, cached_tokens=None,
        completion_tokens=None,
    )  # fmt: skip
    assert bands(pool)[0].shares == []
