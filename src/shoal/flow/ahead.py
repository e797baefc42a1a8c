"""Who stood before a request in the queue, by band and tenant.

Owns how that is told from when requests came and left, so that a request pays nothing for it: whoever asks looks at all
of them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

from shoal.flow.tickets import Ticket

MAX_GROUPS = 5
"""Groups that are named."""
_STILL_THERE = 1 << 62


class Group(NamedTuple):
    """Requests of one tenant in one band."""

    priority: int
    tenant_id: str
    requests: int


def groups_ahead(ticket: Ticket, others: Iterable[Ticket]) -> tuple[int, tuple[Group, ...]]:
    """How many of `others` were there when a request came, in its band or a higher one, and the larger groups of them.

    The highest band comes first, in a band the largest group.
    """
    lane, priority, number = ticket.lane, ticket.priority, ticket.number
    counts = Counter(
        (each.priority, each.tenant_id)
        for each in others
        if each.number < number <= (each.left or _STILL_THERE) and each.priority >= priority and each.lane == lane
    )
    return counts.total(), _largest(counts)


def groups_before(ticket: Ticket, waiting: Iterable[Ticket]) -> tuple[int, tuple[Group, ...]]:
    """How many of those that wait go before one of them as things stand, and the larger groups of them.

    All of the higher bands, and of its own who came before it; in which order tenants take turns is not foreseen.
    """
    lane, priority, number = ticket.lane, ticket.priority, ticket.number
    counts = Counter(
        (each.priority, each.tenant_id)
        for each in waiting
        if each.lane == lane and (each.priority > priority or (each.priority == priority and each.number < number))
    )
    return counts.total(), _largest(counts)


def all_groups_ahead(tickets: Iterable[Ticket]) -> dict[int, tuple[Group, ...]]:
    """The larger groups ahead of each of these requests among them all, by the number that it came with."""
    found: dict[int, tuple[Group, ...]] = {}
    there: dict[str, Counter[tuple[int, str]]] = {}
    leaving: list[tuple[int, str, tuple[int, str]]] = []
    for ticket in sorted(tickets, key=lambda each: each.number):
        while leaving and leaving[0][0] < ticket.number:
            _, lane, key = heappop(leaving)
            there[lane][key] -= 1
        counts = there.setdefault(ticket.lane, Counter())
        found[ticket.number] = _largest({key: count for key, count in counts.items() if key[0] >= ticket.priority})
        counts[ticket.priority, ticket.tenant_id] += 1
        heappush(leaving, (ticket.left or _STILL_THERE, ticket.lane, (ticket.priority, ticket.tenant_id)))
    return found


def _largest(counts: Mapping[tuple[int, str], int]) -> tuple[Group, ...]:
    groups = [Group(priority, tenant_id, count) for (priority, tenant_id), count in counts.items() if count]
    groups.sort(key=lambda each: (-each.requests, -each.priority, each.tenant_id))
    return tuple(sorted(groups[:MAX_GROUPS], key=lambda each: (-each.priority, -each.requests, each.tenant_id)))
