import math

import pytest

from shoal.flow.ordering import EdfOrdering, ShortestWorkOrdering, SloDeadlineOrdering, TurnAwareOrdering
from tests.flow.script import Script


def test_the_request_that_gives_up_first_goes_first() -> None:
    script = Script(ordering=EdfOrdering())
    late = script.add(ttl_s=60.0)
    soon = script.add(ttl_s=10.0)
    own = script.add(ttl_s=60.0, deadline=5.0)
    assert script.drain() == [own.request_id, soon.request_id, late.request_id]


def test_requests_without_an_slo_go_last_in_order_of_arrival() -> None:
    script = Script(ordering=SloDeadlineOrdering())
    first, second = script.add(), script.add(slo_ttft_s=math.inf)
    slow, fast = script.add(slo_ttft_s=2.0), script.add(slo_ttft_s=0.5)
    assert script.drain() == [each.request_id for each in (fast, slow, first, second)]


def test_a_long_request_is_passed_for_a_bounded_time() -> None:
    script = Script(ordering=ShortestWorkOrdering(tokens_per_second=1000.0))
    long = script.add(work=5000)
    script.now = 3.0
    passes = script.add(work=100)
    script.now = 10.0
    waits = script.add(work=100)
    assert script.drain() == [passes.request_id, long.request_id, waits.request_id]


def test_a_later_turn_goes_before_first_turns_of_the_same_tenant_for_a_while() -> None:
    script = Script(ordering=TurnAwareOrdering(lead_seconds=30.0))
    old = script.add()
    script.now = 20.0
    first = script.add()
    turn = script.add(is_follow_up=True)
    script.now = 40.0
    late_turn = script.add(is_follow_up=True)
    assert script.drain() == [each.request_id for each in (turn, old, late_turn, first)]


@pytest.mark.parametrize(
    "make", [lambda: TurnAwareOrdering(lead_seconds=-1), lambda: ShortestWorkOrdering(tokens_per_second=0)]
)
def test_figures_that_make_no_sense_are_refused_by_name(make: object) -> None:
    with pytest.raises(ValueError, match=r"leadSeconds|tokensPerSecond"):
        make()  # type: ignore[operator]
