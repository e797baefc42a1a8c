from hypothesis import given
from hypothesis import strategies as st

from shoal.flow import Ticket
from shoal.flow.ahead import MAX_GROUPS, Group, all_groups_ahead, groups_ahead, groups_before
from tests.flow.script import Script


class Watched(Script):
    """Keeps the ticket of everybody, and who really was there when each came, by band and tenant."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[Ticket] = []
        self.there: dict[int, dict[tuple[int, str], int]] = {}

    def come(self, tenant: str, priority: int = 0, lane: str = "") -> Ticket:
        found: dict[tuple[int, str], int] = {}
        for each in self.queue.waits():
            if each.lane == lane and each.priority >= priority:
                found[each.priority, each.tenant_id] = found.get((each.priority, each.tenant_id), 0) + 1
        ticket = self.add(tenant, priority=priority, lane=lane)
        self.there[ticket.number] = found
        return ticket

    def refuse(self, tenant: str) -> Ticket:
        ticket, policy = self.ticket(tenant, size_bytes=2), self.queue.policy
        self.queue.policy = policy._replace(max_bytes=1)
        assert self.queue.offer(ticket, self.now) == "bytes of the queue"
        self.queue.policy = policy
        self.gone.append(ticket)
        return ticket

    def go(self, lane: str = "") -> None:
        ticket = self.pop(lane)
        assert ticket is not None
        self.gone.append(ticket)

    def all(self) -> list[Ticket]:
        return [*self.gone, *self.queue.waits()]


def test_who_is_ahead_is_told_by_band_and_tenant() -> None:
    script = Watched()
    for _ in range(12):
        script.come("batch")
    for _ in range(3):
        script.come("a", priority=10)
    script.come("low", priority=-5)
    script.come("elsewhere", lane="other")
    mine = script.come("me")
    script.come("late")
    assert groups_ahead(mine, script.all()) == (15, (Group(10, "a", 3), Group(0, "batch", 12)))
    high = script.come("b", priority=10)
    assert groups_ahead(high, script.all()) == (3, (Group(10, "a", 3),))


def test_who_had_gone_before_it_came_was_not_ahead_and_who_went_later_was() -> None:
    script = Watched()
    script.come("gone")
    script.go()
    script.come("a")
    mine = script.come("me")
    script.go()
    assert groups_ahead(mine, script.all()) == (1, (Group(0, "a", 1),))
    assert groups_before(mine, script.queue.waits()) == (0, ())


def test_one_that_waits_has_before_it_the_higher_bands_and_who_came_earlier() -> None:
    script = Watched()
    script.come("a")
    script.come("a")
    mine = script.come("me")
    script.come("a")
    script.come("high", priority=3)
    script.come("low", priority=-3)
    script.come("elsewhere", priority=3, lane="other")
    assert groups_before(mine, script.queue.waits()) == (3, (Group(3, "high", 1), Group(0, "a", 2)))


def test_one_that_could_not_wait_has_ahead_of_it_who_waited_then() -> None:
    script = Watched()
    script.come("a")
    refused = script.refuse("me")
    script.go()
    again = script.refuse("me")
    assert (refused.ahead, groups_ahead(refused, script.all())) == (1, (1, (Group(0, "a", 1),)))
    assert (again.ahead, groups_ahead(again, script.all())) == (0, (0, ()))


def test_only_the_largest_groups_are_named() -> None:
    script = Watched()
    for number in range(200):
        script.come(f"t{number:03}")
    for _ in range(5):
        script.come("t150")
    ahead, groups = groups_ahead(script.come("me"), script.all())
    assert ahead == 205
    assert len(groups) == MAX_GROUPS
    assert groups[0] == Group(0, "t150", 6)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.sampled_from(["", "other"])),
            st.sampled_from(["goes", "other goes", "refused"]),
        ),
        max_size=60,
    )
)
def test_whatever_comes_and_goes_it_is_who_was_there(steps: list[tuple[str, int, str] | str]) -> None:
    script = Watched()
    for step in steps:
        if isinstance(step, tuple):
            script.come(*step)
        elif step == "refused":
            script.refuse("r")
        elif script.next(lane := "" if step == "goes" else "other") is not None:
            script.go(lane)
    everybody = script.all()
    at_once = all_groups_ahead(everybody)
    for ticket in everybody:
        ahead, groups = groups_ahead(ticket, everybody)
        assert at_once[ticket.number] == groups
        if ticket.number in script.there:
            there = script.there[ticket.number]
            assert ahead == sum(there.values())
            assert {(group.priority, group.tenant_id): group.requests for group in groups}.items() <= there.items()
            assert len(groups) == min(MAX_GROUPS, len(there))


def test_a_request_that_is_told_twice_is_no_fault() -> None:
    def ticket(tenant: str, number: int, left: int = 0) -> Ticket:
        return Ticket("", tenant_id=tenant, number=number, left=left)

    tickets = [ticket("a", 1, 3), ticket("a", 2, 3), ticket("a", 2, 3), ticket("b", 3)]
    assert all_groups_ahead(tickets)[3] == (Group(0, "a", 3),)
