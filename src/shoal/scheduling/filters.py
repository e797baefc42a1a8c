"""Filters: which candidates may serve the request at all.

Each returns one bool per candidate.  A filter may empty the set, then the request is refused as saturated, except
where its page says that it never does.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from shoal.pool import Endpoint, FleetView, Request
from shoal.scheduling.cache_scorers import matched_column, matched_ratio
from shoal.scheduling.columns import PerFleet, known, worst_high
from shoal.scheduling.load_scorers import InflightRef
from shoal.scheduling.plugin import Key, Mask, Ref
from shoal.scheduling.producers import PrefixRef

ROLE_LABEL = "llm-d.ai/role"


class Expression(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One requirement on a label, as in a Kubernetes selector.

    NotIn and DoesNotExist also match endpoints without the label.
    """

    key: Annotated[str, "label name"]
    operator: Annotated[Literal["In", "NotIn", "Exists", "DoesNotExist"], "how the label is compared"]
    values: Annotated[tuple[str, ...], "for In and NotIn"] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


class _ByLabels:
    """A mask over the fleet from labels alone, made once per fleet."""

    __slots__ = ("_mask",)

    def __init__(self, matches: Callable[[Mapping[str, str]], bool]) -> None:
        def mask(fleet: Sequence[Endpoint]) -> Mask:
            return np.fromiter((matches(endpoint.labels) for endpoint in fleet), np.bool_, len(fleet))

        self._mask = PerFleet(mask)

    def of(self, view: FleetView) -> Mask:
        mask = self._mask.of(view)
        return mask if view.rows is None else mask[view.rows]


class LabelSelectorFilter:
    """Keeps endpoints whose labels match a Kubernetes label selector; an empty selector matches all."""

    type: ClassVar[str] = "label-selector-filter"

    def __init__(
        self,
        *,
        match_labels: Annotated[Mapping[str, str], "labels that must have exactly these values"] = MappingProxyType({}),
        match_expressions: Annotated[tuple[Expression, ...], "requirements that must all hold"] = (),
    ) -> None:
        for at, expression in enumerate(match_expressions):
            if (expression.operator in ("In", "NotIn")) != bool(expression.values):
                wanted = "needs values" if expression.operator in ("In", "NotIn") else "takes no values"
                raise ValueError(f"matchExpressions[{at}]: operator {expression.operator} {wanted}")

        def matches(labels: Mapping[str, str]) -> bool:
            return all(labels.get(key) == value for key, value in match_labels.items()) and all(
                expression.matches(labels) for expression in match_expressions
            )

        self._mask = _ByLabels(matches)

    def keep(self, request: Request, view: FleetView) -> Mask:
        return self._mask.of(view)


class ByLabel:
    """Keeps endpoints whose label has one of the valid values.  Deprecated: use label-selector-filter."""

    type: ClassVar[str] = "by-label"

    def __init__(
        self,
        *,
        label: Annotated[str, "label name"],
        valid_values: Annotated[tuple[str, ...], "values that pass"] = (),
        allows_no_label: Annotated[bool, "whether endpoints without the label pass"] = False,
    ) -> None:
        if not label:
            raise ValueError("label must not be empty")
        if not valid_values and not allows_no_label:
            raise ValueError("validValues must not be empty unless allowsNoLabel is true")

        def matches(labels: Mapping[str, str]) -> bool:
            return labels[label] in valid_values if label in labels else allows_no_label

        self._mask = _ByLabels(matches)

    def keep(self, request: Request, view: FleetView) -> Mask:
        return self._mask.of(view)


def _by_role(*roles: str, is_default: bool = False) -> _ByLabels:
    return _ByLabels(lambda labels: labels[ROLE_LABEL] in roles if ROLE_LABEL in labels else is_default)


class DecodeFilter:
    """Keeps endpoints that decode: role decode, prefill-decode, both or encode-prefill-decode, or no role label."""

    type: ClassVar[str] = "decode-filter"

    def __init__(self) -> None:
        self._mask = _by_role("decode", "prefill-decode", "both", "encode-prefill-decode", is_default=True)

    def keep(self, request: Request, view: FleetView) -> Mask:
        return self._mask.of(view)


class PrefillFilter:
    """Keeps endpoints that prefill: role prefill, encode-prefill, prefill-decode, both or encode-prefill-decode."""

    type: ClassVar[str] = "prefill-filter"

    def __init__(self) -> None:
        self._mask = _by_role("prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode")

    def keep(self, request: Request, view: FleetView) -> Mask:
        return self._mask.of(view)


class EncodeFilter:
    """Keeps endpoints that encode: role encode, encode-prefill or encode-prefill-decode."""

    type: ClassVar[str] = "encode-filter"

    def __init__(self) -> None:
        self._mask = _by_role("encode", "encode-prefill", "encode-prefill-decode")

    def keep(self, request: Request, view: FleetView) -> Mask:
        return self._mask.of(view)


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An upper limit on one figure of load."""

    metric: Annotated[
        Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"],
        "active-requests is Shoal's own count, the others are the engine's",
    ]
    max_value: Annotated[float, "largest value that passes; kv-cache-utilization is 0 to 1"]


_COLUMN_OF_METRIC = {
    "active-requests": "inflight_requests",
    "running-requests": "running",
    "waiting-queue": "waiting",
    "kv-cache-utilization": "kv_usage",
}


class UtilizationFilter:
    """Keeps endpoints that meet every condition.

    An unknown figure counts as the largest known one; a figure that is unknown everywhere drops nobody.
    """

    type: ClassVar[str] = "utilization-filter"
    needs: ClassVar[tuple[str, ...]] = tuple(_COLUMN_OF_METRIC.values())

    def __init__(
        self,
        *,
        conditions: Annotated[tuple[Condition, ...], "limits that must all hold; at least one"],
        fallback_on_empty: Annotated[bool, "keep all candidates when none passes"] = False,
        in_flight_load_producer_name: InflightRef = "",
    ) -> None:
        if not conditions:
            raise ValueError("conditions must not be empty")
        for at, condition in enumerate(conditions):
            if condition.max_value < 0 or (condition.metric == "kv-cache-utilization" and condition.max_value > 1):
                raise ValueError(f"conditions[{at}].maxValue is out of range for {condition.metric}")
        self._conditions = conditions
        self._is_lenient = fallback_on_empty

    def keep(self, request: Request, view: FleetView) -> Mask:
        mask = np.ones(len(view), np.bool_)
        for condition in self._conditions:
            figure = worst_high(known(view, _COLUMN_OF_METRIC[condition.metric]))
            mask &= ~(figure > condition.max_value)
        if self._is_lenient and not mask.any():
            return np.ones(len(view), np.bool_)
        return mask


class PrefixCacheAffinityFilter:
    """Keeps the endpoints that hold most of the prompt, unless they are much busier than the others.

    Sticky endpoints hold at least affinityThreshold of the prompt; without any, all stay.  The expected ttft of an
    endpoint is its uncached tokens in flight / peakPrefillThroughput, or with ttftSource latencyPredictor the predicted
    one where it is predicted.  When the best sticky endpoint's ttft is more than maxTTFTPenaltyMs above the best
    other's, all stay.  Never empties the set.
    """

    type: ClassVar[str] = "prefix-cache-affinity-filter"
    needs: ClassVar[tuple[str, ...]] = ("matched_tokens", "inflight_uncached_tokens", "predicted_ttft_s")

    def __init__(
        self,
        *,
        affinity_threshold: Annotated[float, "matched share of the prompt, up to 1; 0 or less turns it off"] = 0.80,
        exploration_probability: Annotated[float, "share of requests that skip the filter, 0 to 1"] = 0.0,
        max_ttft_penalty_ms: Annotated[float, "0 never gives way", Key("maxTTFTPenaltyMs")] = 18_000.0,
        ttft_source: Annotated[
            Literal["prefillThroughput", "latencyPredictor"], "how the ttft of an endpoint is expected"
        ] = "prefillThroughput",
        peak_prefill_throughput: Annotated[float, "tokens per second of one endpoint"] = 15_928.0,
        prefix_match_info_producer_name: PrefixRef = "",
        latency_prediction_info_producer_name: Annotated[
            str, "for ttftSource latencyPredictor", Ref("predicted-latency-producer")
        ] = "",
        in_flight_load_producer_name: InflightRef = "",
    ) -> None:
        if affinity_threshold > 1:
            raise ValueError(f"affinityThreshold must be at most 1, got {affinity_threshold}")
        if not 0 <= exploration_probability <= 1:
            raise ValueError(f"explorationProbability must be 0 to 1, got {exploration_probability}")
        if max_ttft_penalty_ms < 0:
            raise ValueError(f"maxTTFTPenaltyMs must not be negative, got {max_ttft_penalty_ms}")
        if peak_prefill_throughput < 0 or (max_ttft_penalty_ms > 0 and peak_prefill_throughput == 0):
            raise ValueError(f"peakPrefillThroughput must be above 0, got {peak_prefill_throughput}")
        self._threshold = affinity_threshold
        self._producer, self._matched = prefix_match_info_producer_name, "matched_tokens"
        self._exploration = exploration_probability
        # The penalty in tokens of prefill saves a division of a whole column per request.
        self._penalty_tokens = max_ttft_penalty_ms / 1000 * peak_prefill_throughput
        self._penalty_s = max_ttft_penalty_ms / 1000
        self.reads_predictions = ttft_source == "latencyPredictor"
        self._chance: np.random.Generator | None = None

    def connect(self, plugins: Mapping[str, object]) -> None:
        self._matched = matched_column(plugins, self._producer)

    def draw_from(self, stream: np.random.Generator) -> None:
        self._chance = stream

    def keep(self, request: Request, view: FleetView) -> Mask:
        everyone = np.ones(len(view), np.bool_)
        if len(view) <= 1 or self._threshold <= 0:
            return everyone
        if self._exploration > 0 and self._chance is not None and self._chance.random() < self._exploration:
            return everyone
        sticky: Mask = matched_ratio(request, view, self._matched) >= self._threshold
        if not sticky.any() or sticky.all():
            return everyone
        if self.reads_predictions and self._penalty_s > 0 and view.has("predicted_ttft_s"):
            ttft_s = worst_high(view.column("predicted_ttft_s"))
            if not np.isnan(ttft_s).any():
                is_slow = ttft_s[sticky].min() - ttft_s[~sticky].min() > self._penalty_s
                return everyone if is_slow else sticky
        if self._penalty_tokens > 0:
            tokens = worst_high(known(view, "inflight_uncached_tokens"))
            if tokens[sticky].min() - tokens[~sticky].min() > self._penalty_tokens:
                return everyone
        return sticky
