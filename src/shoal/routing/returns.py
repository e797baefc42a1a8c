"""Sessions that said they will be back: their endpoint is preferred for the time that they gave.

Owns which session is expected where, and until when; and the answer to a client that wants its prefix or nothing.  An
agent whose tool runs for a second comes back to a cache that holds all it said; without this an equal match elsewhere,
or a moment of load, would send it away.
"""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from shoal.pool import Decision, FleetView, Outcome, Refusal, RefusalReason, Request
from shoal.routing.books import Flight
from shoal.routing.fleet import Member

MAX_SESSIONS = 50_000
"""About 15 MB; the oldest promise gives way."""

Session = tuple[str, str]
"""(tenant, session id)."""

KEPT = ": kept for its session"


class Promise(NamedTuple):
    """Where a session is expected, until when, and which request said so."""

    endpoint_id: str
    until: float
    request_id: str


class Returns:
    """Promises by session.  max_wait_s: how much longer than elsewhere a session may have to wait for its endpoint."""

    __slots__ = ("_expected", "max_wait_s")

    def __init__(self, max_wait_s: float) -> None:
        self.max_wait_s = max_wait_s
        self._expected: OrderedDict[Session, Promise] = OrderedDict()

    def __len__(self) -> int:
        return len(self._expected)

    def ended(self, flight: Flight, now: float) -> None:
        """Note from when on a session is expected back, if it said so; to be called before its booking is released."""
        request, outcome = flight.request, flight.outcome
        hints, member = request.hints, flight.member
        if hints is None or hints.returns_within_s is None or not request.session_id or member is None:
            return
        if outcome is not None and not outcome.is_prefilled:
            return
        key = (request.tenant_id, request.session_id)
        self._expected[key] = Promise(member.endpoint.id, now + hints.returns_within_s, request.id)
        self._expected.move_to_end(key)
        if len(self._expected) > MAX_SESSIONS:
            self._expected.popitem(last=False)

    def recorded(self, flight: Flight, outcome: Outcome, served: Member | None) -> None:
        """Put a promise right by the record: kept where the answer was `served`, nowhere when none was."""
        key = (flight.request.tenant_id, flight.request.session_id)
        promise = self._expected.get(key)
        if promise is None or promise.request_id != flight.request.id:
            return
        if not outcome.is_prefilled:
            del self._expected[key]
        elif served is not None:
            self._expected[key] = promise._replace(endpoint_id=served.endpoint.id)

    def keep(self, request: Request, decision: Decision, view: FleetView, now: float) -> Decision:
        """Return the decision with the endpoint of a session that is back in time first, unless it is too busy.

        view: the candidates before any filter.
        """
        if not self._expected or not request.session_id:
            return decision
        promise = self._expected.pop((request.tenant_id, request.session_id), None)
        if promise is None or now > promise.until:
            return decision
        endpoint_id, chosen = promise.endpoint_id, decision.chosen
        if endpoint_id == chosen[0] or endpoint_id not in decision.candidates:
            return decision
        wait_s = waits_s(view)
        rows = {endpoint.id: row for row, endpoint in enumerate(view.endpoints)}
        if wait_s[rows[endpoint_id]] - wait_s[rows[chosen[0]]] > self.max_wait_s:
            return decision
        others = [name for name in chosen if name != endpoint_id]
        kept = (endpoint_id, *others)[: max(len(chosen), 1)]
        return decision._replace(profile=decision.profile + KEPT, chosen=kept)


def waits_s(view: FleetView) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return how long a request would wait on each candidate: as predicted, else for the prefill that is booked."""
    name = "predicted_ttft_s" if view.has("predicted_ttft_s") else "inflight_prefill_s"
    return np.asarray(view.column(name), np.float64)


def is_conditional(request: Request) -> bool:
    """Whether a client wants its prefix or nothing: `Prefer: if-available` (RFC 7240)."""
    prefer = request.headers.get("prefer", "")
    return any(each.partition(";")[0].strip().lower() == "if-available" for each in prefer.split(","))


def holders(view: FleetView) -> FleetView | Refusal:
    """Return the candidates that hold any of the prompt's prefix, or the refusal where none does."""
    mask = view.column("held_tokens") > 0
    if mask.any():
        return view if mask.all() else view.keep(mask)
    return Refusal(
        reason=RefusalReason.PRECONDITION_FAILED,
        message="No endpoint that can take the request now holds any of its prompt (`Prefer: if-available`).",
    )
