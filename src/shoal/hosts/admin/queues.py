"""The queues of several workers, as one.

Owns their shape in a snapshot and the sums: each worker has a queue of its own, so what waits and what tenants got adds
up; all see the same endpoints, so how full those are does not.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from shoal.kernel.spans import quantile_s


class TenantPicture(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant in one band.  weight: its due part against the others', None where that is not known.

    waiting: requests.  tokens_per_s: in the last minute, of prompts and answers; computed_tokens_per_s: without those
    that a cache held.  share_ratio: of the computed ones of the band, 0 to 1; None where there were none.
    """

    tenant: str = ""
    weight: float | None = None
    waiting: int = 0
    tokens_per_s: float = 0.0
    computed_tokens_per_s: float = 0.0
    share_ratio: float | None = None


class BandPicture(msgspec.Struct, frozen=True, kw_only=True):
    """One priority.

    tenants: requests that wait, of those with most.  longest_s: how long the first of them has waited.  waits: of the
    requests of the last minute that wait no more, how many by the class of their wait (`kernel.spans`).  wait_p*_s:
    quantiles of those, None where there were none.  shares: of the tenants that got or want most.
    """

    priority: int = 0
    requests: int | float = 0
    size_bytes: int | float = 0
    tenants: dict[str, int] = {}
    longest_s: float = 0.0
    waits: dict[int, int] = {}
    wait_p50_s: float | None = None
    wait_p95_s: float | None = None
    computed_tokens_per_s: float = 0.0
    shares: list[TenantPicture] = []


class FlowPicture(msgspec.Struct, frozen=True, kw_only=True):
    """What waits.  is_on: whether anything may.  saturation: mean over the endpoints, 1 is full.  drain_per_s: requests
    that were sent of late."""

    is_on: bool = False
    requests: int | float = 0
    size_bytes: int | float = 0
    saturation: float = 0.0
    drain_per_s: float = 0.0
    bands: list[BandPicture] = []


def merge_flows(flows: Iterable[FlowPicture]) -> FlowPicture:
    """Return the queue of the whole pool, the highest priority first."""
    heard = [flow for flow in flows if flow.is_on]
    if not heard:
        return FlowPicture()
    bands: dict[int, list[BandPicture]] = {}
    for flow in heard:
        for band in flow.bands:
            bands.setdefault(band.priority, []).append(band)
    return FlowPicture(
        is_on=True,
        requests=sum(flow.requests for flow in heard),
        size_bytes=sum(flow.size_bytes for flow in heard),
        saturation=max(flow.saturation for flow in heard),
        drain_per_s=sum(flow.drain_per_s for flow in heard),
        bands=[_merged(priority, bands[priority]) for priority in sorted(bands, reverse=True)],
    )


def _merged(priority: int, bands: list[BandPicture]) -> BandPicture:
    tenants: Counter[str] = Counter()
    waits: Counter[int] = Counter()
    for band in bands:
        tenants.update(band.tenants)
        waits.update(band.waits)
    return BandPicture(
        priority=priority,
        requests=sum(band.requests for band in bands),
        size_bytes=sum(band.size_bytes for band in bands),
        tenants=dict(tenants.most_common()),
        longest_s=max(band.longest_s for band in bands),
        waits=dict(sorted(waits.items())),
        wait_p50_s=quantile_s(waits, 0.5),
        wait_p95_s=quantile_s(waits, 0.95),
        computed_tokens_per_s=sum(band.computed_tokens_per_s for band in bands),
        shares=_shares(bands),
    )


def _shares(bands: list[BandPicture]) -> list[TenantPicture]:
    """Each tenant over all workers, those first that got most."""
    views: dict[str, list[TenantPicture]] = {}
    for band in bands:
        for share in band.shares:
            views.setdefault(share.tenant, []).append(share)
    total = sum(band.computed_tokens_per_s for band in bands)
    shares = [_share(tenant, each, total) for tenant, each in views.items()]
    return sorted(shares, key=lambda each: (-each.computed_tokens_per_s, -each.waiting, each.tenant))


def _share(tenant: str, views: list[TenantPicture], total_per_s: float) -> TenantPicture:
    computed_per_s = sum(view.computed_tokens_per_s for view in views)
    return TenantPicture(
        tenant=tenant,
        weight=next((view.weight for view in views if view.weight is not None), None),
        waiting=sum(view.waiting for view in views),
        tokens_per_s=sum(view.tokens_per_s for view in views),
        computed_tokens_per_s=computed_per_s,
        share_ratio=computed_per_s / total_per_s if total_per_s else None,
    )
