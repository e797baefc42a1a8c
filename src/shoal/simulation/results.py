"""What came of a run: one sample per request, and the figures that people compare.

Owns the figures.  Times are seconds of the virtual clock.
"""

from typing import NamedTuple

import msgspec
import numpy as np


class Sample(NamedTuple):
    """One request.  ttft_s and tpot_s: NaN when there is none.  endpoint: who served, "" for nobody."""

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


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run.

    hit_ratio: share of prompt tokens found in caches.  imbalance: busiest endpoint over the mean, by requests.
    output_tokens_per_s, requests_per_s: over the whole run.
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
    e2e_p50_s: float
    e2e_p95_s: float
    hit_ratio: float
    imbalance: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    served: dict[str, int]


def summarise(samples: list[Sample], endpoints: list[str], duration_s: float) -> Result:
    """Return the figures of `samples`; endpoints: all there were, for the imbalance."""
    good = [sample for sample in samples if not sample.is_failed]
    ttft, tpot, e2e = (
        np.array([sample[place] for sample in good if sample[place] == sample[place]]) for place in (1, 2, 3)
    )
    served = dict.fromkeys(endpoints, 0)
    for sample in good:
        served[sample.endpoint] = served.get(sample.endpoint, 0) + 1
    prompt = sum(sample.prompt_tokens for sample in good)
    return Result(
        requests=len(samples),
        failed=len(samples) - len(good),
        duration_s=duration_s,
        ttft_mean_s=float(ttft.mean()) if len(ttft) else 0.0,
        ttft_p50_s=_quantile(ttft, 50),
        ttft_p95_s=_quantile(ttft, 95),
        ttft_p99_s=_quantile(ttft, 99),
        tpot_p50_s=_quantile(tpot, 50),
        tpot_p95_s=_quantile(tpot, 95),
        e2e_p50_s=_quantile(e2e, 50),
        e2e_p95_s=_quantile(e2e, 95),
        hit_ratio=sum(sample.cached_tokens for sample in good) / prompt if prompt else 0.0,
        imbalance=max(served.values()) * len(served) / len(good) if good else 1.0,
        requests_per_s=len(good) / duration_s if duration_s else 0.0,
        output_tokens_per_s=sum(sample.output_tokens for sample in good) / duration_s if duration_s else 0.0,
        prompt_tokens=prompt,
        served=served,
    )


def _quantile(values: "np.ndarray[tuple[int], np.dtype[np.float64]]", percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0
