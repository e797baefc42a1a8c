"""Who stood before a request in the queue, by band and tenant.

Owns how that is told from when requests came and left, so that a request pays nothing for it: whoever asks looks at all
of them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec

MAX_GROUPS = 5
"""Groups that are named."""
STILL_THERE = 1 << 62


class Stay(msgspec.Struct, frozen=True, gc=False):
    """A request's time in the queue.

    lane: its own, since others wait for other endpoints.  number: how many had come with it.  left: how many had come
    when it left, STILL_THERE while it waits.  ahead: how many were there before it.
    """

    lane: str
    priority: int
    tenant_id: str
    number: int
    left: int = STILL_THERE
    ahead: int = 0


class Group(NamedTuple):
    """Requests of one tenant in one band."""

    priority: int
    tenant_id: str
    requests: int


def groups_ahead(stay: Stay, others: Iterable[Stay]) -> tuple[int, tuple[Group, ...]]:
    """How many of `others` were there when a request came, in its band or a higher one, and the larger groups of them.

    The highest band comes first, in a band the largest group.
    """
    lane, priority, number = stay.lane, stay.priority, stay.number
    counts = Counter(
        (each.priority, each.tenant_id)
        for each in others
        if each.number < number <= each.left and each.priority >= priority and each.lane == lane
    )
    return counts.total(), _largest(counts)


def groups_before(stay: Stay, waiting: Iterable[Stay]) -> tuple[int, tuple[Group, ...]]:
    """How many of those that wait go before one of them as things stand, and the larger groups of them.

    All of the higher bands, and of its own who came before it; in which order tenants take turns is not foreseen.
    """
    lane, priority, number = stay.lane, stay.priority, stay.number
    counts = Counter(
        (each.priority, each.tenant_id)
        for each in waiting
        if each.lane == lane and (each.priority > priority or (each.priority == priority and each.number < number))
    )
    return counts.total(), _largest(counts)


def all_groups_ahead(stays: Iterable[Stay]) -> dict[int, tuple[Group, ...]]:
    """The larger groups ahead of each of these requests among them all, by the number that it came with."""
    found: dict[int, tuple[Group, ...]] = {}
    there: dict[str, Counter[tuple[int, str]]] = {}
    leaving: list[tuple[int, str, tuple[int, str]]] = []
    for stay in sorted(stays, key=lambda each: each.number):
        while leaving and leaving[0][0] < stay.number:
            _, lane, key = heappop(leaving)
            there[lane][key] -= 1
        counts = there.setdefault(stay.lane, Counter())
        found[stay.number] = _largest({key: count for key, count in counts.items() if key[0] >= stay.priority})
        counts[stay.priority, stay.tenant_id] += 1
        heappush(leaving, (stay.left, stay.lane, (stay.priority, stay.tenant_id)))
    return found


def _largest(counts: Mapping[tuple[int, str], int]) -> tuple[Group, ...]:
    groups = [Group(priority, tenant_id, count) for (priority, tenant_id), count in counts.items() if count]
    groups.sort(key=lambda each: (-each.requests, -each.priority, each.tenant_id))
    return tuple(sorted(groups[:MAX_GROUPS], key=lambda each: (-each.priority, -each.requests, each.tenant_id)))
