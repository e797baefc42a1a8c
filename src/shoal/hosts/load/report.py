"""What a load run measured, request by request and in sum.

Quantiles are over the requests that ended well; the others are counted by kind and never enter a latency.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from shoal.hosts.load.answer import Answer
from shoal.hosts.load.lag import LAG_LIMIT_S


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    error: "" when it ended well, else `connect`, `timeout`, `cut`, `left`, `status-NNN`, `error-event`, `unfinished`
    (a stream without `[DONE]`, JSON that does not parse) or `skipped` (after a failed turn of its chat).
    ttft_s: to the first body byte.  endpoint: who served it, "" unknown.
    """

    at_s: float
    error: str = ""
    ttft_s: float = 0.0
    duration_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    endpoint: str = ""

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first, 0.0 for answers of one token."""
        return (self.duration_s - self.ttft_s) / (self.completion_tokens - 1) if self.completion_tokens > 1 else 0.0


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run in figures; times in seconds, `_p50` and the like are quantiles over the requests that ended well.

    served: requests per endpoint, where the answers say who served them.  lag_p99_s: of the generator's own loop;
    engine_lag_p99_s: of the latest embedded engine's, 0.0 when there is none.
    """

    name: str
    requests: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    e2e_p50_s: float
    e2e_p95_s: float
    e2e_p99_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    served: dict[str, int]
    lag_p99_s: float
    engine_lag_p99_s: float = 0.0

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens that came from a cache, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def imbalance(self) -> float:
        """Requests of the busiest endpoint over the mean, 1.0 when even or unknown."""
        return max(self.served.values()) * len(self.served) / sum(self.served.values()) if self.served else 1.0

    @property
    def is_void(self) -> bool:
        """Whether the generator or an engine ran too late for the figures to mean anything."""
        return max(self.lag_p99_s, self.engine_lag_p99_s) > LAG_LIMIT_S

    @property
    def failed(self) -> int:
        """Requests that ended badly, without those that the generator itself left."""
        return sum(count for kind, count in self.errors.items() if kind != "left")

    def to_json(self) -> bytes:
        """Every field, and the derived ratios, as one JSON object."""
        derived = {"hit_ratio": self.hit_ratio, "imbalance": self.imbalance, "is_void": self.is_void}
        return msgspec.json.encode({**msgspec.structs.asdict(self), **derived})


def sample_of(answer: Answer, *, began_s: float, endpoint_header: str) -> tuple[Sample, str]:
    """Read an ended answer; return its sample and the text of the reply."""
    at_s = answer.started_s - began_s
    endpoint = answer.header(endpoint_header) if answer.status else ""
    if answer.failure or answer.status != 200:
        return Sample(at_s=at_s, error=answer.failure or f"status-{answer.status}", endpoint=endpoint), ""
    reading = answer.read()
    error = "error-event" if reading.is_error else "" if reading.is_done else "unfinished"
    usage = reading.usage
    sample = Sample(
        at_s=at_s,
        error=error,
        ttft_s=(answer.first_s or answer.ended_s) - answer.started_s,
        duration_s=answer.ended_s - answer.started_s,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        cached_tokens=usage.cached_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
        endpoint=endpoint,
    )
    return sample, reading.text


def summarise(
    name: str,
    samples: Sequence[Sample],
    *,
    duration_s: float,
    lag_p99_s: float = 0.0,
    served: dict[str, int] | None = None,
) -> LoadReport:
    """Fold samples into a report; `served` overrides what the answers said about who served them."""
    good = [sample for sample in samples if not sample.error]
    span_s = max(duration_s, 1e-9)
    ttft = _quantiles([sample.ttft_s for sample in good])
    tpot = _quantiles([sample.tpot_s for sample in good if sample.completion_tokens > 1])
    e2e = _quantiles([sample.duration_s for sample in good])
    completion = sum(sample.completion_tokens for sample in good)
    return LoadReport(
        name=name,
        requests=len(samples),
        errors=dict(sorted(Counter(sample.error for sample in samples if sample.error).items())),
        duration_s=duration_s,
        requests_per_s=len(good) / span_s,
        output_tokens_per_s=completion / span_s,
        ttft_p50_s=ttft[0],
        ttft_p95_s=ttft[1],
        ttft_p99_s=ttft[2],
        tpot_p50_s=tpot[0],
        tpot_p95_s=tpot[1],
        e2e_p50_s=e2e[0],
        e2e_p95_s=e2e[1],
        e2e_p99_s=e2e[2],
        prompt_tokens=sum(sample.prompt_tokens for sample in good),
        cached_tokens=sum(sample.cached_tokens for sample in good),
        completion_tokens=completion,
        served=served or dict(sorted(Counter(sample.endpoint for sample in samples if sample.endpoint).items())),
        lag_p99_s=lag_p99_s,
    )


def _quantiles(values: list[float]) -> tuple[float, float, float]:
    if not values:
        return (0.0, 0.0, 0.0)
    p50, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99)).tolist()
    return (p50, p95, p99)
