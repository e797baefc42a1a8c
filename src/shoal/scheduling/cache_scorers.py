"""Scorers of what an endpoint already holds: prefixes, adapters, a range of context lengths.

Each returns one value of 0 to 1 per candidate; the scheduler clamps, weighs and sums.  An unknown value scores
like the worst known one; where no value is known, all score alike.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import numpy as np

from shoal.pool import Decision, Endpoint, FleetView, Request
from shoal.scheduling.columns import PerFleet, known, own_tokens, worst_low
from shoal.scheduling.exact_producers import PrecisePrefixCacheProducer
from shoal.scheduling.plugin import Ignored, Mask, Scores
from shoal.scheduling.producers import APPROX, ApproxPrefixCacheProducer, PrefixRef


def matched_column(plugins: Mapping[str, object], producer: str) -> str:
    """Return the column of what the named prefix producer says: the estimate where it is named, else the best known."""
    is_estimate = producer == APPROX or isinstance(plugins.get(producer), ApproxPrefixCacheProducer)
    return "estimated_tokens" if is_estimate else "matched_tokens"


def matched_ratio(request: Request, view: FleetView, name: str = "matched_tokens") -> Scores:
    """Return the share of the prompt that each candidate is expected to hold, 0 where unknown."""
    tokens = request.prompt_tokens
    if tokens <= 0:
        return np.zeros(len(view))
    level = view.level(name)
    if level is not None:
        return np.full(len(view), 1.0 - max(tokens - max(level, 0.0), 0.0) / tokens)
    return 1.0 - own_tokens(request, view, name) / tokens


class PrefixCacheScorer:
    """Prefers endpoints that hold more of the prompt's prefix.

    score = w * min(1, matchedTokens / matchLengthScaleTokens) ** 2 + (1 - w) * matchedTokens / promptTokens with
    w = matchLengthWeight.  A prompt of unknown content scores 0 everywhere.
    """

    type: ClassVar[str] = "prefix-cache-scorer"
    is_within: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("matched_tokens",)

    def __init__(
        self,
        *,
        match_length_weight: Annotated[float, "weight of the match's absolute length, 0 to 1"] = 0.0,
        match_length_scale_tokens: Annotated[int, "match in tokens that counts as long"] = 8192,
        prefix_match_info_producer_name: PrefixRef = "",
    ) -> None:
        if not 0 <= match_length_weight <= 1:
            raise ValueError(f"matchLengthWeight must be 0 to 1, got {match_length_weight}")
        if match_length_scale_tokens <= 0:
            raise ValueError(f"matchLengthScaleTokens must be above 0, got {match_length_scale_tokens}")
        self._weight = match_length_weight
        self._scale = match_length_scale_tokens
        self._producer, self._matched = prefix_match_info_producer_name, "matched_tokens"

    def connect(self, plugins: Mapping[str, object]) -> None:
        self._matched = matched_column(plugins, self._producer)

    def score(self, request: Request, view: FleetView) -> Scores:
        ratio = matched_ratio(request, view, self._matched)
        if self._weight == 0:
            return ratio
        length = np.minimum(ratio * (request.prompt_tokens / self._scale), 1.0)
        return self._weight * length * length + (1.0 - self._weight) * ratio


class PrecisePrefixCacheScorer(PrecisePrefixCacheProducer, frozen=True, kw_only=True):
    """The older form of precise-prefix-cache-producer: the same, and a prefix-cache-scorer of its own in one plugin.

    score = matchedTokens / promptTokens.
    """

    type: ClassVar[str] = "precise-prefix-cache-scorer"
    needs: ClassVar[tuple[str, ...]] = ("matched_tokens",)

    def score(self, request: Request, view: FleetView) -> Scores:
        """Return how much of the prompt each candidate is expected to hold."""
        return matched_ratio(request, view)


class LoraAffinityScorer:
    """Prefers endpoints where the request's adapter is loaded, then those with room for it.

    The adapter runs there: 1.  A slot is free: 0.8.  The adapter waits there: 0.6.  Otherwise 0.
    """

    type: ClassVar[str] = "lora-affinity-scorer"
    needs: ClassVar[tuple[str, ...]] = ()

    def score(self, request: Request, view: FleetView) -> Scores:
        # One plain loop: at 1,000 endpoints a call per endpoint would take half of the decision's budget.
        model = request.model
        fits = []
        for seen in view.signals:
            if seen is None:
                fits.append(np.nan)
            elif model in (running := seen.running_adapters):
                fits.append(1.0)
            elif len(running) + len(seen.waiting_adapters) < (seen.max_adapters or 0):
                fits.append(0.8)
            else:
                fits.append(0.6 if model in seen.waiting_adapters else 0.0)
        return worst_low(np.array(fits))


class NoHitLruScorer:
    """Spreads cold requests: where no candidate holds any of the prompt, the one least recently given a cold request.

    score = 1 - rank / (candidates - 1), rank 0 for the least recent.  Endpoints that never had a cold request
    score 1 alike, so chance decides between them.  As soon as one candidate holds something: 0.5 for all.
    """

    type: ClassVar[str] = "no-hit-lru-scorer"
    needs: ClassVar[tuple[str, ...]] = ("matched_tokens",)

    def __init__(
        self,
        *,
        lru_size: Annotated[int, "endpoints remembered; 0 means 1024"] = 1024,
        prefix_match_info_producer_name: PrefixRef = "",
        prefix_plugin_type: Annotated[str, "has no effect", Ignored("use prefixMatchInfoProducerName")] = "",
        prefix_plugin_name: Annotated[str, "has no effect", Ignored("use prefixMatchInfoProducerName")] = "",
    ) -> None:
        self._size = lru_size if lru_size > 0 else 1024
        self._producer, self._matched = prefix_match_info_producer_name, "matched_tokens"
        self._order: OrderedDict[str, None] = OrderedDict()

    def connect(self, plugins: Mapping[str, object]) -> None:
        self._matched = matched_column(plugins, self._producer)

    def score(self, request: Request, view: FleetView) -> Scores:
        count = len(view)
        if not self._is_cold(view):
            return np.full(count, 0.5)
        if count <= 1 or not self._order:
            return np.ones(count)
        place = {endpoint_id: at for at, endpoint_id in enumerate(self._order)}
        places = np.fromiter((place.get(endpoint.id, -1) for endpoint in view.endpoints), np.intp, count)
        scores = np.ones(count)
        used = np.flatnonzero(places >= 0)
        ranks = count - len(used) + np.argsort(np.argsort(places[used]))
        scores[used] = 1.0 - ranks / (count - 1)
        return scores

    def _is_cold(self, view: FleetView) -> bool:
        return not bool((known(view, self._matched) > 0).any())

    def dispatched(self, request: Request, view: FleetView, decision: Decision, now: float) -> None:
        if not self._is_cold(view):
            return
        self._order[decision.chosen[0]] = None
        self._order.move_to_end(decision.chosen[0])
        if len(self._order) > self._size:
            self._order.popitem(last=False)

    def endpoint_left(self, endpoint_id: str) -> None:
        self._order.pop(endpoint_id, None)

    def adopt(self, previous: object) -> None:
        if isinstance(previous, NoHitLruScorer):
            self._order = previous._order


class ContextLengthAware:
    """Sends prompts to the endpoints that are labelled for their length, `min-max` in tokens.

    In range: 0.3 + 0.7 * (0.7 / (1 + width / 10000) + 0.3 * (max - tokens) / width); a range of width 0: 1.
    Out of range: 0.3 / (1 + distance / 1000).  Without the label: 0.5.  With a label that cannot be read: 0.
    With enableFiltering it is a filter too, which drops labelled endpoints whose range does not hold the prompt.
    """

    type: ClassVar[str] = "context-length-aware"
    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        *,
        label: Annotated[str, "the endpoint label that holds the range"] = "llm-d.ai/context-length-range",
        enable_filtering: Annotated[bool, "drop endpoints out of range instead of only scoring them"] = False,
    ) -> None:
        if not label:
            raise ValueError("label must not be empty")
        self._label = label
        self._is_filtering = enable_filtering
        self._ranges = PerFleet(self._bounds)

    def _bounds(self, fleet: Sequence[Endpoint]) -> Scores:
        """Return (min, max) rows: NaN, NaN without a label; inf, -inf for a label that cannot be read."""
        bounds = np.full((2, len(fleet)), np.nan)
        for row, endpoint in enumerate(fleet):
            text = endpoint.labels.get(self._label)
            if text is not None:
                low, _, high = (part.strip() for part in text.partition("-"))
                is_range = low.isdecimal() and high.isdecimal() and int(low) <= int(high)
                bounds[:, row] = (int(low), int(high)) if is_range else (np.inf, -np.inf)
        return bounds

    def _of(self, view: FleetView) -> Scores:
        bounds = self._ranges.of(view)
        return bounds if view.rows is None else bounds[:, view.rows]

    def keep(self, request: Request, view: FleetView) -> Mask:
        if not self._is_filtering:
            return np.ones(len(view), np.bool_)
        low, high = self._of(view)
        is_within: Mask = (low <= request.prompt_tokens) & (request.prompt_tokens <= high)
        is_within |= np.isnan(low)
        return is_within

    def score(self, request: Request, view: FleetView) -> Scores:
        low, high = self._of(view)
        tokens = float(request.prompt_tokens)
        width = np.maximum(high - low, 1e-9)
        inside = 0.3 + 0.7 * (0.7 / (1.0 + width / 10_000) + 0.3 * (high - tokens) / width)
        inside = np.where(high == low, 1.0, inside)
        outside = 0.3 / (1.0 + np.maximum(np.maximum(low - tokens, tokens - high), 0.0) / 1000)
        scores = np.where((low <= tokens) & (tokens <= high), inside, outside)
        return np.where(np.isnan(low), 0.5, np.where(low > high, 0.0, scores))
