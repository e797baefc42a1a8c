"""Ejection of endpoints that fail, and their way back through one probe at a time.

Owns the count of consecutive failures of an endpoint and when it may be tried again.  Readiness (is the engine up
at all) is told by events; this is about engines that are up and fail.
"""

from typing import Protocol


class EjectionPolicy(Protocol):
    """The settings that this module reads (`routing.config`)."""

    @property
    def failures(self) -> int: ...
    @property
    def base_s(self) -> float: ...
    @property
    def max_s(self) -> float: ...


class Health:
    """Consecutive failures of one endpoint.

    ejected_until: time from which one probe request is let through; None while it is healthy.
    """

    __slots__ = ("ejected_until", "ejections", "failures")

    def __init__(self) -> None:
        self.failures = 0
        self.ejections = 0
        self.ejected_until: float | None = None

    def succeeded(self) -> bool:
        """Note an answer of the engine (4xx included); returns whether that ended an ejection."""
        if not self.failures and self.ejected_until is None and not self.ejections:
            return False
        was_ejected = self.ejected_until is not None
        self.failures = 0
        self.ejections = 0
        self.ejected_until = None
        return was_ejected

    def failed(self, policy: EjectionPolicy, now: float) -> bool:
        """Note a failure of the engine; returns whether the endpoint is (again) ejected by it."""
        self.failures += 1
        is_failed_probe = self.ejected_until is not None and now >= self.ejected_until
        if not is_failed_probe and (self.ejected_until is not None or self.failures < policy.failures):
            return False
        self.ejected_until = now + min(policy.base_s * 2.0 ** min(self.ejections, 30), policy.max_s)
        self.ejections += 1
        return True

    def is_offered(self, now: float, inflight_requests: float) -> bool:
        """Whether a request may go there: healthy, or half-open with no probe under way."""
        return self.ejected_until is None or (now >= self.ejected_until and inflight_requests <= 0)
