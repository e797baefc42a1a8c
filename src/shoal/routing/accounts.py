"""The account of a request that was forwarded and is over.

Owns which facts of a flight the hosts get to log, count and trace; no prompt text is among them.
"""

from shoal.pool import Outcome
from shoal.routing.books import Flight
from shoal.routing.commands import Account


def account_of(flight: Flight) -> Account:
    """Return the account of a flight whose record is there, or will not come."""
    request, outcome, served_id = flight.request, flight.outcome, flight.served_id
    return Account(
        request_id=request.id,
        client_id=request.client_id,
        api=request.api,
        model=request.model,
        target_model=flight.target_model,
        tenant_id=request.tenant_id,
        endpoint_id=served_id,
        is_streaming=request.is_streaming,
        arrived_at=flight.arrived_at,
        queue_s=flight.dispatched_at - flight.arrived_at,
        prompt_tokens=request.prompt_tokens,
        predicted_cached_tokens=flight.predicted_tokens,
        outcome=outcome or Outcome(),
        trace_parent=request.headers.get("traceparent", ""),
        is_moved=bool(served_id) and served_id != flight.decision.chosen[0],
        is_recorded=outcome is not None,
        priority=flight.priority,
        forecast=flight.noted.forecast if flight.noted is not None else None,
    )
