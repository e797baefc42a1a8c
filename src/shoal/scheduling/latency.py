"""Plugins that decide by predicted latency: the scorer, the filter of tiers and the admitter of llm-d.

Headroom is what a client asked for less what is predicted; how a prediction is made is `shoal.latency`, how well it
does is watched by the router, which leaves these plugins out while it does badly.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np

from shoal.pool import FleetView, Request
from shoal.scheduling.cache_scorers import matched_column, matched_ratio
from shoal.scheduling.columns import known, worst_high
from shoal.scheduling.plugin import Key, Mask, Ref, Scores
from shoal.scheduling.producers import PredictedLatencyProducer, PrefixRef
from shoal.scheduling.slo import SLO_TPOT_HEADER, SLO_TTFT_HEADER, slo_s

PREDICTIONS = ("predicted_ttft_s", "predicted_tpot_s", "strictest_tpot_slo_s")
PredictionRef = Annotated[str, "the predicted-latency-producer to read", Ref("predicted-latency-producer")]


class Headrooms(NamedTuple):
    """Seconds left of what was asked for, negative where it would be missed.  known: who has a prediction."""

    ttft: Scores
    tpot: Scores
    known: Mask


def headrooms(request: Request, view: FleetView, slo_buffer_factor: float) -> Headrooms | None:
    """Return the headrooms of the candidates, None when nothing is predicted of any.

    Who asked for nothing has an SLO of 0, so that the least deficit is the lowest prediction; of who asked for one of
    the two the other cannot be missed (headroom 0), unless a request that runs there asked for it.  A request that does
    not stream has no time per token that anybody sees.
    """
    if not view.has("predicted_ttft_s"):
        return None
    ttft_s, tpot_s = view.column("predicted_ttft_s"), view.column("predicted_tpot_s")
    is_known: Mask = ~(np.isnan(ttft_s) | np.isnan(tpot_s))
    if not is_known.any():
        return None
    asked_ttft, asked_tpot = slo_s(request, SLO_TTFT_HEADER), slo_s(request, SLO_TPOT_HEADER)
    if asked_ttft is None and asked_tpot is None:
        asked_ttft = asked_tpot = 0.0
    ttft: Scores = np.zeros(len(view)) if asked_ttft is None else asked_ttft - ttft_s
    if not request.is_streaming:
        return Headrooms(ttft, np.zeros(len(view)), is_known)
    strictest = view.column("strictest_tpot_slo_s") if view.has("strictest_tpot_slo_s") else np.inf
    wanted = np.broadcast_to(np.minimum(np.inf if asked_tpot is None else asked_tpot, strictest), (len(view),))
    tpot: Scores = np.where(np.isinf(wanted), 0.0, wanted * slo_buffer_factor - tpot_s)
    return Headrooms(ttft, tpot, is_known)


def buffer_factor(plugins: Mapping[str, object], name: str) -> float:
    """Return the `sloBufferFactor` of the named producer."""
    producer = plugins.get(name or PredictedLatencyProducer.type)
    if not isinstance(producer, PredictedLatencyProducer):
        producer = next((each for each in plugins.values() if isinstance(each, PredictedLatencyProducer)), None)
    return producer.slo_buffer_factor if isinstance(producer, PredictedLatencyProducer) else 1.0


class LatencyScorer:
    """Prefers endpoints by predicted headroom: the SLO of the request less what is predicted.

    Candidates that keep both SLOs (or of which nothing is predicted, headroom 0) are scored alone when there are any:
    `least` prefers the one closest to its SLO, which packs and leaves room elsewhere, `most` the one furthest.  When
    none keeps both, those without a request in flight are scored alone; else the best bucket that has any of: only tpot
    missed, only ttft missed, both; always by the least deficit.  Without an SLO that is the lowest prediction.

    In a bucket: n = (|headroom| - min) / (max - min) of ttft and of tpot; where all are equal that one counts for
    nothing; c = ttftWeight * n + tpotWeight * n; score = (int((1 - c) * 100) + 1) / 100 for least, with c for most.

    Without any prediction: the weighted mean of 1 - kv usage, (longest queue - queue) / longest queue, and the matched
    share of the prompt.  While predictions are made but cannot be trusted, Shoal's default profile decides instead,
    behind the same filters.
    """

    type: ClassVar[str] = "latency-scorer"
    needs: ClassVar[tuple[str, ...]] = (*PREDICTIONS, "inflight_requests", "kv_usage", "waiting", "matched_tokens")
    reads_predictions = True

    def __init__(
        self,
        *,
        ttft_weight: Annotated[float, "weight of the ttft headroom"] = 0.8,
        tpot_weight: Annotated[float, "weight of the tpot headroom"] = 0.2,
        headroom_selection_strategy: Annotated[
            Literal["least", "most"], "least: closest to the SLO; most: furthest from it"
        ] = "least",
        composite_kv_weight: Annotated[
            float, "weight of free KV cache, without predictions", Key("compositeKVWeight")
        ] = 1.0,
        composite_queue_weight: Annotated[float, "weight of a short queue, without predictions"] = 1.0,
        composite_prefix_weight: Annotated[float, "weight of the matched prefix, without predictions"] = 1.0,
        latency_prediction_info_producer_name: PredictionRef = "",
        prefix_match_info_producer_name: PrefixRef = "",
    ) -> None:
        weights = (ttft_weight, tpot_weight, composite_kv_weight, composite_queue_weight, composite_prefix_weight)
        if min(weights) < 0:
            raise ValueError("the weights of latency-scorer must not be negative")
        total = ttft_weight + tpot_weight
        self._ttft_weight, self._tpot_weight = (ttft_weight / total, tpot_weight / total) if total else (0.8, 0.2)
        self._is_most = headroom_selection_strategy == "most"
        self._composite = (composite_kv_weight, composite_queue_weight, composite_prefix_weight)
        self._source, self._factor = latency_prediction_info_producer_name, 1.0
        self._producer, self._matched = prefix_match_info_producer_name, "matched_tokens"

    def connect(self, plugins: Mapping[str, object]) -> None:
        self._factor = buffer_factor(plugins, self._source)
        self._matched = matched_column(plugins, self._producer)

    def score(self, request: Request, view: FleetView) -> Scores:
        found = headrooms(request, view, self._factor)
        if found is None:
            return self._without(request, view)
        ttft, tpot = np.where(found.known, found.ttft, 0.0), np.where(found.known, found.tpot, 0.0)
        keeps: Mask = (ttft >= 0.0) & (tpot >= 0.0)
        scores = np.zeros(len(view))
        if keeps.any():
            scores[keeps] = self._bucket(ttft[keeps], tpot[keeps], is_most=self._is_most)
            return scores
        chosen = known(view, "inflight_requests") == 0.0
        if not chosen.any():
            chosen = _least_violated(ttft, tpot)
        scores[chosen] = self._bucket(ttft[chosen], tpot[chosen], is_most=False)
        return scores

    def _bucket(self, ttft: Scores, tpot: Scores, *, is_most: bool) -> Scores:
        ttft_n, ttft_width = _normal(ttft)
        tpot_n, tpot_width = _normal(tpot)
        ttft_weight, tpot_weight = self._ttft_weight, self._tpot_weight
        if ttft_width == 0.0 and tpot_width > 0.0:
            ttft_weight, tpot_weight = 0.0, 1.0
        elif tpot_width == 0.0 and ttft_width > 0.0:
            ttft_weight, tpot_weight = 1.0, 0.0
        combined = ttft_weight * ttft_n + tpot_weight * tpot_n
        if not is_most:
            combined = 1.0 - combined
        # A hair more than what rounding took: 0.29 * 100 is 28.999.
        scores: Scores = (np.floor(combined * 100.0 + 1e-9) + 1.0) / 100.0
        return scores

    def _without(self, request: Request, view: FleetView) -> Scores:
        total = sum(self._composite)
        if not total:
            return np.ones(len(view))
        kv_weight, queue_weight, prefix_weight = self._composite
        free = 1.0 - worst_high(known(view, "kv_usage"))
        queue = worst_high(known(view, "waiting"))
        longest = np.fmax.reduce(queue, initial=0.0)
        short = (longest - queue) / longest if longest > 0 else np.ones(len(view))
        matched = matched_ratio(request, view, self._matched)
        # What nobody knows of any endpoint tells none apart.
        scores: Scores = kv_weight * np.nan_to_num(free) + queue_weight * np.nan_to_num(short) + prefix_weight * matched
        scores /= total
        return scores


def _normal(headroom: Scores) -> tuple[Scores, float]:
    """Return |headroom| within its range as 0 to 1, and the range; 0.5 where it has none."""
    size = np.abs(headroom)
    low, high = float(size.min()), float(size.max())
    width = high - low
    return ((size - low) / width if width > 0.0 else np.full(len(size), 0.5)), width


def _least_violated(ttft: Scores, tpot: Scores) -> Mask:
    """Return the best bucket that has any: only tpot missed, only ttft missed, both."""
    for bucket in ((ttft >= 0.0) & (tpot < 0.0), (ttft < 0.0) & (tpot >= 0.0)):
        if bucket.any():
            return bucket
    return np.ones(len(ttft), np.bool_)


class SloHeadroomTierFilter:
    """Keeps the endpoints that are predicted to keep both SLOs of the request.

    All stay when none does, or when nothing is predicted; one of which nothing is predicted does not keep them.  With
    probability epsilonExploreNeg the others are kept instead, so that one that recovers is seen to.
    """

    type: ClassVar[str] = "slo-headroom-tier-filter"
    needs: ClassVar[tuple[str, ...]] = PREDICTIONS
    reads_predictions = True

    def __init__(
        self,
        *,
        epsilon_explore_neg: Annotated[float, "share of requests that go to the other tier, 0 to 1"] = 0.01,
        latency_prediction_info_producer_name: PredictionRef = "",
    ) -> None:
        if not 0 <= epsilon_explore_neg <= 1:
            raise ValueError(f"epsilonExploreNeg must be 0 to 1, got {epsilon_explore_neg}")
        self._epsilon = epsilon_explore_neg
        self._source, self._factor = latency_prediction_info_producer_name, 1.0
        self._chance: np.random.Generator | None = None

    def connect(self, plugins: Mapping[str, object]) -> None:
        self._factor = buffer_factor(plugins, self._source)

    def draw_from(self, stream: np.random.Generator) -> None:
        self._chance = stream

    def keep(self, request: Request, view: FleetView) -> Mask:
        found = headrooms(request, view, self._factor)
        everyone = np.ones(len(view), np.bool_)
        if found is None:
            return everyone
        keeps: Mask = found.known & (found.ttft >= 0.0) & (found.tpot >= 0.0)
        if not keeps.any() or keeps.all():
            return everyone
        is_exploring = self._epsilon > 0 and self._chance is not None and self._chance.random() < self._epsilon
        return ~keeps if is_exploring else keeps


_COLD_KV_USAGE = 0.02


class LatencySloAdmitter:
    """Refuses, with 429, requests of a negative priority whose SLO no endpoint can be expected to keep.

    Only those that carry an SLO header, and only while latencies are predicted.  An endpoint that is predicted to keep
    both SLOs, one without a request running, or one that uses less than 2 % of its KV cache lets them in.
    """

    type: ClassVar[str] = "latency-slo-admitter"
    needs: ClassVar[tuple[str, ...]] = (*PREDICTIONS, "inflight_requests", "running", "kv_usage")
    reads_predictions = True

    def __init__(self, *, latency_prediction_info_producer_name: PredictionRef = "") -> None:
        self._source, self._factor = latency_prediction_info_producer_name, 1.0

    def connect(self, plugins: Mapping[str, object]) -> None:
        self._factor = buffer_factor(plugins, self._source)

    def objection(self, request: Request, priority: int, view: FleetView) -> str:
        ttft, tpot = slo_s(request, SLO_TTFT_HEADER), slo_s(request, SLO_TPOT_HEADER)
        if priority >= 0 or (ttft is None and tpot is None):
            return ""
        found = headrooms(request, view, self._factor)
        if found is None:
            return ""
        # What was not asked for cannot be missed.
        keeps = ((found.ttft >= 0.0) | (ttft is None)) & ((found.tpot >= 0.0) | (tpot is None))
        is_idle = (known(view, "inflight_requests") == 0.0) & ~(known(view, "running") > 0.0)
        is_cold = known(view, "kv_usage") < _COLD_KV_USAGE
        if (keeps | ~found.known | is_idle | is_cold).any():
            return ""
        return "no endpoint is predicted to keep the latency that this request asks for"
