"""From the text of a configuration file to what the router and the hosts run with.

Owns which documents a file may hold, the rules of llm-d's EndpointPickerConfig (defaults, profiles, references) and
the effective configuration.  How a value is read is `documents`; which fields exist is `pickerfile` and `settings`.
Reads no file: a host gives the text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import yaml

from shoal.routing.catalog import installed
from shoal.routing.documents import Reader
from shoal.routing.flowplan import FlowPlan, build_plan
from shoal.routing.pickerfile import (
    DataLayer,
    FlowControl,
    ObjectiveDocument,
    PickerDocument,
    RewriteDocument,
    RewriteTarget,
)
from shoal.routing.policies import ConfiguredPlugin, Plugins, build_policy, stated
from shoal.routing.settings import PoolSettings
from shoal.routing.tenancy import ANYONE, DEADLINE_HEADERS
from shoal.scheduling import Policy, Registry
from shoal.scheduling.exact_producers import BurstPrefixCacheProducer, PrecisePrefixCacheProducer, TokenProducer
from shoal.scheduling.producers import (
    ApproxPrefixCacheProducer,
    FileDiscovery,
    InflightLoadProducer,
    PredictedLatencyProducer,
)
from shoal.scheduling.schema import fields
from shoal.wire.documents import compose

NOT_YET = "docs/config.md#not-yet"
_PICKER_VERSIONS = ("llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
_OBJECT_VERSIONS = ("llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2")
_VERSIONS = {
    "EndpointPickerConfig": _PICKER_VERSIONS,
    "InferenceModelRewrite": _OBJECT_VERSIONS,
    "InferenceObjective": _OBJECT_VERSIONS,
    "Pool": ("shoal.dev/v1alpha1",),
}
_GATES = ("flowControl", "haPopulateNonLeaderDatastore")


class PoolDocument(PoolSettings, frozen=True, kw_only=True):
    """`kind: Pool`: the settings, and what says that they are."""

    api_version: str = msgspec.field(name="apiVersion")
    kind: str = "Pool"
    metadata: object = None


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A validated configuration.

    policy: how requests are placed.  plugins: all configured ones, in file order.  prefix, inflight, tokens: parameters
    of these producers, the defaults where the file names none.  precise, burst, predicted: those of the exact index, of
    bursts and of predicted latency, None without.  discovery: the endpoints file that the configuration names, None for
    none.  pool: host settings.  stated: paths of `pool` that the file gives, as `listen.port`, so that a flag knows
    whether it overrides.  rewrites: model name ("" for any) -> weighted targets.  objectives: name -> priority.
    request_headers: lower-case names that plugins read.  response_headers: those that plugins may give.  warnings:
    lines for the operator.  flow: how requests wait, None when they do not.  flow_control, is_gated: what llm-d's
    document says of it.
    """

    policy: Policy
    plugins: tuple[ConfiguredPlugin, ...]
    prefix: ApproxPrefixCacheProducer
    inflight: InflightLoadProducer
    tokens: TokenProducer
    precise: PrecisePrefixCacheProducer | None
    burst: BurstPrefixCacheProducer | None
    predicted: PredictedLatencyProducer | None
    discovery: FileDiscovery | None
    pool: PoolSettings
    stated: tuple[str, ...]
    rewrites: Mapping[str, tuple[RewriteTarget, ...]]
    objectives: Mapping[str, int]
    data_layer: DataLayer
    request_headers: tuple[str, ...]
    response_headers: tuple[str, ...]
    warnings: tuple[str, ...]
    flow: FlowPlan | None = None
    flow_control: FlowControl | None = None
    is_gated: bool = False


class _Documents:
    """The documents of a file, each read by a reader of its own."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.picker: tuple[PickerDocument, Reader] | None = None
        self.pool: tuple[PoolDocument, Reader] | None = None
        self.rewrites: list[RewriteDocument] = []
        self.objectives: list[ObjectiveDocument] = []
        self.warnings: list[str] = []

    def take(self, root: yaml.MappingNode) -> None:
        reader = Reader(self.source)
        reader.at("", root)
        match _kind(root, reader):
            case "EndpointPickerConfig":
                self._single(self.picker, reader)
                self.picker = (reader.struct(root, PickerDocument, ""), reader)
            case "Pool":
                self._single(self.pool, reader)
                self.pool = (reader.struct(root, PoolDocument, ""), reader)
            case "InferenceModelRewrite":
                self.rewrites.append(reader.struct(root, RewriteDocument, ""))
            case "InferenceObjective":
                self.objectives.append(reader.struct(root, ObjectiveDocument, ""))
        if self.picker is None or reader is not self.picker[1]:
            self.warnings += reader.warnings

    @staticmethod
    def _single(earlier: object, reader: Reader) -> None:
        if earlier is not None:
            raise reader.error("kind", "stands twice in this file; there may be one")


def _kind(root: yaml.MappingNode, reader: Reader) -> str:
    """Return the kind of a document, after checking that it and its version are known."""
    given = {key.value: value for key, value in root.value}
    for key, node in given.items():
        if key in ("kind", "apiVersion"):
            reader.at(key, node)
    kind = _word(given.get("kind"))
    if kind not in _VERSIONS:
        raise reader.error("kind", f"must be one of {', '.join(_VERSIONS)}, got {kind[:80]!r}")
    version = _word(given.get("apiVersion"))
    if version not in _VERSIONS[kind]:
        raise reader.error("apiVersion", f"of {kind} must be {' or '.join(_VERSIONS[kind])}, got {version[:80]!r}")
    return kind


def _word(node: yaml.Node | None) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""


def load(text: str, source: str, registry: Registry | None = None) -> RouterConfig:
    """Read a configuration.  Empty text gives the defaults.

    source: file name for errors.  registry: the plugins that a file may name; all that are installed by default.
    Raises ConfigError with path and line for the first thing that is wrong.
    """
    return read(compose(text, source), source, registry)


def read(roots: Sequence[yaml.MappingNode], source: str, registry: Registry | None = None) -> RouterConfig:
    """Read the documents of a configuration, as `load` does its text."""
    documents = _Documents(source)
    for root in roots:
        documents.take(root)
    blank = PickerDocument(api_version=_PICKER_VERSIONS[0], kind="EndpointPickerConfig")
    picker, reader = documents.picker or (blank, Reader(source))
    pool, pool_reader = documents.pool or (PoolSettings(), Reader(source))
    plugins = Plugins(registry or installed(), reader)
    for at, spec in enumerate(picker.plugins):
        plugins.add(spec, f"plugins[{at}]")
    _check_gates(picker, reader)
    predicted = plugins.predicted()
    plugins.connect()
    policy = build_policy(picker.scheduling_profiles, plugins, reader, pool.retries.fallbacks)
    discovery = _check_references(picker, plugins, reader)
    flow = build_plan(picker, pool.flow, plugins, reader)
    objectives = {document.metadata.name: document.spec.priority for document in documents.objectives}
    _check_tenants(pool, objectives, pool_reader)
    is_read = flow is not None or bool(policy.admitters)
    _warn_of_flow(picker, pool, documents, reader, is_on=flow is not None, is_read=is_read)
    settings = PoolSettings(**{name: getattr(pool, name) for name in PoolSettings.__struct_fields__})
    return RouterConfig(
        policy=policy,
        plugins=plugins.configured,
        prefix=plugins.only(ApproxPrefixCacheProducer) or ApproxPrefixCacheProducer(),
        inflight=plugins.only(InflightLoadProducer) or InflightLoadProducer(),
        tokens=plugins.only(TokenProducer) or TokenProducer(),
        precise=plugins.only(PrecisePrefixCacheProducer),
        burst=plugins.only(BurstPrefixCacheProducer),
        predicted=predicted,
        discovery=discovery,
        pool=settings,
        stated=pool_reader.stated(""),
        rewrites=_rewrites(documents.rewrites),
        objectives=objectives,
        data_layer=picker.data_layer,
        request_headers=tuple(sorted({*plugins.request_headers(), *(DEADLINE_HEADERS if flow else ())})),
        response_headers=plugins.response_headers(),
        warnings=(*reader.warnings, *documents.warnings),
        flow=flow,
        flow_control=picker.flow_control,
        is_gated=_is_gated(picker),
    )


def _check_gates(picker: PickerDocument, reader: Reader) -> None:
    for at, gate in enumerate(picker.feature_gates):
        path = f"featureGates[{at}]"
        name, _, value = gate.partition("=")
        if name not in _GATES:
            raise reader.error(path, f"unknown gate {name}, known are {', '.join(_GATES)}")
        if value not in ("", "true", "false"):
            raise reader.error(path, f"must be {name}, {name}=true or {name}=false")
        if name == "haPopulateNonLeaderDatastore":
            reader.warn(path, f"has no effect: {name} is about replicas in Kubernetes")


def _is_gated(picker: PickerDocument) -> bool:
    return any(gate in ("flowControl", "flowControl=true") for gate in picker.feature_gates)


def _check_tenants(pool: PoolSettings, objectives: Mapping[str, int], reader: Reader) -> None:
    for name, tenant in pool.tenants.items():
        if tenant.objective and tenant.objective not in objectives:
            known = ", ".join(sorted(objectives)) or "none"
            path = f"tenants.{name}.objective"
            raise reader.error(
                path, f"no InferenceObjective of this file is named {tenant.objective!r}, known: {known}"
            )


def _warn_of_flow(
    picker: PickerDocument, pool: PoolSettings, documents: "_Documents", reader: Reader, *, is_on: bool, is_read: bool
) -> None:
    """Say what of flow control stands in the file and does nothing.  is_read: whether anything asks for priorities."""
    names = [name for name in pool.tenants if name != ANYONE]
    if names and not pool.auth.keys_file and not pool.flow.trust_headers:
        documents.warnings.append(
            f"{reader.source}: tenants: no request belongs to {', '.join(names[:5])}: tenants are known by their keys "
            "(auth.keys_file), or by headers where flow.trust_headers of kind Pool is set"
        )
    if is_on:
        is_named = any(tenant.objective for tenant in pool.tenants.values())
        if documents.objectives and not pool.flow.trust_headers and not is_named:
            documents.warnings.append(
                f"{reader.source}: no InferenceObjective raises a priority: clients are not believed unless "
                "flow.trust_headers of kind Pool is set, and no tenant names an objective"
            )
        return
    for path, given in (
        ("flowControl", picker.flow_control),
        ("saturationDetector", picker.saturation_detector),
    ):
        if given is not None:
            reader.warn(path, "has no effect: flow control is off, see docs/flow.md")
    if documents.objectives and not is_read:
        documents.warnings.append(
            f"{reader.source}: kind: has no effect: an InferenceObjective needs flow control, which is off, see "
            "docs/flow.md"
        )


def _check_references(picker: PickerDocument, plugins: Plugins, reader: Reader) -> FileDiscovery | None:
    """Check what names a plugin outside the profiles; return the discovery that the file asks for."""
    for at, given in enumerate(picker.data_layer.sources):
        plugins.get(given.plugin_ref, f"dataLayer.sources[{at}].pluginRef")
        for nth, extractor in enumerate(given.extractors):
            plugins.get(extractor.plugin_ref, f"dataLayer.sources[{at}].extractors[{nth}].pluginRef")
    for at, parser in enumerate(picker.request_handler.parsers):
        plugins.get(parser.plugin_ref, f"requestHandler.parsers[{at}].pluginRef")
    if picker.data_layer.peer_discovery is not None or picker.data_layer.cross_replica_syncer_plugin_ref:
        field = "peerDiscovery" if picker.data_layer.peer_discovery else "crossReplicaSyncerPluginRef"
        raise reader.error(f"dataLayer.{field}", "replicas share through `sharing` of kind: Pool: see docs/sharing.md")
    if picker.data_layer.discovery is None:
        return None
    path = "dataLayer.discovery.pluginRef"
    discovery = plugins.get(picker.data_layer.discovery.plugin_ref, path).plugin
    if not isinstance(discovery, FileDiscovery):
        raise reader.error(path, "must name a plugin of type file-discovery")
    return discovery


def _rewrites(documents: list[RewriteDocument]) -> dict[str, tuple[RewriteTarget, ...]]:
    """Return targets by exact name, "" for any; of several rules for a name the older object's first one holds."""
    found: dict[str, tuple[RewriteTarget, ...]] = {}
    for document in sorted(documents, key=lambda each: str(each.metadata.creation_timestamp or "~")):
        for rule in document.spec.rules:
            for name in [match.model.value if match.model else "" for match in rule.matches] or [""]:
                found.setdefault(name, rule.targets)
    return found


# ------------------------------------------------------------------ the effective configuration


def effective(config: RouterConfig) -> str:
    """Return the configuration as YAML documents with every default filled in; `load` reads it back to the same."""
    documents: list[dict[str, Any]] = [_picker_document(config), _pool_document(config)]
    for name, targets in config.rewrites.items():
        matches = {"matches": [{"model": {"type": "Exact", "value": name}}]} if name else {}
        rules = [{**matches, "targets": msgspec.to_builtins(targets)}]
        documents.append(_object("InferenceModelRewrite", f"rewrite-{len(documents) - 1}", {"rules": rules}))
    for name, priority in config.objectives.items():
        documents.append(_object("InferenceObjective", name, {"priority": priority}))
    return yaml.safe_dump_all(documents, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120)


def _picker_document(config: RouterConfig) -> dict[str, Any]:
    profile = config.policy.profile
    weights = {named.name: named.weight for named in profile.scorers}
    references = [
        {"pluginRef": named.name} | ({"weight": weights[named.name]} if named.name in weights else {})
        for named in profile.plugins()
    ]
    data_layer = _without_blanks(msgspec.to_builtins(config.data_layer))
    data_layer["crossReplicaSyncInterval"] = f"{config.data_layer.cross_replica_sync_interval:g}s"
    flow: dict[str, Any] = {"featureGates": ["flowControl"]} if config.is_gated else {}
    if config.flow_control is not None:
        known = fields(FlowControl)
        values = {each.key: getattr(config.flow_control, each.name) for each in known}
        flow["flowControl"] = _without_blanks(stated(known, values))
    return {
        "apiVersion": _PICKER_VERSIONS[0],
        "kind": "EndpointPickerConfig",
        **flow,
        "plugins": [plugin.as_document() for plugin in config.plugins],
        "schedulingProfiles": [{"name": profile.name, "plugins": references}],
        "dataLayer": data_layer,
    }


def _pool_document(config: RouterConfig) -> dict[str, Any]:
    # Read-only mappings are no builtin type, so the hook makes them dicts.
    settings = msgspec.to_builtins(config.pool, enc_hook=dict)
    return {"apiVersion": "shoal.dev/v1alpha1", "kind": "Pool", **settings}


def _without_blanks(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item not in (None, "")}


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": _OBJECT_VERSIONS[0], "kind": kind, "metadata": {"name": name}, "spec": spec}
