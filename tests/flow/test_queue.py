import pytest

from shoal.flow import Ticket
from shoal.flow.fairness import GlobalStrictFairness
from tests.flow.script import Script


def test_strict_bands_let_the_low_one_starve() -> None:
    script = Script(is_strict=True)
    for _ in range(50):
        script.add("low", priority=-1)
        script.add("high", priority=10)
    assert {name[:4] for name in script.drain(50)} == {"high"}


def test_a_low_band_gets_its_minimum_share_under_steady_overload() -> None:
    script = Script(minimum_share_ratio=0.2)
    for _ in range(400):
        script.add("low", priority=-1, work=400)
    low = high = 0.0
    for _ in range(1000):
        while len(script.queue) < 420:
            script.add("high", priority=10, work=100)
        ticket = script.pop()
        assert ticket is not None
        low += ticket.work_tokens * (ticket.tenant_id == "low")
        high += ticket.work_tokens * (ticket.tenant_id == "high")
    assert low / (low + high) == pytest.approx(0.2, abs=0.02)


def test_several_low_bands_share_what_is_kept_for_them() -> None:
    script = Script(minimum_share_ratio=0.5)
    served = {"a": 0, "b": 0, "c": 0, "high": 0}
    for number in range(3000):
        for priority, tenant in ((10, "high"), (2, "a"), (1, "b"), (0, "c")):
            if number < 200 or tenant == "high":
                script.add(tenant, priority=priority)
        ticket = script.pop()
        assert ticket is not None
        served[ticket.tenant_id] += 1
        if number == 500:
            break
    assert all(count > 0 for count in served.values())


def test_a_band_that_may_not_go_holds_back_those_below_it() -> None:
    script = Script(is_strict=True)
    script.add("high", priority=10)
    script.add("low", priority=0)
    assert script.next(is_held_back=True) is None
    assert script.next() is not None


def test_requests_and_bytes_are_bounded_by_band_and_in_all() -> None:
    script = Script(max_requests=3, band_requests=2, band_bytes=1000)
    assert script.queue.offer(script.ticket(size_bytes=1001), 0.0) == "bytes of the band"
    script.add(size_bytes=600)
    assert script.queue.offer(script.ticket(size_bytes=600), 0.0) == "bytes of the band"
    script.add(size_bytes=100)
    assert script.queue.offer(script.ticket(), 0.0) == "requests of the band"
    script.add(priority=1)
    assert script.queue.offer(script.ticket(priority=2), 0.0) == "requests of the queue"
    script.drain()
    assert script.queue.offer(script.ticket(size_bytes=1000), 0.0) == ""
    script.drain()
    assert script.queue.size_bytes == 0


def test_a_request_gives_up_after_its_time_or_its_clients() -> None:
    script = Script()
    script.add("slow", ttl_s=60.0)
    script.add("hasty", ttl_s=60.0, deadline=5.0)
    script.add("patient")
    assert script.queue.deadline() == 5.0
    assert [each.tenant_id for each in script.queue.expired(5.0, 10)] == ["hasty"]
    assert script.queue.deadline() == 60.0
    assert script.queue.expired(59.9, 10) == []
    assert [each.tenant_id for each in script.queue.expired(60.0, 10)] == ["slow"]
    assert script.queue.deadline() is None
    assert script.drain()[0].startswith("patient")


def test_an_empty_pool_gives_its_requests_another_time() -> None:
    script = Script(no_endpoint_ttl_s=600.0)
    script.add(ttl_s=10.0)
    lane = script.queue.lane("")
    script.queue.seen(lane, has_endpoints=False, now=5.0)
    assert script.queue.expired(300.0, 10) == []
    script.queue.seen(lane, has_endpoints=True, now=300.0)
    assert script.queue.expired(309.0, 10) == []
    assert len(script.queue.expired(310.0, 10)) == 1


def test_an_empty_pool_may_also_shorten_the_wait() -> None:
    script = Script(no_endpoint_ttl_s=1.0)
    script.add(ttl_s=100.0)
    script.queue.seen(script.queue.lane(""), has_endpoints=False, now=5.0)
    assert script.queue.deadline() == 6.0
    assert len(script.queue.expired(6.0, 10)) == 1


def test_however_often_the_pool_comes_and_goes_a_request_ends() -> None:
    script = Script(no_endpoint_ttl_s=5.0)
    script.add(ttl_s=5.0)
    lane, now = script.queue.lane(""), 0.0
    for _ in range(100):
        script.queue.seen(lane, has_endpoints=False, now=now)
        script.queue.seen(lane, has_endpoints=True, now=now + 1.0)
        now += 2.0
        if script.queue.expired(now, 10):
            break
    assert now <= 12.0


def test_who_waits_keeps_its_place_under_another_policy() -> None:
    script = Script(GlobalStrictFairness())
    order = []
    for at, tenant in enumerate("abcab"):
        script.now = float(at)
        order.append(script.add(tenant).request_id)
    other = Script(GlobalStrictFairness(), max_requests=1)
    renewed: list[Ticket] = []
    script.queue.configure(other.queue.policy, renewed.append, script.now)
    assert [each.request_id for each in renewed] == order
    assert len(script.queue) == 5
    assert script.queue.offer(script.ticket(), script.now)
    assert script.drain() == order


def test_the_wait_is_told_from_how_fast_the_queue_drains() -> None:
    script = Script()
    assert script.queue.wait_s(script.ticket(), 0.0) is None
    for _ in range(400):
        script.add()
    for _ in range(300):
        script.now += 0.1
        script.pop()
    assert script.queue.drain_per_s(script.now) == pytest.approx(10.0, rel=0.1)
    assert script.queue.wait_s(script.ticket(), script.now) == pytest.approx(10.1, rel=0.1)


def test_the_wait_is_told_by_the_rate_of_before_when_requests_wait_again() -> None:
    script = Script()
    for _ in range(100):
        script.add()
        script.now += 0.1
        script.pop()
    script.now += 3600.0
    for _ in range(9):
        script.add()
    wait_s = script.queue.wait_s(script.ticket(), script.now)
    assert wait_s is not None
    assert 0.5 < wait_s < 5.0
