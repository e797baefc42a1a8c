"""Which plugin types of scheduling exist, and what to say about those that do not.

Built-in ones are listed here; those of other rooms and of third parties are added by `routing.catalog`.  The names that
llm-d has and this version lacks are known too, so that a file that uses one is told so.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.kernel import ConfigError
from shoal.scheduling import (
    admitters,
    affinity,
    baselines_costs,
    baselines_rings,
    baselines_trees,
    baselines_windows,
    cache_scorers,
    exact_producers,
    expected_wait,
    filters,
    handlers,
    latency,
    load_scorers,
    pickers,
    producers,
)

BUILT_IN: dict[str, tuple[type[Any], ...]] = {
    "Scorers": (
        expected_wait.ExpectedWaitScorer,
        load_scorers.QueueScorer,
        load_scorers.RunningRequestsSizeScorer,
        load_scorers.KvCacheUtilizationScorer,
        load_scorers.LoadAwareScorer,
        load_scorers.ActiveRequestScorer,
        load_scorers.TokenLoadScorer,
        cache_scorers.PrefixCacheScorer,
        cache_scorers.PrecisePrefixCacheScorer,
        cache_scorers.NoHitLruScorer,
        cache_scorers.LoraAffinityScorer,
        cache_scorers.ContextLengthAware,
        affinity.SessionAffinityScorer,
        latency.LatencyScorer,
    ),
    "Scorers of other routers": (
        baselines_trees.SglangCacheAwareScorer,
        baselines_costs.DynamoCostScorer,
        baselines_rings.KubeaiBoundedHashScorer,
        baselines_costs.AibrixPrefixCacheScorer,
        baselines_windows.AibrixPrebleScorer,
        baselines_trees.ProductionStackPrefixScorer,
        baselines_rings.ProductionStackSessionScorer,
    ),
    "Filters": (
        filters.LabelSelectorFilter,
        filters.ByLabel,
        filters.DecodeFilter,
        filters.PrefillFilter,
        filters.EncodeFilter,
        filters.UtilizationFilter,
        filters.PrefixCacheAffinityFilter,
        affinity.SessionAffinityFilter,
        latency.SloHeadroomTierFilter,
    ),
    "Admitters": (latency.LatencySloAdmitter, admitters.ProbabilisticAdmitter),
    "Pickers": (
        pickers.MaxScorePicker,
        pickers.RandomPicker,
        pickers.WeightedRandomPicker,
        pickers.PowerOfTwoPicker,
        pickers.SoftmaxPicker,
        pickers.RoundRobinPicker,
    ),
    "Profile handlers": (handlers.SingleProfileHandler,),
    "Data": (
        producers.ApproxPrefixCacheProducer,
        producers.InflightLoadProducer,
        producers.PredictedLatencyProducer,
        exact_producers.TokenProducer,
        exact_producers.PrecisePrefixCacheProducer,
        exact_producers.BurstPrefixCacheProducer,
        producers.SessionIdProducer,
        producers.AgentIdentity,
        producers.MetricsDataSource,
        producers.CoreMetricsExtractor,
        producers.ModelsDataSource,
        producers.ModelsDataExtractor,
        producers.EndpointNotificationSource,
        producers.FileDiscovery,
    ),
    "Parsers": (
        producers.OpenaiParser,
        producers.AnthropicParser,
        producers.VllmhttpParser,
        producers.PassthroughParser,
    ),
}
"""The plugins of this version by family, in the order of the documentation."""

DEPRECATED = {
    "by-label-selector": "label-selector-filter",
    "tokenizer": "token-producer",
}
"""Old type names that are read as new ones, with a warning."""

DEPRECATED_TYPES = {
    "by-label": "label-selector-filter",
    "precise-prefix-cache-scorer": "precise-prefix-cache-producer",
}
"""Types that work as they are, with a warning that names a better one."""

NOT_YET = (
    "always-disagg-multimodal-decider",
    "always-disagg-pd-decider",
    "data-parallel-profile-handler",
    "dcgm-data-source",
    "dcgm-extractor",
    "destination-endpoint-served-verifier",
    "disagg-headers-handler",
    "disagg-profile-handler",
    "disaggregatedset-rollout-screener",
    "endpoint-attribute-filter",
    "endpoint-attribute-scorer",
    "header-based-testing-filter",
    "header-label-affinity-scorer",
    "header-profile-handler",
    "k8s-notification-source",
    "local-syncer",
    "mm-embeddings-cache-producer",
    "mm-embeddings-cache-scorer",
    "multicluster-approx-prefix-cache-producer",
    "multicluster-file-discovery",
    "multicluster-kv-cache-utilization-scorer",
    "multicluster-metrics-data-source",
    "multicluster-metrics-extractor",
    "multicluster-prefix-cache-scorer",
    "multicluster-queue-scorer",
    "multicluster-session-affinity-filter",
    "p2p-source-producer",
    "pd-profile-handler",
    "prefill-header-handler",
    "prefix-based-pd-decider",
    "priority-then-time-eviction-order-policy",
    "request-attribute-reporter",
    "sglanghttp-parser",
    "sheddable-eviction-filter",
    "topology-affinity-filter",
    "topology-affinity-scorer",
    "topology-extractor",
    "vertexai-parser",
    "vllmgrpc-parser",
)
"""Types of llm-d that this version does not have."""


class Registry:
    """The plugin classes by type name."""

    __slots__ = ("_classes",)

    def __init__(self, classes: Iterable[type[Any]]) -> None:
        self._classes: dict[str, type[Any]] = {}
        for cls in classes:
            if self._classes.setdefault(cls.type, cls) is not cls:
                raise ConfigError(f"two plugins have the type {cls.type}: {self._classes[cls.type]} and {cls}")

    @property
    def classes(self) -> Mapping[str, type[Any]]:
        """The classes by type name, without deprecated names."""
        return self._classes

    def find(self, name: str) -> type[Any] | None:
        """Return the class of `name`, which may be a deprecated name."""
        return self._classes.get(DEPRECATED.get(name, name))

    @staticmethod
    def replacement(name: str) -> str:
        """Return what to use instead of a deprecated type, "" for one that is not deprecated."""
        return DEPRECATED.get(name) or DEPRECATED_TYPES.get(name, "")

    def complaint(self, name: str) -> str:
        """Return why there is no plugin of type `name`, and what to do."""
        if name in NOT_YET:
            return f"plugin {name} of llm-d is not in this version of Shoal: see docs/config.md#not-yet"
        near = difflib.get_close_matches(name, [*self._classes, *NOT_YET, *DEPRECATED], n=3)
        hint = f", did you mean {' or '.join(near)}" if near else ""
        return f"unknown plugin type {name}{hint}: all types are in docs/plugins.md"
