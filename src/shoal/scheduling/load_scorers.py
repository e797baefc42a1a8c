"""Scorers of load: queues, running requests, memory, work in flight.

Each returns one value of 0 (busiest) to 1 (idlest) per candidate.  The scheduler clamps, weighs and sums.  An
endpoint whose load is unknown scores like the busiest known one; where no load is known, all score alike.
"""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np

from shoal.pool import FleetView, Request
from shoal.scheduling.columns import fewest_first, highest, known, lowest, own_tokens, worst_high
from shoal.scheduling.plugin import Ignored, Ref, Scores
from shoal.scheduling.producers import InflightLoadProducer

InflightRef = Annotated[str, "the inflight-load-producer to read", Ref("inflight-load-producer")]


class QueueScorer:
    """Prefers the shortest waiting queue, as the engine reports it.

    score = (max - waiting) / (max - min) over the candidates; all equal: 1.
    """

    type: ClassVar[str] = "queue-scorer"
    is_within: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("waiting",)

    def score(self, request: Request, view: FleetView) -> Scores:
        return fewest_first(known(view, "waiting"))


class RunningRequestsSizeScorer:
    """Prefers the fewest running requests, as the engine reports them.

    score = (max - running) / (max - min) over the candidates; all equal: 1.
    """

    type: ClassVar[str] = "running-requests-size-scorer"
    is_within: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("running",)

    def score(self, request: Request, view: FleetView) -> Scores:
        return fewest_first(known(view, "running"))


class KvCacheUtilizationScorer:
    """Prefers the most free KV cache, as the engine reports it.

    score = 1 - usage.
    """

    type: ClassVar[str] = "kv-cache-utilization-scorer"
    needs: ClassVar[tuple[str, ...]] = ("kv_usage",)

    def score(self, request: Request, view: FleetView) -> Scores:
        return 1.0 - worst_high(known(view, "kv_usage"))


class LoadAwareScorer:
    """Prefers short waiting queues on a fixed scale, so that one long queue does not blur the others.

    score = 0.5 * (1 - min(waiting, threshold) / threshold); an endpoint without a queue scores 0.5.
    """

    type: ClassVar[str] = "load-aware-scorer"
    needs: ClassVar[tuple[str, ...]] = ("waiting",)

    def __init__(
        self, *, threshold: Annotated[int, "waiting requests at which the score reaches 0; 0 means 128"] = 128
    ) -> None:
        self._threshold = threshold if threshold > 0 else 128

    def score(self, request: Request, view: FleetView) -> Scores:
        return 0.5 - 0.5 / self._threshold * np.minimum(worst_high(known(view, "waiting")), self._threshold)


class ActiveRequestScorer:
    """Prefers the fewest requests in flight, by Shoal's own books.

    A count up to idleThreshold scores 1; others score (max - count) / max * maxBusyScore.
    """

    type: ClassVar[str] = "active-request-scorer"
    is_within: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("inflight_requests",)

    def __init__(
        self,
        *,
        idle_threshold: Annotated[int, "requests in flight up to which an endpoint counts as idle"] = 0,
        max_busy_score: Annotated[float, "score of the least busy endpoint that is not idle, 0 to 1"] = 1.0,
        in_flight_load_producer_name: InflightRef = "",
        request_timeout: Annotated[
            str, "has no effect", Ignored("requests leave the books when they end; remove it")
        ] = "",
    ) -> None:
        if not 0 <= max_busy_score <= 1:
            raise ValueError(f"maxBusyScore must be 0 to 1, got {max_busy_score}")
        self._idle_threshold = max(idle_threshold, 0)
        self._max_busy_score = max_busy_score

    def score(self, request: Request, view: FleetView) -> Scores:
        count = known(view, "inflight_requests")
        top = highest(count)
        if math.isnan(top):
            count = worst_high(count)
            top = highest(count)
            if math.isnan(top):
                return np.zeros(len(count))
        scores: Scores = (top - count) * (self._max_busy_score / max(top, 1.0))
        if lowest(count) <= self._idle_threshold:
            scores[count <= self._idle_threshold] = 1.0
        return scores


class TokenLoadScorer:
    """Prefers the fewest uncached prompt tokens in flight, this request's own uncached ones included.

    score = 1 - min(1, tokens / queueThresholdTokens).  Estimated output tokens count too when the
    inflight-load-producer has addEstimatedOutputTokens.
    """

    type: ClassVar[str] = "token-load-scorer"
    needs: ClassVar[tuple[str, ...]] = ("inflight_uncached_tokens", "matched_tokens", "inflight_output_tokens")

    def __init__(
        self,
        *,
        queue_threshold_tokens: Annotated[
            int, "tokens at which the score reaches 0; the default is 128 requests of 32k tokens"
        ] = 4_194_304,
        in_flight_load_producer_name: InflightRef = "",
    ) -> None:
        self._threshold = queue_threshold_tokens if queue_threshold_tokens > 0 else 4_194_304
        self._producer_name = in_flight_load_producer_name or InflightLoadProducer.type
        self._is_output_counted = False

    def connect(self, plugins: Mapping[str, object]) -> None:
        producer = plugins.get(self._producer_name)
        self._is_output_counted = isinstance(producer, InflightLoadProducer) and producer.add_estimated_output_tokens

    def score(self, request: Request, view: FleetView) -> Scores:
        tokens = worst_high(known(view, "inflight_uncached_tokens"))
        tokens = tokens + own_tokens(request, view)
        if self._is_output_counted:
            tokens = tokens + worst_high(known(view, "inflight_output_tokens"))
        scores: Scores = np.maximum(1.0 - tokens / self._threshold, 0.0)
        return scores
