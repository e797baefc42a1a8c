"""What the gate says of itself, as plain values for the admin pages: bands, who waits, what tenants got of late.

Owns the shape of that part of a snapshot and how it is made up; several workers' are merged by `hosts.admin`.
"""

import msgspec

from shoal.flow import Queue
from shoal.flow.queue import BandLine
from shoal.flow.recent import BandRecord, Got, Recent

MAX_TENANTS_SHOWN = 50


class TenantShare(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant in one band.  weight: its due part against the others', None where that is not known.

    waiting: requests.  tokens_per_s: of late, of prompts and answers; computed_tokens_per_s: without cached ones.
    """

    tenant: str
    weight: float | None = None
    waiting: int = 0
    tokens_per_s: float = 0.0
    computed_tokens_per_s: float = 0.0


class BandStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One priority: what waits, and what was of late.

    max_*: 0 for no limit.  tenants: requests that wait, of those with most.  longest_s: how long the first of them has
    waited.  waits: of those that wait no more, how many by the class of their wait (`kernel.spans`).
    computed_tokens_per_s: of all tenants.  shares: of those that got or want most.
    """

    priority: int
    requests: int = 0
    size_bytes: int = 0
    max_requests: int = 0
    max_bytes: int = 0
    tenants: dict[str, int] = {}
    longest_s: float = 0.0
    waits: dict[int, int] = {}
    computed_tokens_per_s: float = 0.0
    shares: list[TenantShare] = []


class FlowStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The queue.  saturation: mean over the endpoints, 1 is full.  drain_per_s: requests that were sent of late.
    open_charges: requests that hold a reservation or a charge."""

    is_on: bool = False
    requests: int = 0
    size_bytes: int = 0
    max_requests: int = 0
    max_bytes: int = 0
    bands: list[BandStatus] = []
    saturation: float = 0.0
    drain_per_s: float = 0.0
    open_charges: int = 0


def flow_status(queue: Queue, recent: Recent, saturation: float, open_charges: int, now: float) -> FlowStatus:
    """The queue in plain values."""
    records = recent.bands(now)
    priorities = sorted({*queue.occupancy(), *records}, reverse=True)
    return FlowStatus(
        is_on=True,
        requests=len(queue),
        size_bytes=queue.size_bytes,
        max_requests=queue.policy.max_requests,
        max_bytes=queue.policy.max_bytes,
        bands=[_band(queue, priority, records.get(priority, _NOTHING), now) for priority in priorities],
        saturation=saturation,
        drain_per_s=queue.drain_per_s(now),
        open_charges=open_charges,
    )


def _band(queue: Queue, priority: int, record: BandRecord, now: float) -> BandStatus:
    held, line = queue.occupancy().get(priority), queue.waiting(priority)
    policy = queue.policy.of(priority)
    most = sorted(line.requests.items(), key=lambda item: (-item[1], item[0]))
    return BandStatus(
        priority=priority,
        requests=held.requests if held is not None else 0,
        size_bytes=held.size_bytes if held is not None else 0,
        max_requests=policy.max_requests,
        max_bytes=policy.max_bytes,
        tenants=dict(most[:MAX_TENANTS_SHOWN]),
        longest_s=0.0 if line.since is None else max(0.0, now - line.since),
        waits=dict(record.waits),
        computed_tokens_per_s=record.total.computed_tokens_per_s,
        shares=_shares(line, record)[:MAX_TENANTS_SHOWN],
    )


def _shares(line: BandLine, record: BandRecord) -> list[TenantShare]:
    """Everybody who waits or got something, those first that got most."""
    shares = [
        TenantShare(
            tenant=name,
            weight=line.weights.get(name, record.weights.get(name)),
            waiting=line.requests.get(name, 0),
            tokens_per_s=got.tokens_per_s,
            computed_tokens_per_s=got.computed_tokens_per_s,
        )
        for name in {**record.tenants, **line.requests}
        for got in (record.tenants.get(name, Got()),)
    ]
    return sorted(shares, key=lambda each: (-each.computed_tokens_per_s, -each.waiting, each.tenant))


_NOTHING = BandRecord({}, Got(), {}, {})
