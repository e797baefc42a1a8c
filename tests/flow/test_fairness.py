from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.flow import Ticket
from shoal.flow.fairness import GlobalStrictFairness, RoundRobinFairness, TokenFairness
from shoal.flow.programs import ProgramAwareFairness
from tests.flow.script import Script


def served_tokens(script: Script, count: int) -> Counter[str]:
    tokens: Counter[str] = Counter()
    for _ in range(count):
        ticket = script.pop()
        assert ticket is not None
        tokens[ticket.tenant_id] += int(ticket.work_tokens)
    return tokens


def test_token_shares_follow_the_weights_and_not_the_number_of_requests() -> None:
    script = Script()
    for _ in range(1000):
        script.add("a", work=50, weight=1.0)
    for _ in range(100):
        script.add("b", work=800, weight=2.0)
        script.add("c", work=200, weight=1.0)
    tokens = served_tokens(script, 300)
    total = sum(tokens.values())
    assert tokens["b"] / total == pytest.approx(0.5, abs=0.05)
    assert tokens["a"] / total == pytest.approx(0.25, abs=0.05)
    assert tokens["c"] / total == pytest.approx(0.25, abs=0.05)


def test_a_tenant_that_was_silent_does_not_save_up() -> None:
    script = Script()
    for _ in range(300):
        script.add("a")
    served_tokens(script, 200)
    for _ in range(100):
        script.add("b")
    assert served_tokens(script, 20) == {"a": 1000, "b": 1000}


def test_what_was_measured_puts_the_shares_right() -> None:
    script = Script()
    for _ in range(100):
        script.add("a")
        script.add("b")
    served = Counter[str]()
    for _ in range(50):
        ticket = script.pop()
        assert ticket is not None
        served[ticket.tenant_id] += 1
        if ticket.tenant_id == "a":
            # Its answers are long: each costs 300 tokens more than it was thought to.
            script.queue.correct(ticket, 300.0, script.now)
    assert served == {"a": 10, "b": 40}


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("comes"), st.integers(0, 3)),
            st.tuples(st.just("goes"), st.just(0)),
            st.tuples(st.just("costs"), st.integers(-200, 200)),
        ),
        min_size=10,
        max_size=60,
    )
)
def test_the_tenant_that_had_least_goes_next_whatever_its_requests_turn_out_to_cost(
    steps: list[tuple[str, int]],
) -> None:
    """Against a model that looks at everybody each time: of equals, who has stood at its level longer."""
    script, served_level = Script(), 0.0
    levels, waiting = defaultdict[str, float](float), Counter[str]()
    stands, gone = dict[str, int](), list[Ticket]()
    crowd = [("comes", number % 3) for number in range(24)]
    for moves, (what, value) in enumerate(crowd + steps, 1):
        if what == "comes":
            tenant = f"t{value}"
            script.add(tenant, work=10.0 * (value + 1), weight=1.0 + value % 2)
            waiting[tenant] += 1
            if waiting[tenant] == 1:
                levels[tenant] = max(levels[tenant], served_level)
                stands[tenant] = moves
        elif what == "goes":
            expected = min((name for name in stands if waiting[name]), key=lambda n: (levels[n], stands[n]), default="")
            ticket = script.pop()
            assert (ticket.tenant_id if ticket is not None else "") == expected
            if ticket is not None:
                gone.append(ticket)
                waiting[expected] -= 1
                served_level = levels[expected] = max(levels[expected], served_level)
                levels[expected] += ticket.work_tokens / ticket.weight
                stands[expected] = moves
        elif gone:
            ticket = gone.pop(value % len(gone))
            script.queue.correct(ticket, float(value), script.now)
            levels[ticket.tenant_id] += value / ticket.weight
            if value:
                stands[ticket.tenant_id] = moves


def test_global_strict_is_one_order_over_all_tenants() -> None:
    script = Script(GlobalStrictFairness())
    order = []
    for at, tenant in enumerate("aabbaccab"):
        script.now = float(at)
        order.append(script.add(tenant).request_id)
    assert script.drain() == order


def test_round_robin_gives_each_tenant_one_request_in_turn() -> None:
    script = Script(RoundRobinFairness())
    for _ in range(5):
        script.add("a")
    script.add("b")
    script.add("c")
    assert [name[0] for name in script.drain()] == list("abcaaaa")


def test_the_program_with_the_least_service_goes_first_and_service_is_forgotten() -> None:
    script = Script(ProgramAwareFairness())
    script.add("busy", work=5000)
    script.pop()
    script.add("busy")
    script.add("new")
    ticket = script.pop()
    assert ticket is not None
    assert ticket.tenant_id == "new"
    script.drain()
    script.now = 10_000.0
    script.add("busy")
    script.now += 1.0
    script.add("new")
    # Nothing is left of the service, and who waits longer goes first.
    ticket = script.pop()
    assert ticket is not None
    assert ticket.tenant_id == "busy"


@pytest.mark.parametrize("policy", [TokenFairness, GlobalStrictFairness, RoundRobinFairness, ProgramAwareFairness])
def test_every_policy_gives_back_each_request_once_though_some_leave(policy: type) -> None:
    script = Script(policy())
    added = [script.add(f"t{number % 7}").request_id for number in range(200)]
    left = set(added[::3])
    for name in sorted(left):
        assert script.queue.take(name, script.now) is not None
        assert script.queue.take(name, script.now) is None
    assert sorted(script.drain()) == sorted(set(added) - left)
    assert len(script.queue) == 0
