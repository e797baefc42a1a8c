"""What the router says of itself, as plain values for the admin pages.

Owns the shape of a snapshot; several workers' snapshots are merged by `hosts.admin`.
"""

import math
from collections.abc import Callable

import msgspec

from shoal.pool import EndpointState
from shoal.pool.kvevents import KvState
from shoal.routing.fleet import Fleet, Floats, Member
from shoal.routing.flowstatus import FlowStatus as FlowStatus


class PeerGauges(msgspec.Struct, frozen=True, kw_only=True):
    """peers: those that are heard.  bookings: theirs, and those of lost ones.  ignored: news that could not be used."""

    peers: int = 0
    bookings: int = 0
    ignored: int = 0


class ReturnGauges(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions that said they will be back.  expected: now.  kept: sent back to their endpoint against the scores.
    spared: prompts of others that went elsewhere for their sake.  lost: those whose prefix was pushed out meanwhile."""

    expected: int = 0
    kept: int = 0
    spared: int = 0
    lost: int = 0


class EndpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint.  Totals and what is in flight are of this router, without its peers'; waiting, running and
    kv_usage_ratio are the engine's own.  cache: how far its KV events can be trusted.
    """

    id: str
    address: str
    state: EndpointState
    models: list[str]
    labels: dict[str, str]
    inflight_requests: int
    inflight_uncached_tokens: int
    waiting: float | None
    running: float | None
    kv_usage_ratio: float | None
    requests_total: int
    failures_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    ttft_s_avg: float | None
    reports_cached_tokens: bool | None
    prefill_tokens_per_s: float
    is_trial: bool
    cache: KvState


class LatencyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How well the latency of one model on one kind of machine is predicted.

    what: `ttft` or `tpot`.  records: outcomes compared.  mape, median_ratio: mean and median of |predicted - measured|
    over what was measured, of the last ones.  coverage_ratio: share that stayed below the predicted 0.9 quantile.
    """

    model: str
    kind: str
    what: str
    records: int
    mape: float
    median_ratio: float
    coverage_ratio: float
    is_trusted: bool


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole router.  unclosed: flights with an open booking or a missing record.  orphan_records: records of
    requests that this router does not know, such as those of the worker before it.  index_*: the estimated index;
    exact_*: the exact one, 0 without it.  peers: the other pickers."""

    endpoints: list[EndpointStatus]
    requests_total: int
    errors_total: int
    inflight: int
    unclosed: int
    orphan_records: int
    index_entries: int
    index_bytes: int
    index_budget_bytes: int
    exact_entries: int
    exact_bytes: int
    exact_budget_bytes: int
    warnings: list[str]
    peers: PeerGauges = PeerGauges()
    returns: ReturnGauges = ReturnGauges()
    latency: list[LatencyStatus] = []
    flow: FlowStatus = FlowStatus()


def own_requests(columns: dict[str, Floats], row: int) -> int:
    """Requests in flight on an endpoint that are this router's own."""
    return int(columns["inflight_requests"][row] - columns["peer_requests"][row])


def _own_tokens(columns: dict[str, Floats], row: int, uncached_tokens: int) -> int:
    """The own part of the prompt tokens that an endpoint has still to prefill: all are worked off at one pace."""
    booked = float(columns["booked_uncached_tokens"][row])
    return round(uncached_tokens * (1.0 - float(columns["peer_uncached_tokens"][row]) / booked)) if booked else 0


def known(value: float) -> float | None:
    """A column's figure, None where it is NaN."""
    return None if math.isnan(value) else float(value)


def state_of(member: Member, now: float) -> EndpointState:
    """The state to show: readiness, overlaid with an ejection."""
    if member.state is EndpointState.READY and member.health.ejected_until is not None:
        return EndpointState.HALF_OPEN if now >= member.health.ejected_until else EndpointState.EJECTED
    return member.state


def endpoint_status(
    member: Member, columns: dict[str, Floats], uncached_tokens: int, models: list[str], cache: KvState, now: float
) -> EndpointStatus:
    """One endpoint's row of the snapshot."""
    row = member.row
    return EndpointStatus(
        id=member.endpoint.id,
        address=member.endpoint.address,
        state=state_of(member, now),
        models=models,
        labels=member.endpoint.labels,
        inflight_requests=own_requests(columns, row),
        inflight_uncached_tokens=_own_tokens(columns, row, uncached_tokens),
        waiting=known(columns["waiting"][row]),
        running=known(columns["running"][row]),
        kv_usage_ratio=known(columns["kv_usage"][row]),
        requests_total=member.requests_total,
        failures_total=member.failures_total,
        prompt_tokens_total=member.prompt_tokens_total,
        cached_tokens_total=member.cached_tokens_total,
        ttft_s_avg=member.ttft_s_avg,
        reports_cached_tokens=member.reports_cached_tokens,
        prefill_tokens_per_s=1.0 / float(columns["prefill_s_per_token"][row]),
        is_trial=bool(columns["is_trial"][row]),
        cache=cache,
    )


def fleet_status(
    fleet: Fleet,
    uncached_tokens: Floats,
    names_at: Callable[[str], list[str]],
    cache_of: Callable[[str], KvState],
    now: float,
) -> list[EndpointStatus]:
    """Every endpoint's row."""
    columns = fleet.columns
    return [
        endpoint_status(
            each, columns, int(uncached_tokens[each.row]), names_at(each.endpoint.id), cache_of(each.endpoint.id), now
        )
        for each in fleet
    ]
