"""Running requests that give way to a higher priority: who, when, and what becomes of them."""

import pytest

from shoal.pool import Outcome, RefusalReason
from shoal.routing import Configured, Ended, Recorded
from shoal.routing.commands import Evict, Hold
from shoal.routing.events import Evicted, Kept
from shoal.routing.evictions import MAX_ASKED, MAX_TIMES
from shoal.scheduling import Scheduler
from tests.routing.flowscript import FlowPool, flow_of

EVICTING = ", eviction: before-first-byte"


def pool_of(slots: int = 2, flow: str = EVICTING, **fields: str) -> FlowPool:
    """A pool of one endpoint that is full of low requests: low0, low1, ..."""
    pool = FlowPool(flow_of(slots, flow=flow, **fields))  # type: ignore[arg-type]
    for number in range(slots):
        assert pool.ask(f"low{number}", objective="low") == "sent"
        pool.now += 0.01
    return pool


def asked(pool: FlowPool) -> list[str]:
    """Who was asked back, in order."""
    return [name for name, told in pool.told.items() for each in told if isinstance(each, Evict)]


def test_a_low_request_waits_again_and_the_high_one_has_its_place() -> None:
    pool = pool_of()
    assert pool.ask("high", objective="high") == "waits"
    assert asked(pool) == ["low1"]
    pool.feed(Evicted("low1"))
    assert (pool.state("high"), pool.state("low1")) == ("sent", "waits")
    status = pool.router.status()
    assert (status.inflight, status.flow.requests, status.unclosed) == (2, 1, 2)
    assert pool.finish("high") == ["low1"]
    assert pool.state("low1") == "sent"
    for name in ("low0", "low1"):
        pool.finish(name)
    assert pool.router.status().flow.open_charges == 0


def test_without_it_nobody_is_asked_back() -> None:
    for flow in ("", ", eviction: never"):
        pool = pool_of(flow=flow)
        pool.ask("high", objective="high")
        assert asked(pool) == []


def test_llm_ds_switch_turns_it_on_and_shoals_own_word_goes_before_it() -> None:
    for flow, expected in (("", ["low1"]), (", eviction: never", [])):
        pool = pool_of(flow=flow, control="  enableEviction: true\n")
        pool.ask("high", objective="high")
        assert asked(pool) == expected


def test_only_negative_priorities_give_way_and_only_to_higher_ones() -> None:
    pool = FlowPool(flow_of(1, flow=EVICTING))
    pool.ask("plain")
    assert pool.ask("high", objective="high") == "waits"
    assert asked(pool) == []
    pool = pool_of()
    assert pool.ask("low too", objective="low") == "waits"
    assert asked(pool) == []
    assert pool.ask("plain") == "waits"
    assert asked(pool) == ["low1"]


def test_few_are_asked_at_a_time_and_more_when_those_have_answered() -> None:
    pool = pool_of(6)
    for number in range(4):
        pool.ask(f"high{number}", objective="high")
    assert sorted(asked(pool)) == ["low4", "low5"]
    assert MAX_ASKED == 2
    pool.feed(Evicted("low5"))
    assert sorted(asked(pool)) == ["low3", "low4", "low5"]


def test_one_that_cannot_be_taken_back_runs_on_and_another_is_asked() -> None:
    pool = pool_of()
    pool.ask("high", objective="high")
    assert asked(pool) == ["low1"]
    pool.feed(Kept("low1"))
    assert set(asked(pool)) == {"low0", "low1"}
    pool.feed(Kept("low0"))
    assert pool.state("high") == "waits"
    assert len(asked(pool)) == 2
    assert pool.finish("low1") == ["high"]


def test_one_that_ends_while_it_is_asked_for_ends_as_ever() -> None:
    pool = pool_of()
    pool.ask("high", objective="high")
    assert pool.finish("low1") == ["high"]
    pool.feed(Evicted("low1"))
    pool.feed(Kept("low1"))
    for name in ("low0", "high"):
        pool.finish(name)
    status = pool.router.status()
    assert (status.inflight, status.unclosed, status.flow.requests, status.flow.open_charges) == (0, 0, 0, 0)


def test_nobody_is_sent_back_again_and_again() -> None:
    pool = pool_of(1)
    for turn in range(MAX_TIMES):
        pool.ask(f"high{turn}", objective="high")
        pool.feed(Evicted("low0"))
        assert pool.finish(f"high{turn}") == ["low0"]
    assert pool.ask("late", objective="high") == "waits"
    assert len(asked(pool)) == MAX_TIMES
    assert pool.finish("low0") == ["late"]


def test_who_was_sent_back_has_a_whole_time_to_wait() -> None:
    pool = pool_of(1, ttl="5s")
    pool.tick(pool.now + 20.0)
    pool.ask("high", objective="high")
    pool.feed(Evicted("low0"))
    pool.tick(pool.now + 4.9)
    assert pool.state("low0") == "waits"
    pool.tick(pool.now + 0.2)
    assert pool.state("low0") == "rejected-ttl-expired"


def test_who_was_sent_back_is_first_of_its_line() -> None:
    pool = pool_of(1)
    pool.ask("low later", objective="low")
    pool.ask("high", objective="high")
    pool.feed(Evicted("low0"))
    held = pool.told["low0"][-1]
    assert isinstance(held, Hold)
    assert pool.finish("high") == ["low0"]


def test_a_cut_is_allowed_only_where_the_file_says_so() -> None:
    for flow, may_cut in ((EVICTING, False), (", eviction: always", True)):
        pool = pool_of(1, flow=flow)
        pool.ask("high", objective="high")
        (evict,) = [each for each in pool.told["low0"] if isinstance(each, Evict)]
        assert evict.may_cut is may_cut
        assert evict.refusal.reason is RefusalReason.EVICTED


def test_one_that_was_cut_ends_once_and_pays_for_what_it_had() -> None:
    pool = pool_of(1, flow=", eviction: always", tenants="tenants: {'*': {tokens_per_min: 100000}}\n")
    pool.ask("high", objective="high")
    pool.feed(Ended("low0"))
    assert pool.state("high") == "sent"
    pool.feed(Recorded("low0", Outcome(status=200, served_address="10.0.0.0:8000", is_cut=True, ttft_s=0.1)))
    pool.finish("high")
    assert pool.router.status().flow.open_charges == 0


def test_a_client_that_leaves_after_it_was_sent_back_is_out_of_the_queue() -> None:
    pool = pool_of(1)
    pool.ask("high", objective="high")
    pool.feed(Evicted("low0"))
    pool.feed(Ended("low0"))
    assert pool.state("low0") == "rejected-context-cancelled"
    assert pool.router.status().flow.requests == 0


def test_flow_control_that_is_turned_off_sends_it_on() -> None:
    pool = pool_of(1)
    pool.ask("high", objective="high")
    pool.feed(Configured(""))
    pool.feed(Evicted("low0"))
    assert pool.state("low0") == "sent"


def test_a_prompt_that_was_taken_back_is_not_believed_to_lie_there() -> None:
    pool = FlowPool(flow_of(1, flow=EVICTING), endpoints=2)
    pool.ask("low0", objective="low", tokens=4096)
    pool.ask("low1", objective="low", tokens=4096)
    pool.ask("high", objective="high")
    (victim,) = asked(pool)
    entries = pool.router.status().index_entries
    pool.feed(Evicted(victim))
    assert pool.router.status().index_entries < entries + 8


def test_explanations_count_one_that_was_sent_twice_once() -> None:
    pool = pool_of(1)
    before = pool.router.explanations._figures
    for turn in range(MAX_TIMES):
        pool.ask(f"high{turn}", objective="high")
        pool.feed(Evicted("low0"))
        pool.finish(f"high{turn}")
    assert pool.router.explanations._figures == before * (1 + MAX_TIMES)


def test_one_that_was_evicted_is_work_of_that_endpoint_no_more_and_plugins_hear_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Scheduler, "released", lambda _, request_id: told.append(request_id))
    pool = pool_of()
    pool.ask("high", objective="high")
    flight = pool.router._flights["low1"]
    pool.feed(Evicted("low1"))
    assert told == ["low1"]
    assert flight.place is not None
    assert flight.place.tokens == 0.0
    assert flight.place.left_at == pool.now


def test_one_that_was_cut_is_told_when_those_ahead_of_it_will_have_gone() -> None:
    pool = FlowPool(flow_of(1, flow=", eviction: always"))
    for number in range(11):
        pool.ask(f"r{number}")
    for number in range(11):
        pool.now += 2.0
        pool.finish(f"r{number}")
    assert pool.ask("low", objective="low") == "sent"
    pool.ask("high", objective="high")
    (evict,) = [each for each in pool.told["low"] if isinstance(each, Evict)]
    # One is ahead, and one went every two seconds.
    assert evict.refusal.retry_after_s == pytest.approx(4.0, rel=0.35)
