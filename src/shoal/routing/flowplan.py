"""How requests wait, as a configuration says: llm-d's `flowControl` document and the pool's own `flow` in one plan.

Owns which policy stands where none is named: llm-d's own with llm-d's feature gate, Shoal's with `flow.enabled`.
"""

from typing import Any, NamedTuple

from shoal.flow import BandPolicy, Detector, Fairness, Ordering, QueuePolicy, UsageLimit
from shoal.flow.adaptive import AdaptiveDetector
from shoal.flow.ceilings import PriorityHoldback, StaticUsageLimit
from shoal.flow.fairness import GlobalStrictFairness, TokenFairness
from shoal.flow.ordering import FcfsOrdering, TurnAwareOrdering
from shoal.routing.documents import Reader
from shoal.routing.evictions import Mode
from shoal.routing.pickerfile import BandSpec, FlowControl, PickerDocument, PluginRef
from shoal.routing.policies import Plugins
from shoal.routing.settings import Flow

HELD_BACK_RATIO = 0.25
"""Of the pool's room, for the highest band, where Shoal's own defaults hold and there are several bands."""

LONGEST_WAIT_S = 3480.0
"""In the queue and for endpoints together: Envoy waits an hour for a picker, then passes a request unrouted."""


class FlowPlan(NamedTuple):
    """ttl_s: how long a request waits while its model has endpoints.  priorities: of the configured bands.
    eviction: of requests that run."""

    queue: QueuePolicy
    detector: Detector
    usage_limit: UsageLimit
    ttl_s: float
    priorities: tuple[int, ...]
    eviction: Mode = Mode.NEVER


def build_plan(picker: PickerDocument, flow: Flow, plugins: Plugins, reader: Reader) -> FlowPlan | None:
    """Return the plan of a file, None when it has no flow control.  Raises ConfigError."""
    is_gated = any(gate in ("flowControl", "flowControl=true") for gate in picker.feature_gates)
    given = picker.flow_control
    if given is not None:
        _check_bands(given, plugins, reader)
    if not (is_gated or flow.enabled):
        return None
    return _Builder(picker, given or FlowControl(), flow, plugins, reader, is_own=flow.enabled).plan()


def _check_bands(given: FlowControl, plugins: Plugins, reader: Reader) -> None:
    """Refuse what no gate makes good."""
    seen: set[int] = set()
    for at, band in enumerate(given.priority_bands):
        if band.priority in seen:
            raise reader.error(
                f"flowControl.priorityBands[{at}].priority", f"there is already a band of priority {band.priority}"
            )
        seen.add(band.priority)


class _Builder:
    """Makes one plan.  is_own: Shoal's policies where the file names none."""

    def __init__(
        self, picker: PickerDocument, given: FlowControl, flow: Flow, plugins: Plugins, reader: Reader, *, is_own: bool
    ) -> None:
        self._picker = picker
        self._given = given
        self._flow = flow
        self._plugins = plugins
        self._reader = reader
        self._fairness: type[Any] = TokenFairness if is_own else GlobalStrictFairness
        self._ordering: type[Any] = TurnAwareOrdering if is_own else FcfsOrdering
        self._is_own = is_own

    def plan(self) -> FlowPlan:
        given, flow = self._given, self._flow
        fallback = self._band(given.default_priority_band or BandSpec(), "flowControl.defaultPriorityBand")
        negative = given.default_negative_priority_band
        ttl_s, no_endpoint_s = self._waits()
        queue = QueuePolicy(
            fallback=fallback,
            negative_fallback=self._band(negative, "flowControl.defaultNegativePriorityBand") if negative else fallback,
            bands={
                band.priority: self._band(band, f"flowControl.priorityBands[{at}]")
                for at, band in enumerate(given.priority_bands)
            },
            max_requests=given.max_requests,
            max_bytes=given.max_bytes,
            no_endpoint_ttl_s=no_endpoint_s,
            is_strict=flow.bands == "strict",
            minimum_share_ratio=flow.minimum_share_ratio,
        )
        return FlowPlan(
            queue,
            self._detector(),
            self._usage_limit(),
            ttl_s,
            tuple(sorted(queue.bands, reverse=True)),
            self._eviction(),
        )

    def _waits(self) -> tuple[float, float]:
        """Return how long a request waits with endpoints, and without; no limit (0) is as long as may be."""
        ttl_s, no_endpoint_s = self._given.default_request_ttl, self._given.no_endpoint_request_ttl
        left_s = LONGEST_WAIT_S - ttl_s - (no_endpoint_s or 0.0)
        if left_s <= 0:
            field = "defaultRequestTTL" if ttl_s >= (no_endpoint_s or 0.0) else "noEndpointRequestTTL"
            raise self._reader.error(
                f"flowControl.{field}",
                f"defaultRequestTTL and noEndpointRequestTTL must be under {LONGEST_WAIT_S / 60:.0f}m together, as "
                "Envoy passes a request that waits an hour to any endpoint; give shorter ones, or 0 for the longest",
            )
        if no_endpoint_s is None:
            no_endpoint_s = min(ttl_s or 60.0, left_s)
            left_s -= no_endpoint_s
        if not ttl_s and not no_endpoint_s:
            return left_s / 2, left_s / 2
        return ttl_s or left_s, no_endpoint_s or left_s

    def _eviction(self) -> Mode:
        if self._flow.eviction is not None:
            return Mode(self._flow.eviction)
        return Mode.BEFORE_FIRST_BYTE if self._given.enable_eviction else Mode.NEVER

    def _band(self, spec: BandSpec, path: str) -> BandPolicy:
        fairness = self._named(
            spec.fairness_policy_ref, self._fairness, Fairness, f"{path}.fairnessPolicyRef", "fairness"
        )
        ordering = self._named(
            spec.ordering_policy_ref, self._ordering, Ordering, f"{path}.orderingPolicyRef", "ordering"
        )
        return BandPolicy(fairness, ordering, spec.max_requests, spec.max_bytes)

    def _detector(self) -> Detector:
        ref: PluginRef | None = self._given.saturation_detector or self._picker.saturation_detector
        path = "flowControl.saturationDetector" if self._given.saturation_detector else "saturationDetector"
        # llm-d's own detector halts where metrics are old: whoever wants it has to say so.
        found: Detector = self._named(
            ref.plugin_ref if ref else "", AdaptiveDetector, Detector, f"{path}.pluginRef", "saturation detector"
        )
        return found

    def _usage_limit(self) -> UsageLimit:
        name = self._given.usage_limit_policy_plugin_ref
        if not name and self._is_own:
            return PriorityHoldback(min_ceiling=1.0 - HELD_BACK_RATIO)
        path = "flowControl.usageLimitPolicyPluginRef"
        found: UsageLimit = self._named(name, StaticUsageLimit, UsageLimit, path, "usage limit")
        return found

    def _named(self, name: str, default: type[Any], kind: Any, path: str, what: str) -> Any:
        """The plugin of a name, one of a type of that name with its defaults, or the default."""
        configured = self._plugins.find(name or default.type)
        if configured is None:
            known = self._plugins.known(name) if name else default
            if known is None:
                self._plugins.get(name, path)
            configured = self._plugins.add_default(known or default)
        if not isinstance(configured.plugin, kind):
            raise self._reader.error(path, f"must name a {what} policy, {configured.name} is a {configured.type}")
        return configured.plugin
