"""How full an endpoint is: llm-d's two detectors, each a figure per endpoint of which 1 is full.

They read our own books first, in which a dispatch counts at once: between two readings of an engine's metrics nothing
overshoots, and a reading that does not come stops nothing.  Shoal's own detector is `adaptive`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from shoal.kernel.marks import Duration

Floats: TypeAlias = npt.NDArray[np.float64]

ASSUMED_CONCURRENCY = 100.0
"""Requests that an endpoint is thought to take while nothing is known of its queue: llm-d's own default."""


@dataclass(slots=True)
class Loads:
    """What is known of the endpoints at `now`, one float64 each, in the order of `ids` (one object until they change).

    inflight_requests, inflight_tokens (uncached prompt tokens), output_tokens (that are expected): own books, with
    those of peers and of others.  clear_at: when the prompts in flight are prefilled.  kv_capacity_tokens: NaN unknown.
    waiting, running, kv_usage (0 to 1): the engine's last reading, NaN unknown.  read_at: when that was.  One object
    serves until the fleet changes: its owner moves `now`, and the columns are the books themselves.
    """

    ids: Sequence[str]
    now: float
    inflight_requests: Floats
    inflight_tokens: Floats
    output_tokens: Floats
    kv_capacity_tokens: Floats
    clear_at: Floats
    waiting: Floats
    running: Floats
    kv_usage: Floats
    read_at: Floats


@runtime_checkable
class Detector(Protocol):
    """A policy."""

    def saturation(self, loads: Loads) -> Floats:
        """Return how full each endpoint is: 0 idle, 1 full, more when it holds more than it should."""
        ...


@runtime_checkable
class FewDetector(Detector, Protocol):
    """A policy that for a few endpoints can do without arrays, at a fraction of the cost."""

    def saturation_few(self, loads: Loads) -> list[float]:
        """Return what `saturation` would."""
        ...

    def saturation_at(self, loads: Loads, row: int) -> float:
        """Return that of one endpoint."""
        ...


def _above_zero(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} must be above 0, got {value:g}")


class UtilizationDetector:
    """By the engines' own metrics: requests that wait there and the use of the KV cache, whichever is nearer its bound.

    Requests that were sent and that the last reading does not know of count as waiting.  Where an engine gives no
    metrics, or none newer than metricsStalenessThreshold, the requests in flight count against 100 instead; llm-d
    takes such an endpoint for full.
    """

    type: ClassVar[str] = "utilization-detector"

    def __init__(
        self,
        *,
        queue_depth_threshold: Annotated[int, "requests that wait on a full engine"] = 5,
        kv_cache_util_threshold: Annotated[float, "use of the KV cache of a full engine, above 0 and at most 1"] = 0.8,
        metrics_staleness_threshold: Annotated[
            float, "age of a reading from which it counts as none; never less than Shoal's own 6 s", Duration()
        ] = 0.2,
        headroom: Annotated[float, "share above both bounds that is still not full, 0 or more"] = 0.0,
    ) -> None:
        _above_zero(queueDepthThreshold=queue_depth_threshold)
        if not 0 < kv_cache_util_threshold <= 1:
            raise ValueError(f"kvCacheUtilThreshold must be above 0 and at most 1, got {kv_cache_util_threshold:g}")
        if headroom < 0:
            raise ValueError(f"headroom must not be negative, got {headroom:g}")
        self._queue = queue_depth_threshold * (1.0 + headroom)
        self._kv = kv_cache_util_threshold * (1.0 + headroom)
        self._stale_s = max(6.0, metrics_staleness_threshold)

    def saturation(self, loads: Loads) -> Floats:
        """Return the larger of the two ratios."""
        unseen = np.maximum(loads.waiting, loads.inflight_requests - loads.running)
        figure = np.fmax(unseen / self._queue, loads.kv_usage / self._kv)
        blind = np.isnan(unseen) | (loads.read_at < loads.now - self._stale_s)
        return np.where(blind, loads.inflight_requests / ASSUMED_CONCURRENCY, figure)


class ConcurrencyDetector:
    """By what is in flight: requests, uncached prompt tokens, or the fuller of both."""

    type: ClassVar[str] = "concurrency-detector"

    def __init__(
        self,
        *,
        concurrency_mode: Annotated[
            Literal["requests", "tokens", "hybrid"], "what counts; hybrid is the fuller of both"
        ] = "requests",
        max_concurrency: Annotated[int, "requests on a full endpoint"] = 100,
        max_token_concurrency: Annotated[int, "uncached prompt tokens in flight to a full endpoint"] = 1_000_000,
        headroom: Annotated[float, "share above the bounds that is still not full, 0 or more"] = 0.0,
        in_flight_load_producer_name: Annotated[str, "there is one account of what is in flight; read, not used"] = "",
    ) -> None:
        _above_zero(maxConcurrency=max_concurrency, maxTokenConcurrency=max_token_concurrency)
        if headroom < 0:
            raise ValueError(f"headroom must not be negative, got {headroom:g}")
        self._mode = concurrency_mode
        self._requests = max_concurrency * (1.0 + headroom)
        self._tokens = max_token_concurrency * (1.0 + headroom)

    def saturation(self, loads: Loads) -> Floats:
        """Return what is in flight over what may be."""
        requests = loads.inflight_requests / self._requests
        if self._mode == "requests":
            return requests
        tokens = loads.inflight_tokens / self._tokens
        return tokens if self._mode == "tokens" else np.maximum(requests, tokens)

    def saturation_few(self, loads: Loads) -> list[float]:
        """Return the same as plain numbers."""
        if self._mode == "requests":
            # For a few this costs half of what a loop in Python does.
            return [*map(self._requests.__rtruediv__, loads.inflight_requests.tolist())]
        return [self.saturation_at(loads, row) for row in range(len(loads.ids))]

    def saturation_at(self, loads: Loads, row: int) -> float:
        """Return that of one endpoint."""
        requests = loads.inflight_requests.item(row) / self._requests
        if self._mode == "requests":
            return requests
        tokens = loads.inflight_tokens.item(row) / self._tokens
        return tokens if self._mode == "tokens" else max(requests, tokens)
