"""The fields of llm-d's documents: EndpointPickerConfig, InferenceModelRewrite, InferenceObjective.

Structs only, in llm-d's spelling and with its defaults.  What they mean for the router is `config`.
"""

from typing import Annotated, Literal

import msgspec

from shoal.kernel.marks import Duration, Quantity
from shoal.routing.documents import Raw
from shoal.scheduling.plugin import Ignored

_PARSERS = Ignored("Shoal always reads every API that it knows")


class PluginSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A configured plugin.  name: its type by default."""

    type: str
    name: str = ""
    parameters: Raw | None = None


class PluginRef(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a configured plugin."""

    plugin_ref: str = msgspec.field(default="", name="pluginRef")


class WeightedRef(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin of a profile.  weight: for scorers, 1 by default."""

    plugin_ref: str = msgspec.field(name="pluginRef")
    weight: float | None = None


class ProfileSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A profile: its plugins in order."""

    name: str
    plugins: tuple[WeightedRef, ...] = ()


class SourceSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A data source and what reads it."""

    plugin_ref: str
    extractors: tuple[PluginRef, ...] = ()


class DataLayer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where data about endpoints comes from."""

    inject_defaults: Annotated[bool, Ignored("metrics and models are always read", alike=(True,))] = True
    sources: tuple[SourceSpec, ...] = ()
    discovery: PluginRef | None = None
    peer_discovery: PluginRef | None = None
    cross_replica_syncer_plugin_ref: str = ""
    cross_replica_sync_interval: Annotated[
        float, Duration(), Ignored("nothing is shared between replicas", alike=(0.2,))
    ] = 0.2


class BandSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A priority band of flow control.  Policies that it does not name are the defaults of whoever turned it on."""

    priority: int = 0
    max_bytes: Annotated[int, Quantity()] = msgspec.field(default=10**9, name="maxBytes")
    max_requests: Annotated[int, Quantity()] = msgspec.field(default=5000, name="maxRequests")
    fairness_policy_ref: str = msgspec.field(default="", name="fairnessPolicyRef")
    ordering_policy_ref: str = msgspec.field(default="", name="orderingPolicyRef")


class FlowControl(msgspec.Struct, frozen=True, kw_only=True):
    """Queues and priorities; read and checked, without effect while flow control is off."""

    max_bytes: Annotated[int, Quantity()] = msgspec.field(default=0, name="maxBytes")
    max_requests: Annotated[int, Quantity()] = msgspec.field(default=0, name="maxRequests")
    default_request_ttl: Annotated[float, Duration()] = msgspec.field(default=60.0, name="defaultRequestTTL")
    no_endpoint_request_ttl: Annotated[float | None, Duration()] = msgspec.field(
        default=None, name="noEndpointRequestTTL"
    )
    default_priority_band: BandSpec | None = msgspec.field(default=None, name="defaultPriorityBand")
    default_negative_priority_band: BandSpec | None = msgspec.field(default=None, name="defaultNegativePriorityBand")
    priority_bands: tuple[BandSpec, ...] = msgspec.field(default=(), name="priorityBands")
    usage_limit_policy_plugin_ref: str = msgspec.field(default="", name="usageLimitPolicyPluginRef")
    saturation_detector: PluginRef | None = msgspec.field(default=None, name="saturationDetector")
    enable_eviction: bool = msgspec.field(default=False, name="enableEviction")


class RequestHandler(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are read."""

    parsers: Annotated[tuple[PluginRef, ...], _PARSERS] = ()


class PickerDocument(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`kind: EndpointPickerConfig`."""

    api_version: str
    kind: str
    feature_gates: tuple[str, ...] = ()
    plugins: tuple[PluginSpec, ...] = ()
    scheduling_profiles: tuple[ProfileSpec, ...] = ()
    data_layer: DataLayer = DataLayer()
    flow_control: FlowControl | None = None
    request_handler: RequestHandler = RequestHandler()
    saturation_detector: PluginRef | None = None
    parser: Annotated[PluginRef | None, _PARSERS] = None


class Metadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What identifies a Kubernetes object; the fields that a cluster adds are read and not used."""

    name: str
    namespace: str = ""
    labels: object = None
    annotations: object = None
    creation_timestamp: object = None
    generation: object = None
    managed_fields: object = None
    owner_references: object = None
    finalizers: object = None
    resource_version: object = None
    self_link: object = None
    uid: object = None


class PoolRef(msgspec.Struct, frozen=True, kw_only=True):
    """The pool that an object belongs to; a file belongs to the pool that reads it."""

    name: str
    group: str = "inference.networking.k8s.io"
    kind: str = "InferencePool"


class ModelMatch(msgspec.Struct, frozen=True, kw_only=True):
    """A model name, compared exactly."""

    value: str
    type: Literal["Exact"] = "Exact"


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """What a rewrite applies to."""

    model: ModelMatch | None = None


class RewriteTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go.  weight: share among the targets, 1 to 1,000,000."""

    model: str = msgspec.field(name="modelRewrite")
    weight: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.weight <= 1_000_000:
            raise ValueError(f"weight must be 1 to 1000000, got {self.weight}")


class RewriteRule(msgspec.Struct, frozen=True, kw_only=True):
    """Matches and targets.  Without matches it applies to every model."""

    targets: tuple[RewriteTarget, ...]
    matches: tuple[Match, ...] = ()

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError("targets must not be empty")


class RewriteSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The rules, in order."""

    rules: tuple[RewriteRule, ...]
    pool_ref: PoolRef | None = None


class RewriteDocument(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`kind: InferenceModelRewrite`."""

    api_version: str
    kind: str
    metadata: Metadata
    spec: RewriteSpec
    status: object = None


class ObjectiveSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A priority; larger goes first."""

    priority: int = 0
    pool_ref: PoolRef | None = None


class ObjectiveDocument(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`kind: InferenceObjective`."""

    api_version: str
    kind: str
    metadata: Metadata
    spec: ObjectiveSpec = ObjectiveSpec()
    status: object = None
