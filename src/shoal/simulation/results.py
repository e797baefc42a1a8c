"""What came of a run: one sample per request, and the figures that people compare.

Owns the figures and their names in a results file.  Times are seconds of the virtual clock.
"""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.simulation.timeline import Timeline

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Sample(NamedTuple):
    """One request.

    ttft_s and tpot_s: NaN when there is none.  endpoint: who served, "" for nobody.  slo_*: what its client asked for,
    NaN for nothing.  prefill_endpoint: who prefilled for the one that served, "" where that did so by itself.
    """

    arrived_s: float
    ttft_s: float
    tpot_s: float
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    endpoint: str
    tenant: str
    is_failed: bool
    session: str = ""
    slo_ttft_s: float = math.nan
    slo_tpot_s: float = math.nan
    prefill_endpoint: str = ""


class Names(NamedTuple):
    """A column of names.  codes: the place of each row's name in `names`, which are sorted."""

    names: list[str]
    codes: npt.NDArray[np.int32]


class Requests(NamedTuple):
    """All requests of a run as columns, in the order in which they ended; the fields are those of `Sample`."""

    arrived_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    duration_s: Floats
    prompt_tokens: Ints
    cached_tokens: Ints
    output_tokens: Ints
    endpoint: Names
    tenant: Names
    is_failed: npt.NDArray[np.bool_]
    session: Names
    slo_ttft_s: Floats
    slo_tpot_s: Floats
    prefill_endpoint: Names

    def __len__(self) -> int:
        return len(self.arrived_s)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a part of a run: of a tenant, or of an endpoint.

    token_share: of all tokens of the run, prompts that were computed (not cached) and answers, 0 to 1.  slo_requests,
    slo_ratio: as of `Result`.
    """

    requests: int
    failed: int
    ttft_p50_s: float
    ttft_p95_s: float
    e2e_p95_s: float
    hit_ratio: float
    token_share: float
    slo_requests: int = 0
    slo_ratio: float = 1.0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run.

    duration_s: of the virtual clock.  hit_ratio: share of prompt tokens found in caches.  imbalance: busiest endpoint
    over the mean, by requests.  output_tokens_per_s, requests_per_s: over the whole run.  waiting_peak: most requests
    in the queues of all engines at a look, held_peak: in the router; both 0 when nobody looked.  slo_requests: whose
    clients asked for a latency; slo_ratio: share of them that got it, 1 when there are none.  regret_ratio: by how much
    its cost is above that of the reference (see `regret`), 0.1 for a tenth, None without one.  is_partial: the run was
    interrupted, and requests that had not ended are in no figure.  prefilled_elsewhere: requests whose prompt another
    engine prefilled than the one that decoded; of engines that only prefill, `served` and `endpoints` say what they
    prefilled, and they do not count for the imbalance.
    """

    requests: int
    failed: int
    duration_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    tpot_p99_s: float
    e2e_p50_s: float
    e2e_p95_s: float
    e2e_p99_s: float
    hit_ratio: float
    imbalance: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    served: dict[str, int]
    tenants: dict[str, Part] = {}
    endpoints: dict[str, Part] = {}
    waiting_peak: int = 0
    held_peak: int = 0
    slo_requests: int = 0
    slo_ratio: float = 1.0
    regret_ratio: float | None = None
    is_partial: bool = False
    prefilled_elsewhere: int = 0


class Run(NamedTuple):
    """One run.  load: what the arrivals were set to, None for what the experiment says."""

    policy: str
    load: float | None
    seed: int
    result: Result
    requests: Requests
    timeline: Timeline


def columns(samples: Sequence[Sample]) -> Requests:
    """Return the samples as columns."""
    turned = list(zip(*samples, strict=True)) or [()] * len(Sample._fields)
    return Requests(
        arrived_s=np.array(turned[0], np.float64),
        ttft_s=np.array(turned[1], np.float64),
        tpot_s=np.array(turned[2], np.float64),
        duration_s=np.array(turned[3], np.float64),
        prompt_tokens=np.array(turned[4], np.int64),
        cached_tokens=np.array(turned[5], np.int64),
        output_tokens=np.array(turned[6], np.int64),
        endpoint=_names(turned[7]),
        tenant=_names(turned[8]),
        is_failed=np.array(turned[9], np.bool_),
        session=_names(turned[10]),
        slo_ttft_s=np.array(turned[11], np.float64),
        slo_tpot_s=np.array(turned[12], np.float64),
        prefill_endpoint=_names(turned[13]),
    )


def summarise(
    samples: Sequence[Sample] | Requests,
    endpoints: Sequence[str],
    duration_s: float,
    *,
    prefilling: Collection[str] = (),
    timeline: Timeline | None = None,
    is_partial: bool = False,
) -> Result:
    """Return the figures of `samples`; endpoints: all there were, prefilling: those that only prefill."""
    all_ = samples if isinstance(samples, Requests) else columns(samples)
    good = ~all_.is_failed
    served = dict.fromkeys(endpoints, 0) | _counts(all_.endpoint, good)
    decoding = [number for name, number in served.items() if name not in prefilling]
    prefilled = {name: number for name, number in _counts(all_.prefill_endpoint, good).items() if name}
    served |= prefilled
    prompt, output = int(all_.prompt_tokens[good].sum()), int(all_.output_tokens[good].sum())
    count = int(good.sum())
    waiting, held = _peaks(timeline)
    asked, met = _slo(all_)
    computed = all_.prompt_tokens - all_.cached_tokens
    is_own = np.array([not name for name in all_.prefill_endpoint.names], np.bool_)[all_.prefill_endpoint.codes]
    return Result(
        requests=len(all_),
        failed=len(all_) - count,
        duration_s=duration_s,
        ttft_mean_s=_mean(all_.ttft_s[good]),
        ttft_p50_s=quantile(all_.ttft_s[good], 50),
        ttft_p95_s=quantile(all_.ttft_s[good], 95),
        ttft_p99_s=quantile(all_.ttft_s[good], 99),
        tpot_p50_s=quantile(all_.tpot_s[good], 50),
        tpot_p95_s=quantile(all_.tpot_s[good], 95),
        tpot_p99_s=quantile(all_.tpot_s[good], 99),
        e2e_p50_s=quantile(all_.duration_s[good], 50),
        e2e_p95_s=quantile(all_.duration_s[good], 95),
        e2e_p99_s=quantile(all_.duration_s[good], 99),
        hit_ratio=int(all_.cached_tokens[good].sum()) / prompt if prompt else 0.0,
        imbalance=max(decoding) * len(decoding) / count if count else 1.0,
        requests_per_s=count / duration_s if duration_s else 0.0,
        output_tokens_per_s=output / duration_s if duration_s else 0.0,
        prompt_tokens=prompt,
        output_tokens=output,
        served=served,
        tenants=_parts(all_, all_.tenant, computed + all_.output_tokens),
        endpoints=_parts(all_, all_.endpoint, np.where(is_own, computed, 0) + all_.output_tokens)
        | (_parts(all_, all_.prefill_endpoint, np.where(is_own, 0, computed)) if prefilled else {}),
        waiting_peak=waiting,
        held_peak=held,
        slo_requests=int(asked.sum()),
        slo_ratio=int(met.sum()) / int(asked.sum()) if asked.any() else 1.0,
        is_partial=is_partial,
        prefilled_elsewhere=sum(prefilled.values()),
    )


def quantile(values: Floats, percent: float) -> float:
    """Return a percentile of the values that are numbers, 0 when there are none."""
    values = values[~np.isnan(values)]
    return float(np.percentile(values, percent)) if len(values) else 0.0


def _mean(values: Floats) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else 0.0


def _names(values: Sequence[object]) -> Names:
    names, codes = np.unique(np.array(values, np.str_), return_inverse=True)
    return Names(names.tolist(), codes.astype(np.int32).reshape(-1))


def _counts(column: Names, chosen: npt.NDArray[np.bool_]) -> dict[str, int]:
    counts = np.bincount(column.codes[chosen], minlength=len(column.names)).tolist()
    return {name: count for name, count in zip(column.names, counts, strict=True) if count}


def _parts(all_: Requests, column: Names, work: Ints) -> dict[str, Part]:
    """Return the figures by name; what nobody served belongs to no endpoint, and "" is a tenant too.

    work: tokens that were computed for each request.
    """
    whole = all_.prompt_tokens - all_.cached_tokens + all_.output_tokens
    total = int(whole[~all_.is_failed].sum())
    asked, met = _slo(all_)
    order = np.argsort(column.codes, kind="stable")
    edges = np.searchsorted(column.codes[order], np.arange(len(column.names) + 1))
    parts = {}
    for place, name in enumerate(column.names):
        rows = order[edges[place] : edges[place + 1]]
        if column is not all_.tenant and not name:
            continue
        good = rows[~all_.is_failed[rows]]
        prompt = int(all_.prompt_tokens[good].sum())
        wished = int(asked[rows].sum())
        parts[name] = Part(
            requests=len(rows),
            failed=len(rows) - len(good),
            ttft_p50_s=quantile(all_.ttft_s[good], 50),
            ttft_p95_s=quantile(all_.ttft_s[good], 95),
            e2e_p95_s=quantile(all_.duration_s[good], 95),
            hit_ratio=int(all_.cached_tokens[good].sum()) / prompt if prompt else 0.0,
            token_share=int(work[good].sum()) / total if total else 0.0,
            slo_requests=wished,
            slo_ratio=int(met[rows].sum()) / wished if wished else 1.0,
        )
    return parts


def _slo(all_: Requests) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return whose clients asked for a latency, and which of them got it; who was not served did not."""
    asked = ~np.isnan(all_.slo_ttft_s) | ~np.isnan(all_.slo_tpot_s)
    is_late = (all_.ttft_s > all_.slo_ttft_s) | (all_.tpot_s > all_.slo_tpot_s)
    return asked, asked & ~all_.is_failed & ~is_late


def _peaks(timeline: Timeline | None) -> tuple[int, int]:
    if timeline is None or not len(timeline.times_s):
        return 0, 0
    return int(np.nansum(timeline.waiting, axis=1).max()), int(timeline.held.max())
