"""What is told of one request: where it waits and behind whom, why it was refused, who was ahead."""

from typing import Any

import pytest

from shoal.routing import Configured, Ended
from shoal.routing.books import Flight
from shoal.routing.commands import Hold
from shoal.routing.explain import MAX_REFUSED, Refused
from tests.routing.flowscript import FlowPool, flow_of

TWELVE_AND_THREE = [
    {"priority": 10, "tenant": "a", "requests": 3},
    {"priority": 0, "tenant": "batch", "requests": 12},
]


def told(pool: FlowPool, name: str) -> dict[str, Any]:
    found = pool.router.explanations.find(name, pool.now)
    assert found is not None
    return found


def behind_a_crowd(config: str = "", **fields: Any) -> FlowPool:
    """A pool with one place, taken; twelve of batch wait, three of a above them, then `mine`."""
    pool = FlowPool(config or flow_of(1))
    pool.ask("runs")
    for number in range(12):
        pool.ask(f"b{number}", tenant="batch")
    for number in range(3):
        pool.ask(f"a{number}", tenant="a", objective="high")
    assert pool.ask("mine", tenant="me", client_id="its-own", **fields) == "waits"
    return pool


def test_one_that_waits_is_told_with_its_place_and_who_is_ahead() -> None:
    pool = behind_a_crowd()
    pool.now += 2.5
    for name in ("mine", "its-own"):
        found = told(pool, name)
        assert (found["state"], found["tenant"], found["priority"]) == ("waiting", "me", 0)
        assert found["queue_s"] == pytest.approx(2.5)
        assert found["ahead"] == 15
        assert found["ahead_by"] == TWELVE_AND_THREE


def test_the_place_of_one_that_waits_is_the_present_one() -> None:
    pool = behind_a_crowd()
    pool.feed(Ended("b3"))
    assert pool.finish("runs") == ["a0"]
    pool.ask("late", tenant="batch")
    pool.ask("above", tenant="a", objective="high")
    assert [each["requests"] for each in told(pool, "mine")["ahead_by"]] == [3, 11]


def test_one_that_was_sent_after_a_wait_is_told_with_who_was_ahead_when_it_came() -> None:
    pool = behind_a_crowd()
    assert isinstance(pool.told["mine"][0], Hold)
    pool.now += 2.0
    running = "runs"
    while pool.state("mine") == "waits":
        (running,) = pool.finish(running)
    found = told(pool, "its-own")
    assert (found["state"], found["request_id"], found["queue_s"]) == ("sent", "mine", 2.0)
    assert (found["ahead"], found["ahead_by"]) == (15, TWELVE_AND_THREE)
    assert told(pool, "runs")["ahead_by"] == []


def test_one_that_was_refused_after_a_wait_is_told_with_the_reason_the_wait_and_who_was_ahead() -> None:
    pool = behind_a_crowd(flow_of(1, ttl="30s"))
    pool.tick(pool.now + 31.0)
    assert pool.state("mine") == "rejected-ttl-expired"
    for name in ("mine", "its-own"):
        found = told(pool, name)
        assert (found["state"], found["reason"], found["tenant"]) == ("refused", "rejected-ttl-expired", "me")
        assert found["queue_s"] == pytest.approx(31.0)
        assert "waited 31.0 s" in found["message"]
        assert found["ahead_by"] == TWELVE_AND_THREE


def test_one_that_found_the_queue_full_is_told_with_who_filled_it() -> None:
    pool = FlowPool(flow_of(1, control="  maxRequests: 2\n"))
    for name in ("runs", "x", "y"):
        pool.ask(name, tenant="t")
    assert pool.ask("mine") == "rejected-saturated"
    found = told(pool, "mine")
    assert (found["reason"], found["queue_s"]) == ("rejected-saturated", 0.0)
    assert found["ahead_by"] == [{"priority": 0, "tenant": "t", "requests": 2}]


def test_the_latest_request_of_a_clients_id_is_the_one_that_is_told() -> None:
    pool = FlowPool(flow_of(1, control="  maxRequests: 1\n"))
    for name in ("runs", "waits"):
        pool.ask(name)
    assert pool.ask("first", client_id="again") == "rejected-saturated"
    pool.now += 1.0
    pool.finish("runs")
    assert told(pool, "again")["state"] == "refused"
    assert pool.ask("second", client_id="again") == "waits"
    assert (told(pool, "again")["state"], told(pool, "again")["request_id"]) == ("waiting", "second")
    pool.now += 1.0
    pool.finish("waits")
    assert (told(pool, "again")["state"], told(pool, "again")["request_id"]) == ("sent", "second")
    assert told(pool, "first")["state"] == "refused"
    assert pool.router.explanations.find("", pool.now) is None
    assert pool.router.explanations.find("nobody", pool.now) is None


def test_a_flood_of_refusals_is_bounded_and_drops_no_decision() -> None:
    pool = FlowPool(flow_of(1, control="  maxRequests: 1\n"))
    pool.ask("runs", client_id="mine")
    pool.ask("waits")
    for number in range(MAX_REFUSED + 10):
        pool.ask(f"r{number}", tokens=0)
    assert pool.router.explanations.find("r9", pool.now) is None
    assert told(pool, "r10")["state"] == "refused"
    assert told(pool, "mine")["state"] == "sent"


def test_all_that_is_known_comes_with_the_latest_first() -> None:
    pool = FlowPool(flow_of(1, control="  maxRequests: 1\n"))
    for name in ("one", "two", "refused"):
        pool.ask(name)
        pool.now += 1.0
    pool.finish("one")
    assert [each["request_id"] for each in pool.router.explanations.newest()] == ["two", "refused", "one"]


def test_how_many_were_ahead_is_as_of_its_arrival_though_the_configuration_changes_meanwhile() -> None:
    pool = FlowPool(flow_of(1))
    for name in ("runs", "first", "second", "mine"):
        pool.ask(name)
    pool.finish("runs")
    pool.finish("first")
    pool.feed(Configured(flow_of(1)))
    pool.finish("second")
    seen = told(pool, "mine")
    assert (seen["state"], seen["ahead"]) == ("sent", 2)


def test_what_is_kept_of_a_request_that_ended_or_was_refused_holds_no_hashes() -> None:
    pool = FlowPool(flow_of(1, control="  maxRequests: 1\n"))
    for name in ("at-once", "waits", "refused"):
        pool.ask(name)
    pool.finish("at-once")
    pool.finish("waits")
    known = pool.router.explanations
    kept: list[Flight | Refused] = [*known._sent.by_id.values(), *known._refused.by_id.values()]
    assert [each.request.id for each in kept] == ["at-once", "waits", "refused"]
    assert [each.ticket is not None and each.ticket.item for each in kept] == [None] * 3
