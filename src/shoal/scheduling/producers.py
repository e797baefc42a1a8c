"""Data producers, sources, extractors and parsers: plugins that only hold parameters.

In llm-d these fetch or compute what scorers read.  In Shoal the data comes from rooms of its own (`prefix`, the
router's books, the hosts), so that a configuration file names them, is checked strictly, and sets their
parameters.  Each is a frozen struct; whoever does the work reads it from the loaded configuration.
"""

from typing import Annotated, ClassVar, Literal

import msgspec

from shoal.kernel.marks import Duration
from shoal.pool import Request
from shoal.scheduling.plugin import Ignored, Key, Ref

MAX_SESSION_CHARS = 256
APPROX = "approx-prefix-cache-producer"
PREFIX_PRODUCERS = (
    APPROX,
    "precise-prefix-cache-producer",
    "precise-prefix-cache-scorer",
    "burst-prefix-cache-producer",
)
PrefixRef = Annotated[
    str, "the prefix producer to read; by default the precise one where there is one", Ref(*PREFIX_PRODUCERS)
]

_OWN_BLOCKS = Ignored("Shoal hashes prompts in blocks of its own and reads the engine's block size from its metrics")
_AUTO_TUNE = Ignored("figures that an engine reports are always used", alike=(True,))
_OWN_OUTPUT = Ignored("Shoal expects as much output as it saw before")
_OWN_SCRAPE = "metrics are read at /metrics of the endpoint's own port, by the scheme and ca_file of its backend"
_OWN_LIST = "models are read at /v1/models of the endpoint, by the scheme and ca_file of its backend"


class ApproxPrefixCacheProducer(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates which prefixes each endpoint holds, from what was sent there.

    Shoal's index is bounded in bytes, takes the capacity of each engine from its metrics, and learns from the
    cached tokens that engines report.
    """

    type: ClassVar[str] = "approx-prefix-cache-producer"
    auto_tune: Annotated[bool, "take block size and capacity from the engine where it reports them", _AUTO_TUNE] = True
    block_size_tokens: Annotated[int, "tokens per block when the engine does not report it", _OWN_BLOCKS] = 16
    max_prefix_tokens_to_match: Annotated[int, "tokens of a prompt that are looked up, 0 for no limit"] = 131_072
    lru_capacity_per_server: Annotated[
        int,
        "blocks kept per endpoint when the engine does not report it",
        Ignored("index.budget_bytes of kind: Pool bounds the index"),
    ] = 31_250
    block_size: Annotated[int, "old name of blockSizeTokens", _OWN_BLOCKS] = 0
    max_prefix_blocks_to_match: Annotated[
        int, "blocks of a prompt that are looked up", Ignored("use maxPrefixTokensToMatch")
    ] = 0

    def __post_init__(self) -> None:
        if self.block_size_tokens < 1:
            raise ValueError(f"blockSizeTokens must be at least 1, got {self.block_size_tokens}")
        if self.lru_capacity_per_server < 1:
            raise ValueError(f"lruCapacityPerServer must be at least 1, got {self.lru_capacity_per_server}")
        if self.max_prefix_tokens_to_match < 0:
            raise ValueError(f"maxPrefixTokensToMatch must not be negative, got {self.max_prefix_tokens_to_match}")


class InflightLoadProducer(msgspec.Struct, frozen=True, kw_only=True):
    """Counts requests and tokens in flight on each endpoint, at the instant of dispatch."""

    type: ClassVar[str] = "inflight-load-producer"
    add_estimated_output_tokens: Annotated[bool, "let token-load-scorer count expected output too"] = False
    output_ratio: Annotated[float, "expected output tokens per prompt token", _OWN_OUTPUT] = 1.5
    max_estimated_output_tokens: Annotated[int | None, "upper limit of the expected output", _OWN_OUTPUT] = None
    prefix_match_info_producer_name: Annotated[
        str,
        "the prefix producer that says what is cached",
        Ref("approx-prefix-cache-producer", "precise-prefix-cache-producer"),
    ] = ""
    sync_cross_replica_state: Annotated[
        bool, "share counts between replicas", Ignored("each picker worker counts what it dispatches")
    ] = True

    def __post_init__(self) -> None:
        if self.output_ratio < 0:
            raise ValueError(f"outputRatio must not be negative, got {self.output_ratio}")


_OF_STREAMS = "the first byte of every stream is measured and learned, and plain answers teach nothing of it"


class PredictedLatencyProducer(msgspec.Struct, frozen=True, kw_only=True):
    """Predicts the time to first token and per output token of a request on each endpoint.

    Learned in the picker itself, record by record, with no service beside it; endpoints with the same label for the
    same model share what is learned.  Added by itself when a plugin reads predictions.  See docs/latency.md.
    """

    type: ClassVar[str] = "predicted-latency-producer"
    slo_buffer_factor: Annotated[float, "what a tpot SLO is multiplied with before it is compared"] = 1.0
    context_ttl: Annotated[
        float,
        "how long what is known of a request is kept",
        Duration(),
        Key("contextTTL"),
        Ignored("it is kept until the request ends"),
    ] = 300.0
    streaming_mode: Annotated[bool, "whether ttft and tpot are learned", Ignored(_OF_STREAMS, alike=(True,))] = False
    predict_in_produce: Annotated[
        bool, "give predictions to plugins; false only makes and compares them, so that nothing is decided by them"
    ] = True
    endpoint_role_label: Annotated[str, "endpoint label whose values are learned apart, as a role; empty for none"] = ""
    accelerator_label: Annotated[str, "endpoint label that names the kind of machine, learned apart"] = (
        "llm-d.ai/accelerator"
    )
    use_encoder_cache_features: Annotated[
        bool, "learn from the encoder's cache", Ignored("Shoal has no view of encoder caches", alike=(False,))
    ] = False

    def __post_init__(self) -> None:
        if self.slo_buffer_factor <= 0:
            raise ValueError(f"sloBufferFactor must be above 0, got {self.slo_buffer_factor}")


class SessionIdProducer(msgspec.Struct, frozen=True, kw_only=True):
    """Takes the session id of a request from one header or one cookie."""

    type: ClassVar[str] = "session-id-producer"
    header_name: Annotated[str, "header that holds the session id"] = ""
    cookie_name: Annotated[str, "cookie that holds the session id"] = ""

    def __post_init__(self) -> None:
        if bool(self.header_name) == bool(self.cookie_name):
            raise ValueError("exactly one of headerName and cookieName must be set")

    def request_headers(self) -> tuple[str, ...]:
        return (self.header_name.lower() if self.header_name else f"cookie:{self.cookie_name}",)


class AgentIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Has the session of a coding agent be its tenant, where neither a key nor a fairness header names one.

    Sessions are known by the headers that Claude Code, OpenCode and Codex send (`x-claude-code-session-id`,
    `x-session-affinity`, `session-id`, `session_id`), by `x-session-id`, and by those named here, which go first.  So
    each program gets its share of the pool; a client that invents sessions gets several.
    """

    type: ClassVar[str] = "agent-identity"
    additional_session_headers: Annotated[tuple[str, ...], "headers with a session's id, in order"] = ()

    def __post_init__(self) -> None:
        if not all(name.strip() for name in self.additional_session_headers):
            raise ValueError("additionalSessionHeaders must not hold an empty name")

    def request_headers(self) -> tuple[str, ...]:
        return tuple(name.strip().lower() for name in self.additional_session_headers)

    def session_of(self, request: Request) -> str:
        for name in self.request_headers():
            if session := request.headers.get(name, "").strip():
                return session[:MAX_SESSION_CHARS]
        return ""


class MetricsDataSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where the metrics of an endpoint are read."""

    type: ClassVar[str] = "metrics-data-source"
    scheme: Annotated[Literal["http", "https"], "how the page is asked for", Ignored(_OWN_SCRAPE)] = "http"
    path: Annotated[str, "path of the page", Ignored(_OWN_SCRAPE, alike=("/metrics",))] = "/metrics"
    port: Annotated[int | None, "port of the page when it is not the endpoint's own", Ignored(_OWN_SCRAPE)] = None
    insecure_skip_verify: Annotated[bool, "accept any certificate", Ignored(_OWN_SCRAPE, alike=(False,))] = True
    ca_cert_path: Annotated[str, "file of the CA", Ignored(_OWN_SCRAPE, alike=("",))] = ""
    client_cert_path: Annotated[str, "file of the client's certificate", Ignored(_OWN_SCRAPE, alike=("",))] = ""
    client_key_path: Annotated[str, "file of the client's key", Ignored(_OWN_SCRAPE, alike=("",))] = ""
    interval: Annotated[str, "time between two readings, as 50ms or 2s", Ignored("idle endpoints are read less")] = ""


class CustomMetric(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A metric that other plugins read by name."""

    attribute_key: Annotated[str, "name for the plugins"]
    metric_spec: Annotated[str, "name and labels in the page"]


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Names of one engine's metrics."""

    name: Annotated[str, "engine, as the endpoint's label says"]
    queued_requests_spec: str = msgspec.field(default="", name="queuedRequestsSpec")
    running_requests_spec: str = msgspec.field(default="", name="runningRequestsSpec")
    kv_usage_spec: str = msgspec.field(default="", name="kvUsageSpec")
    lora_spec: str = msgspec.field(default="", name="loraSpec")
    cache_info_spec: str = msgspec.field(default="", name="cacheInfoSpec")
    cache_block_size_label_name: str = msgspec.field(default="", name="cacheBlockSizeLabelName")
    cache_num_blocks_label_name: str = msgspec.field(default="", name="cacheNumBlocksLabelName")
    cache_block_size_spec: str = msgspec.field(default="", name="cacheBlockSizeSpec")
    cache_num_blocks_spec: str = msgspec.field(default="", name="cacheNumBlocksSpec")
    custom_metrics: tuple[CustomMetric, ...] = msgspec.field(default=(), name="customMetrics")


class CoreMetricsExtractor(msgspec.Struct, frozen=True, kw_only=True):
    """Which metrics say how loaded an engine is.  The names of vLLM, SGLang and TensorRT-LLM are built in."""

    type: ClassVar[str] = "core-metrics-extractor"
    engine_label_key: Annotated[
        str,
        "endpoint label that names the engine",
        Ignored("llm-d.ai/engine-type and its older name are read", alike=("llm-d.ai/engine-type",)),
    ] = "llm-d.ai/engine-type"
    default_engine: Annotated[
        str,
        "engine of endpoints without the label",
        Ignored("it is found out, and vllm when it cannot be", alike=("vllm",)),
    ] = "vllm"
    engine_configs: Annotated[
        tuple[EngineMetrics, ...], "other metric names", Ignored("only the built-in names are read")
    ] = ()


class ModelsDataSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where the list of served models is read."""

    type: ClassVar[str] = "models-data-source"
    scheme: Annotated[Literal["http", "https"], "how the list is asked for", Ignored(_OWN_LIST)] = "http"
    path: Annotated[str, "path of the list", Ignored(_OWN_LIST, alike=("/v1/models",))] = "/v1/models"
    insecure_skip_verify: Annotated[bool, "accept any certificate", Ignored(_OWN_LIST, alike=(False,))] = True
    ca_cert_path: Annotated[str, "file of the CA", Ignored(_OWN_LIST, alike=("",))] = ""
    client_cert_path: Annotated[str, "file of the client's certificate", Ignored(_OWN_LIST, alike=("",))] = ""
    client_key_path: Annotated[str, "file of the client's key", Ignored(_OWN_LIST, alike=("",))] = ""
    interval: Annotated[str, "time between two readings", Ignored("Shoal reads it again every few seconds")] = ""


class ModelsDataExtractor(msgspec.Struct, frozen=True, kw_only=True):
    """Reads the models of an endpoint from its list."""

    type: ClassVar[str] = "models-data-extractor"


class EndpointNotificationSource(msgspec.Struct, frozen=True, kw_only=True):
    """Tells producers about endpoints that join and leave; Shoal always does."""

    type: ClassVar[str] = "endpoint-notification-source"


class FileDiscovery(msgspec.Struct, frozen=True, kw_only=True):
    """Takes the endpoints from a file."""

    type: ClassVar[str] = "file-discovery"
    path: Annotated[str, "the file: endpoints[] of name, namespace, address, port, labels"]
    watch_file: Annotated[bool, "follow changes of the file", Ignored("the file is always followed", alike=(True,))] = (
        False
    )

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path must not be empty")


class OpenaiParser(msgspec.Struct, frozen=True, kw_only=True):
    """Reads OpenAI requests; always on."""

    type: ClassVar[str] = "openai-parser"


class AnthropicParser(msgspec.Struct, frozen=True, kw_only=True):
    """Reads Anthropic requests; always on."""

    type: ClassVar[str] = "anthropic-parser"


class VllmhttpParser(msgspec.Struct, frozen=True, kw_only=True):
    """Reads vLLM's token-in requests; always on."""

    type: ClassVar[str] = "vllmhttp-parser"


class PassthroughParser(msgspec.Struct, frozen=True, kw_only=True):
    """Passes requests of unknown paths; always on."""

    type: ClassVar[str] = "passthrough-parser"
