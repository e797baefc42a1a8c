"""The bands of one lane: which band goes next, and within it which request.

Owns the rule between bands.  Strict: the highest that has a request.  Ageing, the default: a band that waits earns a
minimum share of every token that the lane gives out, and goes first while it is owed some.  Whose turn it is within a
band is `fairness`; how much may wait is `queue`.
"""

from collections.abc import Callable
from typing import NamedTuple

from shoal.flow.drain import DrainRate
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


class Occupancy:
    """What waits of one priority, over all lanes, and under which policy."""

    __slots__ = ("policy", "requests", "size_bytes")

    def __init__(self, policy: BandPolicy) -> None:
        self.policy = policy
        self.requests = 0
        self.size_bytes = 0


class Band:
    """The requests of one priority in one lane.

    held: all of that priority, with its policy.  owed_tokens: by how much it is below its minimum share.  turns: says
    who goes next, and hears what requests cost.  waiting: the lines in which somebody waits by their tenant, in the
    order in which they came to be.
    """

    __slots__ = ("_lines", "_ordering", "held", "owed_tokens", "priority", "size", "turns", "waiting")

    def __init__(self, priority: int, held: Occupancy) -> None:
        self.priority = priority
        self.held = held
        self.size = 0
        self.owed_tokens = 0.0
        self._lines: dict[str, Line] = {}
        self.waiting: dict[str, Line] = {}
        self._ordering = held.policy.ordering
        self.turns = held.policy.fairness.turns()

    def push(self, ticket: Ticket, now: float) -> None:
        """Put a request into its tenant's line."""
        key, line = self._ordering.key(ticket), self._lines.get(ticket.tenant_id)
        if line is None:
            if len(self._lines) >= MAX_IDLE_LINES:
                self._lines = {name: each for name, each in self._lines.items() if each.size}
            line = self._lines[ticket.tenant_id] = Line(ticket.tenant_id)
        if not line.size:
            self.waiting[ticket.tenant_id] = line
        line.size += 1
        self.size += 1
        held = self.held
        held.requests += 1
        held.size_bytes += ticket.size_bytes
        if line.push(key, ticket) and line.head() is ticket:
            self.turns.wake(line, now)

    def take(self, ticket: Ticket, now: float, is_served: bool) -> None:
        """Take the request whose turn it is and that goes, or any that does not go."""
        line = self._lines[ticket.tenant_id]
        line.take(ticket)
        if not line.size:
            del self.waiting[ticket.tenant_id]
        self.size -= 1
        if not self.size:
            self.owed_tokens = 0.0
        held = self.held
        held.requests -= 1
        held.size_bytes -= ticket.size_bytes
        if is_served:
            self.turns.served(line, now)
        elif line.size:
            self.turns.wake(line, now)

    def tickets(self) -> list[Ticket]:
        """Every request that waits, in no order."""
        return [ticket for line in self.waiting.values() for ticket in line]


class Lane:
    """The bands of requests that can go to the same endpoints, the highest priority first, and by their priority.

    held_of: what waits of a priority, over all lanes.  size: requests that wait.  drain: how fast they go.
    empty_since: since when no endpoint could serve it, None while one can.  filled_at: when one was there again.
    """

    __slots__ = (
        "_held_of",
        "_is_strict",
        "_share_ratio",
        "bands",
        "by_priority",
        "drain",
        "empty_since",
        "filled_at",
        "name",
        "size",
    )

    def __init__(
        self, name: str, held_of: Callable[[int], Occupancy], is_strict: bool, minimum_share_ratio: float
    ) -> None:
        self.name = name
        self.drain = DrainRate()
        self.empty_since: float | None = None
        self.filled_at = float("-inf")
        self._held_of = held_of
        self.configure(is_strict, minimum_share_ratio)

    def configure(self, is_strict: bool, minimum_share_ratio: float) -> None:
        """Begin without bands under another policy."""
        self.size = 0
        self.bands: list[Band] = []
        self.by_priority: dict[int, Band] = {}
        self._is_strict = is_strict
        self._share_ratio = minimum_share_ratio

    def band(self, priority: int) -> Band:
        """The band of a priority, made when it is new."""
        band = self.by_priority.get(priority)
        if band is None:
            band = self.by_priority[priority] = Band(priority, self._held_of(priority))
            self.bands = sorted(self.by_priority.values(), key=lambda each: -each.priority)
        return band

    def ahead_of(self, priority: int) -> int:
        """How many wait that go before one more of a priority."""
        ahead = 0
        for band in self.bands:
            if band.priority < priority:
                break
            ahead += band.size
        return ahead

    def first(self, now: float) -> Ticket | None:
        """The head of the highest band in which somebody waits, None when nobody does."""
        for band in self.bands:
            if band.size:
                return band.turns.next(now)
        return None

    def next(self, first: Ticket, now: float, is_held_back: bool) -> Ticket | None:
        """The request that goes next where there is room, None when nobody may.

        first: what `first` says.  is_held_back: the room is not for its band, only for one that is owed its share.
        """
        if len(self.bands) > 1 and not self._is_strict:
            due = self._due(now)
            if due is not None:
                return due
        # What is below has no more room than this one: a band that may not go holds back those under it.
        return None if is_held_back else first

    def _due(self, now: float) -> Ticket | None:
        """The head of the lower band that is owed most and has earned what its head costs."""
        owed = [band for band in self.bands[1:] if band.size and band.owed_tokens > 0.0]
        for band in sorted(owed, key=lambda each: -each.owed_tokens):
            head = band.turns.next(now)
            if head is not None and band.owed_tokens >= min(head.work_tokens, MOST_OWED_TOKENS):
                return head
        return None

    def spent(self, priority: int, tokens: float) -> None:
        """Note that a request of a band has gone and costs so much: the bands that wait are owed their share of it."""
        waiting = [band for band in self.bands[1:] if band.size or band.priority == priority]
        ratio = min(self._share_ratio, MOST_SHARED / max(1, len(waiting)))
        for band in waiting:
            if band.priority == priority:
                band.owed_tokens = max(-tokens, band.owed_tokens - tokens * (1.0 - ratio)) if band.size else 0.0
            else:
                band.owed_tokens = min(MOST_OWED_TOKENS, band.owed_tokens + ratio * tokens)
