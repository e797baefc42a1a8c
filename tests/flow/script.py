"""A queue that is filled and emptied by hand, with the policies of a test."""

from typing import Any

from shoal.flow import BandPolicy, Queue, QueuePolicy, Ticket
from shoal.flow.fairness import TokenFairness
from shoal.flow.ordering import FcfsOrdering


class Script:
    """One queue; every dispatch costs the request's own work."""

    def __init__(self, fairness: Any = None, ordering: Any = None, **policy: Any) -> None:
        band = BandPolicy(
            fairness or TokenFairness(), ordering or FcfsOrdering(), policy.pop("band_requests", 0),
            policy.pop("band_bytes", 0),
        )  # fmt: skip
        self.queue = Queue(QueuePolicy(band, band, **policy))
        self.now = 0.0
        self.count = 0

    def ticket(self, tenant: str = "t", priority: int = 0, work: float = 100.0, **fields: Any) -> Ticket:
        self.count += 1
        return Ticket(
            f"{tenant}-{self.count}",
            tenant_id=tenant,
            priority=priority,
            work_tokens=work,
            arrived_at=self.now,
            **fields,
        )

    def add(self, tenant: str = "t", priority: int = 0, work: float = 100.0, **fields: Any) -> Ticket:
        ticket = self.ticket(tenant, priority, work, **fields)
        assert not self.queue.offer(ticket, self.now)
        return ticket

    def next(self, lane: str = "", *, is_held_back: bool = False) -> Ticket | None:
        """Who goes next where there is room; is_held_back: but not for the first band."""
        chosen = self.queue.lane(lane)
        first = chosen.first(self.now)
        return chosen.next(first, self.now, is_held_back=is_held_back) if first is not None else None

    def pop(self, lane: str = "") -> Ticket | None:
        ticket = self.next(lane)
        if ticket is not None:
            self.queue.went(ticket, ticket.work_tokens, self.now)
        return ticket

    def drain(self, count: int = 10_000) -> list[str]:
        """Ids in the order in which they go."""
        found = []
        while len(found) < count and (ticket := self.pop()) is not None:
            found.append(ticket.request_id)
        return found
