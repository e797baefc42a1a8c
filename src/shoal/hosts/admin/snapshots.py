"""Snapshots of several workers, as one picture of the pool.

Owns the shape of a worker's snapshot and the sums over workers.  Every worker sees the same fleet and the same
scraped signals, but books only its own requests: so books add up and signals do not.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from shoal.hosts.admin.queues import FlowPicture

_LEAST_KNOWN_FIRST = ("stale", "catching-up", "none", "fresh")
_PEER_WORST_FIRST = ("lost", "silent", "catching-up", "heard")
_WORST_FIRST = ("draining", "paused", "loading", "ejected", "half-open", "ready")


class EndpointPicture(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one endpoint.

    inflight_*, *_total: own books, counted at dispatch.  waiting, running, kv_usage_ratio: scraped, None unknown.
    ttft_s_avg: mean over the requests served.  reports_cached_tokens: None until an answer told.
    prefill_tokens_per_s: learned speed of uncached prompt tokens.  is_trial: still tried out with bounded traffic.
    states: state -> number of workers, only when they do not agree.  reason: why it is not ready, "" when it is.
    cache: how far its KV events can be trusted, as the worst informed worker sees it; `none` when it has none.
    """

    id: str
    address: str = ""
    state: str = ""
    reason: str = ""
    models: list[str] = []
    inflight_requests: int | float = 0
    inflight_uncached_tokens: int | float = 0
    waiting: float | None = None
    running: float | None = None
    kv_usage_ratio: float | None = None
    requests_total: int | float = 0
    failures_total: int | float = 0
    prompt_tokens_total: int | float = 0
    cached_tokens_total: int | float = 0
    ttft_s_avg: float | None = None
    reports_cached_tokens: bool | None = None
    labels: dict[str, str] = {}
    prefill_tokens_per_s: float | None = None
    is_trial: bool = False
    cache: str = "none"
    states: dict[str, int] = {}


class SharedPicture(msgspec.Struct, frozen=True, kw_only=True):
    """Another picker, as one worker hears it or as all of the pool's do.

    state: `silent`, `catching-up`, `heard` or `lost`.  age_s: of its last word, the oldest over workers.  gaps,
    skipped: messages of it that did not come and that could not be read, summed.  heard_by: workers that hear it.
    """

    address: str = ""
    name: str = ""
    run: str = ""
    state: str = ""
    age_s: float | None = None
    gaps: int = 0
    skipped: int = 0
    heard_by: int = 1


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker says about itself and the fleet."""

    picker: str = ""
    pid: int = 0
    uptime_s: float = 0.0
    endpoints: list[EndpointPicture] = []
    requests_total: int | float = 0
    inflight: int | float = 0
    errors_total: int | float = 0
    unclosed: int | float = 0
    index_entries: int | float = 0
    index_bytes: int | float = 0
    index_budget_bytes: int | float = 0
    warnings: list[str] = []
    flow: FlowPicture = FlowPicture()
    peers: list[SharedPicture] = []


class WorkerPicture(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as its supervisor sees it.  is_answering: whether its figures are in the sums."""

    picker: str
    pid: int | None = None
    state: str = ""
    uptime_s: float = 0.0
    restarts: int = 0
    requests_total: int | float = 0
    inflight: int | float = 0
    is_answering: bool = True


class PoolPicture(msgspec.Struct, frozen=True, kw_only=True):
    """The pool as one: what `/snapshot` answers and `shoal status` shows.

    is_partial: a worker did not answer, so the sums are too small.  at_s: seconds since the pool started.
    """

    url: str = ""
    pid: int = 0
    version: str = ""
    at_s: float = 0.0
    run_dir: str = ""
    is_ready: bool = False
    is_partial: bool = False
    workers: list[WorkerPicture] = []
    endpoints: list[EndpointPicture] = []
    requests_total: int | float = 0
    inflight: int | float = 0
    errors_total: int | float = 0
    warnings: list[str] = []
    flow: FlowPicture = FlowPicture()
    peers: list[SharedPicture] = []


def left_behind(earlier: Snapshot, last: Snapshot) -> Snapshot:
    """Return what workers that are gone had counted, after one more is gone whose last snapshot is `last`."""
    endpoints = [
        EndpointPicture(
            id=each.id,
            requests_total=each.requests_total,
            failures_total=each.failures_total,
            prompt_tokens_total=each.prompt_tokens_total,
            cached_tokens_total=each.cached_tokens_total,
        )
        for each in merge_endpoints([earlier, last])
    ]
    return Snapshot(
        endpoints=endpoints,
        requests_total=earlier.requests_total + last.requests_total,
        errors_total=earlier.errors_total + last.errors_total,
    )


def add_left_behind(endpoints: list[EndpointPicture], left: Snapshot) -> list[EndpointPicture]:
    """Return the endpoints with what workers that are gone had counted on them; those that left stay away."""
    counted = {each.id: each for each in left.endpoints}
    return [_added(each, counted[each.id]) if each.id in counted else each for each in endpoints]


def merge_endpoints(snapshots: Sequence[Snapshot]) -> list[EndpointPicture]:
    """Return one picture per endpoint over all workers, sorted by id."""
    groups: dict[str, list[EndpointPicture]] = {}
    for snapshot in snapshots:
        for endpoint in snapshot.endpoints:
            groups.setdefault(endpoint.id, []).append(endpoint)
    return [_merge_endpoint(groups[endpoint_id]) for endpoint_id in sorted(groups)]


def merge_warnings(snapshots: Sequence[Snapshot]) -> list[str]:
    """Return each warning once, in order of first sight."""
    return list(dict.fromkeys(warning for snapshot in snapshots for warning in snapshot.warnings))


def merge_peers(snapshots: Sequence[Snapshot]) -> list[SharedPicture]:
    """Return one picture per peer over all workers, sorted by name."""
    groups: dict[tuple[str, str], list[SharedPicture]] = {}
    for snapshot in snapshots:
        for peer in snapshot.peers:
            groups.setdefault((peer.name, peer.run), []).append(peer)
    return [_merge_peer(groups[key]) for key in sorted(groups)]


def _merge_peer(views: list[SharedPicture]) -> SharedPicture:
    worst = min(views, key=lambda view: _PEER_WORST_FIRST.index(view.state) if view.state in _PEER_WORST_FIRST else 9)
    return msgspec.structs.replace(
        worst,
        age_s=_largest([view.age_s for view in views]),
        gaps=sum(view.gaps for view in views),
        skipped=sum(view.skipped for view in views),
        heard_by=sum(view.state == "heard" for view in views),
    )


def _merge_endpoint(views: list[EndpointPicture]) -> EndpointPicture:
    if len(views) == 1:
        return views[0]
    states = Counter(view.state for view in views)
    served = [(view.ttft_s_avg, view.requests_total) for view in views if view.ttft_s_avg is not None]
    weight = sum(count for _, count in served)
    says = {view.reports_cached_tokens for view in views}
    return msgspec.structs.replace(
        views[0],
        state=_worst(states),
        states=dict(sorted(states.items())) if len(states) > 1 else {},
        models=list(dict.fromkeys(model for view in views for model in view.models)),
        inflight_requests=sum(view.inflight_requests for view in views),
        inflight_uncached_tokens=sum(view.inflight_uncached_tokens for view in views),
        waiting=_largest([view.waiting for view in views]),
        running=_largest([view.running for view in views]),
        kv_usage_ratio=_largest([view.kv_usage_ratio for view in views]),
        requests_total=sum(view.requests_total for view in views),
        failures_total=sum(view.failures_total for view in views),
        prompt_tokens_total=sum(view.prompt_tokens_total for view in views),
        cached_tokens_total=sum(view.cached_tokens_total for view in views),
        prefill_tokens_per_s=_largest([view.prefill_tokens_per_s for view in views]),
        is_trial=all(view.is_trial for view in views),
        cache=min((view.cache for view in views), key=_LEAST_KNOWN_FIRST.index),
        ttft_s_avg=sum(ttft * count for ttft, count in served) / weight if weight else None,
        reports_cached_tokens=True if True in says else (False if False in says else None),
    )


def _added(picture: EndpointPicture, left: EndpointPicture) -> EndpointPicture:
    return msgspec.structs.replace(
        picture,
        requests_total=picture.requests_total + left.requests_total,
        failures_total=picture.failures_total + left.failures_total,
        prompt_tokens_total=picture.prompt_tokens_total + left.prompt_tokens_total,
        cached_tokens_total=picture.cached_tokens_total + left.cached_tokens_total,
    )


def _worst(states: Counter[str]) -> str:
    return min(states, key=lambda state: _WORST_FIRST.index(state) if state in _WORST_FIRST else len(_WORST_FIRST))


def _largest(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
