"""What a client is told whose request the gate does not let through, and when it may come again.

Owns the words.  How long a wait is taken to be is the queue's say, and `comebacks`' where nobody waits.
"""

import math

import msgspec

from shoal.pool import Refusal, RefusalReason, Request

ABORTED = Refusal(
    reason=RefusalReason.ABORTED, message="The operator of this pool has ended the requests of this session."
)
EVICTED = Refusal(
    reason=RefusalReason.EVICTED,
    message="A request of a higher priority needed the place of this one; try again later.",
)
NOWHERE = Refusal(
    reason=RefusalReason.PRECONDITION_FAILED,
    message="No endpoint that can take the request now holds any of its prompt (`Prefer: if-available`).",
)
_COMES_AGAIN = (RefusalReason.EVICTED, RefusalReason.NOT_ADMITTED)
_NOBODY_S = 1.0
"""Nothing is measured of an endpoint that is not there."""


def over_budget(request: Request, wait_s: float) -> Refusal:
    """The budget of its tenant is used up.  wait_s: until there is enough."""
    return Refusal(
        reason=RefusalReason.OVER_BUDGET,
        message=f"The budget of {request.tenant_id or 'this client'} is used up for {math.ceil(wait_s)} s.",
        retry_after_s=wait_s,
    )


def full(what: str, wait_s: float | None) -> Refusal:
    """As many wait as may.  what: that is full."""
    message = f"The pool is full, and so are the {what}; try again later."
    return Refusal(reason=RefusalReason.SATURATED, message=message, retry_after_s=wait_s)


def nobody(message: str) -> Refusal:
    """There is no endpoint."""
    return Refusal(reason=RefusalReason.NO_ENDPOINTS, message=message, retry_after_s=_NOBODY_S)


def gave_up(waited_s: float, wait_s: float | None) -> Refusal:
    """Its time is over.  wait_s: how long it would have to wait if it came now."""
    return Refusal(
        reason=RefusalReason.TTL_EXPIRED,
        message=f"The request waited {waited_s:.1f} s in the queue and there was no room for it.",
        retry_after_s=wait_s,
    )


def behind(refusal: Refusal, wait_s: float | None) -> Refusal:
    """Have one that was sent away, and would wait if it came again, come when those ahead of it have gone.

    wait_s: until then.  Other refusals stay as they are.
    """
    longest_s = max(wait_s or 0.0, refusal.retry_after_s or 0.0)
    if refusal.reason not in _COMES_AGAIN or not longest_s:
        return refusal
    return msgspec.structs.replace(refusal, retry_after_s=longest_s)


def failed(error: Exception) -> Refusal:
    """Its request waited and then met a plugin's fault."""
    return Refusal(reason=RefusalReason.INTERNAL, message=f"a plugin failed: {type(error).__name__}")
