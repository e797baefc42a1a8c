"""One request in the queue, and the line of one tenant's requests in its order.

Owns how a line finds its head: a heap from which those that left are dropped when they come up, so that neither
joining nor leaving looks at more than a few others.  Whose line goes next is `fairness`.
"""

import heapq
import math


class Ticket:
    """A request that waits, or is about to be sent at once.

    lane: those whose requests can go to the same endpoints.  weight: its tenant's.  size_bytes: of its body.
    work_tokens: tokens that it is thought to cost.  ttl_s: how long it waits at most; infinite for as long as it takes.
    deadline: when its client stops waiting, infinite when it did not say.  slo_ttft_s: the time to first token that its
    client asks for, infinite without.  is_follow_up: a later turn of a session that is under way.  item: its owner's.
    """

    __slots__ = (
        "arrived_at",
        "deadline",
        "is_follow_up",
        "is_live",
        "item",
        "key",
        "lane",
        "number",
        "priority",
        "request_id",
        "size_bytes",
        "slo_ttft_s",
        "tenant_id",
        "ttl_s",
        "weight",
        "work_tokens",
    )

    def __init__(
        self,
        request_id: str,
        *,
        lane: str = "",
        priority: int = 0,
        tenant_id: str = "",
        weight: float = 1.0,
        size_bytes: int = 0,
        work_tokens: float = 1.0,
        arrived_at: float = 0.0,
        ttl_s: float = math.inf,
        deadline: float = math.inf,
        slo_ttft_s: float = math.inf,
        is_follow_up: bool = False,
        item: object = None,
    ) -> None:
        self.request_id = request_id
        self.lane = lane
        self.priority = priority
        self.tenant_id = tenant_id
        self.weight = weight
        self.size_bytes = size_bytes
        self.work_tokens = work_tokens
        self.arrived_at = arrived_at
        self.ttl_s = ttl_s
        self.deadline = deadline
        self.slo_ttft_s = slo_ttft_s
        self.is_follow_up = is_follow_up
        self.item = item
        self.number = 0
        self.key = 0.0
        self.is_live = False


class Line:
    """The requests of one tenant in one band, the one with the smallest key first; of equals the earlier one."""

    __slots__ = ("_dead", "_heap", "size", "tenant_id", "weight")

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.weight = 1.0
        self.size = 0
        self._heap: list[tuple[float, int, Ticket]] = []
        self._dead = 0

    def push(self, ticket: Ticket) -> None:
        """Add a ticket that has its key and number."""
        heapq.heappush(self._heap, (ticket.key, ticket.number, ticket))
        self.weight = ticket.weight
        self.size += 1

    def head(self) -> Ticket | None:
        """The ticket that goes next, None when the line is empty."""
        heap = self._heap
        while heap:
            ticket = heap[0][2]
            if ticket.is_live:
                return ticket
            heapq.heappop(heap)
            self._dead -= 1
        return None

    def left(self) -> None:
        """Note that one of its tickets is live no more."""
        self.size -= 1
        self._dead += 1
        if self._dead > 64 and self._dead > self.size:
            self._heap = [entry for entry in self._heap if entry[2].is_live]
            heapq.heapify(self._heap)
            self._dead = 0

    def tickets(self) -> list[Ticket]:
        """All live tickets, in no order."""
        return [entry[2] for entry in self._heap if entry[2].is_live]
