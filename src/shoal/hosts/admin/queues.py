"""The queues of several workers, as one.

Owns their shape in a snapshot and the sums: each worker has a queue of its own, so what waits adds up; all see the same
endpoints, so how full those are does not.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec


class BandPicture(msgspec.Struct, frozen=True, kw_only=True):
    """What waits of one priority.  tenants: requests of those with most."""

    priority: int = 0
    requests: int | float = 0
    size_bytes: int | float = 0
    tenants: dict[str, int] = {}


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
    if len(heard) < 2:
        return heard[0] if heard else FlowPicture()
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
    for band in bands:
        tenants.update(band.tenants)
    return BandPicture(
        priority=priority,
        requests=sum(band.requests for band in bands),
        size_bytes=sum(band.size_bytes for band in bands),
        tenants=dict(tenants.most_common()),
    )
