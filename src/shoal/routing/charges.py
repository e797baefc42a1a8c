"""What requests cost their tenants: budgets reserved at the door, and shares of the queue put right by the record.

Owns every reservation from the door until it is refunded or settled, and what was charged for each request in flight.
"""

import msgspec

from shoal.flow import Budgets, Queue, Reservation, Ticket
from shoal.flow.recent import Recent
from shoal.pool import Outcome, Request
from shoal.routing.books import ASSUMED_OUTPUT_TOKENS, Flight
from shoal.routing.tenancy import Standing


class _Charge(msgspec.Struct, eq=False, gc=False):
    """ticket: None when no queue is asked.  tokens: charged to the tenant's share at dispatch."""

    reservation: Reservation | None
    ticket: Ticket | None = None
    tokens: float = 0.0


class Charges:
    """One per request that holds a reservation, or is in flight and was charged to its tenant's share.

    recent: told what requests have used.
    """

    __slots__ = ("_by_id", "_recent", "budgets")

    def __init__(self, recent: Recent) -> None:
        self._recent = recent
        self.budgets = Budgets()
        self._by_id: dict[str, _Charge] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, request: Request, standing: Standing, now: float) -> float:
        """Reserve the budget of a request that has a payer.

        Returns 0.0, or the seconds until there is enough and then nothing is held.
        """
        asked = request.max_output_tokens
        output = min(asked, ASSUMED_OUTPUT_TOKENS) if asked is not None else ASSUMED_OUTPUT_TOKENS
        made = self.budgets.reserve(standing.payer, standing.allowance, float(request.prompt_tokens + output), now)
        if not isinstance(made, Reservation):
            return max(made, 1e-3)
        self._by_id[request.id] = _Charge(made)
        return 0.0

    def sent(self, flight: Flight, ticket: Ticket | None, queue: Queue | None, now: float) -> None:
        """Charge a request that goes to an endpoint with what it is thought to cost."""
        if ticket is None or queue is None:
            return
        tokens = max(1.0, flight.uncached_tokens + flight.output_tokens)
        charge = self._by_id.get(flight.request.id)
        if charge is None:
            self._by_id[flight.request.id] = _Charge(None, ticket, tokens)
        else:
            charge.ticket, charge.tokens = ticket, tokens
        queue.spent(ticket, tokens, now)

    def ticket(self, request_id: str) -> Ticket | None:
        """The ticket with which a request went; None for one that met no queue."""
        charge = self._by_id.get(request_id)
        return None if charge is None else charge.ticket

    def taken_back(self, flight: Flight, queue: Queue, now: float) -> None:
        """Give back what a request was charged that waits again; its budget stays reserved."""
        charge = self._by_id.get(flight.request.id)
        if charge is not None and charge.ticket is not None:
            queue.correct(charge.ticket, -charge.tokens, now)
            charge.ticket = None

    def dropped(self, request_id: str, now: float) -> None:
        """Refund a request that was not served."""
        charge = self._by_id.pop(request_id, None)
        if charge is not None and charge.reservation is not None:
            self.budgets.refund(charge.reservation, now)

    def closed(self, flight: Flight, queue: Queue | None, now: float) -> None:
        """Settle a request that was sent, by its record where there is one."""
        charge = self._by_id.pop(flight.request.id, None)
        if charge is None:
            return
        outcome = flight.outcome
        if outcome is None:
            # Nothing is known of it: what was reserved stays used.
            if charge.reservation is not None:
                self.budgets.commit(charge.reservation, charge.reservation.tokens, now)
            return
        prompt, uncached, completion = _used(flight, outcome)
        if charge.reservation is not None:
            if prompt + completion:
                self.budgets.commit(charge.reservation, prompt + completion, now)
            else:
                self.budgets.refund(charge.reservation, now)
        ticket = charge.ticket
        if ticket is not None and queue is not None:
            computed = uncached + completion
            queue.correct(ticket, computed - charge.tokens, now)
            if computed:
                self._recent.used(ticket.priority, ticket.tenant_id, ticket.weight, prompt + completion, computed, now)


def _used(flight: Flight, outcome: Outcome) -> tuple[float, float, float]:
    """Prompt tokens, those that were not cached, and completion tokens that a request really cost."""
    if not outcome.is_charged:
        return 0.0, 0.0, 0.0
    prompt = float(flight.request.prompt_tokens if outcome.prompt_tokens is None else outcome.prompt_tokens)
    uncached = flight.uncached_tokens if outcome.cached_tokens is None else max(0.0, prompt - outcome.cached_tokens)
    return prompt, uncached, float(outcome.completion_tokens or 0)
