"""What requests cost their tenants: budgets reserved at the door, and shares of the queue put right by the record.

Owns every reservation from the door until it is refunded or settled, and what each request in flight was charged.
"""

from shoal.flow import Budgets, Queue, Reservation, Ticket
from shoal.flow.recent import Recent
from shoal.pool import Request
from shoal.routing.books import ASSUMED_OUTPUT_TOKENS, Flight
from shoal.routing.tenancy import Standing


class Charges:
    """Reservations by request; what was charged to its tenant's share stands on a request's ticket.

    recent: told how long requests waited and what they have used.
    """

    __slots__ = ("_charged", "_recent", "_reserved", "budgets")

    def __init__(self, recent: Recent) -> None:
        self._recent = recent
        self.budgets = Budgets()
        self._reserved: dict[str, Reservation] = {}
        self._charged = 0

    def __len__(self) -> int:
        """How many reservations and charges are open."""
        return len(self._reserved) + self._charged

    def open(self, request: Request, standing: Standing, now: float) -> float:
        """Reserve the budget of a request that has a payer.

        Returns 0.0, or the seconds until there is enough and then nothing is held.
        """
        asked = request.max_output_tokens
        output = min(asked, ASSUMED_OUTPUT_TOKENS) if asked is not None else ASSUMED_OUTPUT_TOKENS
        made = self.budgets.reserve(standing.payer, standing.allowance, float(request.prompt_tokens + output), now)
        if not isinstance(made, Reservation):
            return max(made, 1e-3)
        self._reserved[request.id] = made
        return 0.0

    def sent(self, flight: Flight, ticket: Ticket, queue: Queue, now: float) -> None:
        """Charge a request that goes to an endpoint with what it is thought to cost."""
        ticket.charged_tokens = tokens = max(1.0, flight.uncached_tokens + flight.output_tokens)
        self._charged += 1
        queue.went(ticket, tokens, now)
        self._recent.waited(ticket.priority, now - ticket.arrived_at, now)

    def taken_back(self, flight: Flight, queue: Queue, now: float) -> None:
        """Give back what a request was charged that waits again; its budget stays reserved."""
        ticket = flight.ticket
        if ticket is not None and ticket.charged_tokens:
            self._charged -= 1
            queue.correct(ticket, -ticket.charged_tokens, now)

    def dropped(self, request_id: str, now: float) -> None:
        """Refund a request that was not served."""
        reservation = self._reserved.pop(request_id, None) if self._reserved else None
        if reservation is not None:
            self.budgets.refund(reservation, now)

    def closed(self, flight: Flight, queue: Queue | None, now: float) -> None:
        """Settle a request that was sent, by its record where there is one."""
        ticket, outcome = flight.ticket, flight.outcome
        reservation = self._reserved.pop(flight.request.id, None) if self._reserved else None
        charged = 0.0 if ticket is None else ticket.charged_tokens
        if charged:
            self._charged -= 1
        if outcome is None:
            # Nothing is known of it: what was reserved stays used.
            if reservation is not None:
                self.budgets.commit(reservation, reservation.tokens, now)
            return
        prompt = uncached = completion = 0.0
        if outcome.is_charged:
            known, cached = outcome.prompt_tokens, outcome.cached_tokens
            prompt = flight.request.prompt_tokens if known is None else known
            uncached = flight.uncached_tokens if cached is None else max(0.0, prompt - cached)
            completion = outcome.completion_tokens or 0.0
        if reservation is not None:
            if prompt + completion:
                self.budgets.commit(reservation, prompt + completion, now)
            else:
                self.budgets.refund(reservation, now)
        if charged and ticket is not None and queue is not None:
            computed = uncached + completion
            queue.correct(ticket, computed - charged, now)
            if computed:
                self._recent.used(ticket.priority, ticket.tenant_id, ticket.weight, prompt + completion, computed, now)
