"""The bands of one lane: which band goes next, and within it which request.

Owns the rule between bands.  Strict: the highest that has a request.  Ageing, the default: a band that waits earns a
minimum share of every token that the lane gives out, and goes first while it is owed some.  Whose turn it is within a
band is `fairness`; how much may wait is `queue`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from shoal.flow.fairness import Fairness
from shoal.flow.lines import Line
from shoal.flow.ordering import Ordering
from shoal.flow.tickets import Ticket

MOST_SHARED = 0.9
"""What all minimum shares together may take of a lane."""
MOST_OWED_TOKENS = 200_000.0
"""So much a band may be owed at most, when its requests could not go although it was its turn."""
MAX_IDLE_LINES = 10_000


class BandPolicy(NamedTuple):
    """What holds for the requests of one priority.

    max_requests, max_bytes: what may wait, 0 for no limit.  signature: equal for policies that do the same.
    """

    fairness: Fairness
    ordering: Ordering
    max_requests: int = 0
    max_bytes: int = 0
    signature: object = None


class Band:
    """The requests of one priority in one lane.  owed_tokens: by how much it is below its minimum share."""

    __slots__ = ("_lines", "_turns", "owed_tokens", "policy", "priority", "size")

    def __init__(self, priority: int, policy: BandPolicy) -> None:
        self.priority = priority
        self.policy = policy
        self.size = 0
        self.owed_tokens = 0.0
        self._lines: dict[str, Line] = {}
        self._turns = policy.fairness.turns()

    def push(self, ticket: Ticket, now: float) -> None:
        """Put a request into its tenant's line."""
        ticket.key = self.policy.ordering.key(ticket)
        line = self._lines.get(ticket.tenant_id)
        if line is None:
            if len(self._lines) >= MAX_IDLE_LINES:
                self._lines = {name: each for name, each in self._lines.items() if each.size}
            line = self._lines[ticket.tenant_id] = Line(ticket.tenant_id)
        ticket.is_live = True
        line.push(ticket)
        self.size += 1
        if line.size == 1 or line.head() is ticket:
            self._turns.wake(line, now)

    def head(self, now: float) -> Ticket | None:
        """The request that goes next."""
        line = self._turns.next(now)
        return line.head() if line is not None else None

    def serve(self, ticket: Ticket, now: float) -> None:
        """Take the request that `head` gave."""
        line = self._drop(ticket)
        self._turns.served(line, now)

    def leave(self, ticket: Ticket, now: float) -> None:
        """Take a request that does not go."""
        line = self._drop(ticket)
        if line.head() is not None:
            self._turns.wake(line, now)

    def charge(self, tenant_id: str, weight: float, tokens: float, now: float, *, is_late: bool = False) -> None:
        """Note what a request cost its tenant."""
        self._turns.charge(tenant_id, weight, tokens, now, is_late=is_late)

    def tickets(self) -> list[Ticket]:
        """Every request that waits, in no order."""
        return [ticket for line in self._lines.values() for ticket in line.tickets()]

    def lines(self) -> list[Line]:
        """The lines in which somebody waits."""
        return [line for line in self._lines.values() if line.size]

    def _drop(self, ticket: Ticket) -> Line:
        line = self._lines[ticket.tenant_id]
        ticket.is_live = False
        line.left()
        self.size -= 1
        if not self.size:
            self.owed_tokens = 0.0
        return line


class Lane:
    """The bands of requests that can go to the same endpoints, the highest priority first.

    size: requests that wait.  empty_since: since when no endpoint could serve it, None while one can.  filled_at: when
    one was there again.
    """

    __slots__ = ("_by_priority", "_is_strict", "_share_ratio", "bands", "empty_since", "filled_at", "name", "size")

    def __init__(self, name: str, *, is_strict: bool = False, minimum_share_ratio: float = 0.1) -> None:
        self.name = name
        self.size = 0
        self.bands: list[Band] = []
        self.empty_since: float | None = None
        self.filled_at = float("-inf")
        self._by_priority: dict[int, Band] = {}
        self._is_strict = is_strict
        self._share_ratio = minimum_share_ratio

    def band(self, priority: int, policies: "Mapping[int, BandPolicy] | Callable[[int], BandPolicy]") -> Band:
        """The band of a priority, made when it is new."""
        band = self._by_priority.get(priority)
        if band is None:
            policy = policies(priority) if callable(policies) else policies[priority]
            band = self._by_priority[priority] = Band(priority, policy)
            self.bands = sorted(self._by_priority.values(), key=lambda each: -each.priority)
        return band

    def next(self, may_go: Callable[[int, bool], bool], now: float) -> Ticket | None:
        """The request that goes next, None when nobody may.

        may_go: whether there is room for a priority; its second argument says that the band is owed its share.
        """
        if not self.size:
            return None
        if not self._is_strict:
            due = self._due(may_go, now)
            if due is not None:
                return due
        for band in self.bands:
            if band.size:
                # What is below has no more room than this one: a band that may not go holds back those under it.
                return band.head(now) if may_go(band.priority, False) else None
        return None

    def _due(self, may_go: Callable[[int, bool], bool], now: float) -> Ticket | None:
        """The head of the lower band that is owed most and has earned what its head costs."""
        if len(self.bands) == 1:
            return None
        owed = [band for band in self.bands[1:] if band.size and band.owed_tokens > 0.0]
        for band in sorted(owed, key=lambda each: -each.owed_tokens):
            head = band.head(now)
            if head is None or band.owed_tokens < min(head.work_tokens, MOST_OWED_TOKENS):
                continue
            if may_go(band.priority, True):
                return head
        return None

    def serve(self, ticket: Ticket, now: float) -> None:
        """Take the request that `next` gave."""
        self._by_priority[ticket.priority].serve(ticket, now)
        self.size -= 1

    def leave(self, ticket: Ticket, now: float) -> None:
        """Take a request that does not go."""
        self._by_priority[ticket.priority].leave(ticket, now)
        self.size -= 1

    def spent(self, priority: int, tokens: float) -> None:
        """Note that a request of a band has gone and costs so much: the bands that wait are owed their share of it."""
        if len(self.bands) == 1:
            return
        waiting = [band for band in self.bands[1:] if band.size or band.priority == priority]
        ratio = min(self._share_ratio, MOST_SHARED / max(1, len(waiting)))
        for band in waiting:
            if band.priority == priority:
                band.owed_tokens = max(-tokens, band.owed_tokens - tokens * (1.0 - ratio)) if band.size else 0.0
            else:
                band.owed_tokens = min(MOST_OWED_TOKENS, band.owed_tokens + ratio * tokens)
