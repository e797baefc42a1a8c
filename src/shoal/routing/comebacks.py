"""When a client that is turned away should come back, by what the endpoints were seen to get done.

Owns that figure where no queue tells it; who has to wait behind others is told by how fast their queue drains.
"""

from shoal.flow.drain import MAX_WAIT_S
from shoal.pool import FleetView
from shoal.routing.fleet import Fleet

UNKNOWN_S = 1.0
"""Where no endpoint has ended a request yet, and none has work."""
_MOST_ASKED = 64
"""Of a larger fleet so many endpoints are asked, evenly over it."""


def comeback_s(fleet: Fleet, view: FleetView, now: float) -> float:
    """Return the seconds until a candidate may take what none takes now, above 0 and at most `MAX_WAIT_S`.

    That is when one of them is through with the prompts that are booked there, and a request has ended on any.
    """
    members = fleet.rows if view.rows is None else [fleet.rows[row] for row in view.rows.tolist()]
    asked = members[:: -(-len(members) // _MOST_ASKED)]
    rate = sum(member.ends.per_s(now) for member in asked) * len(members) / len(asked)
    backlog_s = float(view.column("inflight_prefill_s").min())
    wait_s = max(backlog_s, 1.0 / rate if rate > 0.0 else 0.0)
    return min(wait_s, MAX_WAIT_S) or UNKNOWN_S
