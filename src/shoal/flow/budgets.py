"""What each tenant may take: requests per second and tokens per minute, reserved at the door and settled at the end.

Owns the buckets.  A reservation is taken back in full when the request was not served, and put right by what was
measured when it was; either ends it, so that a bucket is full again once nothing is under way.
"""

from typing import NamedTuple

MAX_TENANTS = 10_000
MINUTE_S = 60.0


class Allowance(NamedTuple):
    """Limits of one tenant, 0 for none.  burst_requests: how many may come at once, 0 for those of one second."""

    requests_per_s: float = 0.0
    tokens_per_min: float = 0.0
    burst_requests: float = 0.0


class Reservation(NamedTuple):
    """What one request took from its tenant's buckets."""

    tenant_id: str
    requests: float
    tokens: float


class _Bucket:
    """left: what may still be taken; below 0 when more was used than reserved."""

    __slots__ = ("at", "capacity", "left", "per_s")

    def __init__(self, capacity: float, per_s: float, now: float) -> None:
        self.capacity = capacity
        self.per_s = per_s
        self.left = capacity
        self.at = now

    def fill(self, now: float) -> None:
        self.left = min(self.capacity, self.left + (now - self.at) * self.per_s)
        self.at = now

    def scale(self, ratio: float) -> None:
        self.capacity *= ratio
        self.per_s *= ratio
        self.left *= ratio

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there; what is more than a full bucket needs a full one."""
        missing = min(amount, self.capacity) - self.left
        return missing / self.per_s if missing > 1e-9 else 0.0


class Budgets:
    """The buckets of tenants that have limits."""

    __slots__ = ("_buckets", "_share_ratio")

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[Allowance, _Bucket | None, _Bucket | None]] = {}
        self._share_ratio = 1.0

    def share(self, ratio: float) -> None:
        """Take this part of every limit, 0 to 1: pickers that share a pool share its budgets."""
        change, self._share_ratio = ratio / self._share_ratio, ratio
        if change == 1.0:
            return
        for _, *buckets in self._buckets.values():
            for bucket in buckets:
                if bucket is not None:
                    bucket.scale(change)

    def reserve(self, tenant_id: str, allowance: Allowance, tokens: float, now: float) -> Reservation | float:
        """Take one request and its tokens, or return the seconds until there is enough."""
        if not (allowance.requests_per_s or allowance.tokens_per_min):
            return Reservation(tenant_id, 0.0, 0.0)
        _, requests, volume = self._of(tenant_id, allowance, now)
        waits = [0.0]
        if requests is not None:
            requests.fill(now)
            waits.append(requests.wait_s(1.0))
        if volume is not None:
            volume.fill(now)
            waits.append(volume.wait_s(tokens))
        if max(waits) > 0.0:
            return max(waits)
        if requests is not None:
            requests.left -= 1.0
        if volume is not None:
            volume.left -= tokens
        return Reservation(tenant_id, float(requests is not None), tokens if volume is not None else 0.0)

    def refund(self, reservation: Reservation, now: float) -> None:
        """Give all of it back: the request was not served."""
        self._give(reservation.tenant_id, reservation.requests, reservation.tokens, now)

    def commit(self, reservation: Reservation, tokens: float, now: float) -> None:
        """Settle a request that was served: what it did not use comes back, what it used beyond is owed."""
        if reservation.tokens:
            self._give(reservation.tenant_id, 0.0, reservation.tokens - tokens, now)

    def left(self, tenant_id: str, now: float) -> tuple[float | None, float | None]:
        """Requests and tokens that a tenant may still take, None where it has no limit or was never seen."""
        _, requests, volume = self._buckets.get(tenant_id, (None, None, None))
        for bucket in (requests, volume):
            if bucket is not None:
                bucket.fill(now)
        return requests.left if requests else None, volume.left if volume else None

    def _give(self, tenant_id: str, requests: float, tokens: float, now: float) -> None:
        _, by_request, by_token = self._buckets.get(tenant_id, (None, None, None))
        for bucket, amount in ((by_request, requests), (by_token, tokens)):
            if bucket is not None and amount:
                bucket.fill(now)
                bucket.left = min(bucket.capacity, bucket.left + amount)

    def _of(self, tenant_id: str, allowance: Allowance, now: float) -> tuple[Allowance, _Bucket | None, _Bucket | None]:
        found = self._buckets.get(tenant_id)
        if found is None or found[0] != allowance:
            if len(self._buckets) >= MAX_TENANTS:
                self._drop_full(now)
            ratio = self._share_ratio
            per_s, per_min = allowance.requests_per_s * ratio, allowance.tokens_per_min * ratio
            burst = max(1.0, (allowance.burst_requests or allowance.requests_per_s) * ratio)
            found = self._buckets[tenant_id] = (
                allowance,
                _Bucket(burst, per_s, now) if per_s else None,
                _Bucket(per_min, per_min / MINUTE_S, now) if per_min else None,
            )
        return found

    def _drop_full(self, now: float) -> None:
        """Forget tenants whose buckets are full, which is what a new one has; all when none is."""
        kept = {}
        for name, entry in self._buckets.items():
            for bucket in entry[1:]:
                if bucket is not None:
                    bucket.fill(now)
            if any(bucket is not None and bucket.left < bucket.capacity for bucket in entry[1:]):
                kept[name] = entry
        self._buckets = kept if len(kept) < MAX_TENANTS else {}
