"""Producers of exact knowledge: the tokens of a prompt, and who holds which KV blocks of it.

Plugins that only hold parameters, as those of `producers`: the tokens are made in `hosts.tokens`, the events come in by
`hosts.signals`, and the index is `prefix.exact`.
"""

import re
from typing import Annotated, ClassVar, Literal

import msgspec

from shoal.scheduling.plugin import Ignored, Key

_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|us|s|m|h))+")
_PARTS = re.compile(r"(\d+(?:\.\d+)?)(ms|us|s|m|h)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(duration: str, name: str) -> float:
    """Return the seconds of a duration as files give it (`50ms`, `1m30s`).  Raises ValueError that names the field."""
    if not _DURATION.fullmatch(duration):
        raise ValueError(f"{name} must be a duration such as 500ms or 1m30s, got {duration[:40]!r}")
    return sum(float(number) * _SECONDS[unit] for number, unit in _PARTS.findall(duration))


_MEDIA = Ignored("every image or video counts as about four tokens, whatever its size")


class Resolution(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Size of an image or a video frame."""

    width: Annotated[int, "pixels"]
    height: Annotated[int, "pixels"]


class StaticImage(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A fixed cost per image."""

    static_token: Annotated[int, "tokens per image"] = 0


class DynamicImage(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A cost by size."""

    factor: Annotated[int, "pixels per token"] = 0


class ImageEstimate(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How many tokens an image is taken to be."""

    mode: Annotated[Literal["dynamic", "static"] | None, "by size, or fixed"] = None
    default_resolution: Annotated[Resolution | None, "where the image does not say"] = None
    static: Annotated[StaticImage | None, "for mode static"] = None
    dynamic: Annotated[DynamicImage | None, "for mode dynamic"] = None


class StaticFrame(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A fixed cost per frame."""

    num_tokens_per_frame: Annotated[int, "tokens per frame"] = 0


class TokensPerFrame(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How many tokens a video frame is taken to be."""

    mode: Annotated[Literal["dynamic", "static"] | None, "by size, or fixed"] = None
    static: Annotated[StaticFrame | None, "for mode static"] = None
    dynamic: Annotated[DynamicImage | None, "for mode dynamic"] = None


class SampledFrames(msgspec.Struct, frozen=True, kw_only=True):
    """Frames at a fixed rate."""

    sample_fps: Annotated[float, "frames per second"] = msgspec.field(default=0.0, name="sampleFPS")
    temporal_patch_size: Annotated[int, "frames per patch"] = msgspec.field(default=0, name="temporalPatchSize")


class StridedFrames(msgspec.Struct, frozen=True, kw_only=True):
    """Every n-th frame."""

    default_source_fps: Annotated[float, "frames per second"] = msgspec.field(default=0.0, name="defaultSourceFPS")
    frame_stride: Annotated[int, "n"] = msgspec.field(default=0, name="frameStride")


class Frames(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How many frames of a video are looked at."""

    mode: Annotated[Literal["sampled", "strided"] | None, "how frames are chosen"] = None
    min_frames: Annotated[int, "at least"] = 0
    max_frames: Annotated[int, "at most"] = 0
    sampled: Annotated[SampledFrames | None, "for mode sampled"] = None
    strided: Annotated[StridedFrames | None, "for mode strided"] = None


class VideoEstimate(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How many tokens a video is taken to be."""

    default_resolution: Annotated[Resolution | None, "where the video does not say"] = None
    default_duration: Annotated[float, "seconds, where the video does not say"] = 0.0
    tokens_per_frame: Annotated[TokensPerFrame | None, "cost of a frame"] = None
    frames: Annotated[Frames | None, "number of frames"] = None
    max_video_tokens: Annotated[int, "upper limit"] = 0


class Estimate(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Token counts without a tokenizer: four bytes of text are one token, an image or a video is about four."""

    image: Annotated[ImageEstimate | None, "for images", _MEDIA] = None
    video: Annotated[VideoEstimate | None, "for videos", _MEDIA] = None


class VllmRender(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Exact tokens from a vLLM server."""

    url: Annotated[str, "base URL"] = "http://localhost:8000"
    timeout: Annotated[str, "for text"] = "5s"
    mm_timeout: Annotated[str, "for media"] = "30s"
    api_key_file: Annotated[str, "file with the key that it wants"] = ""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url[:80]!r}")
        _ = self.timeout_s, self.mm_timeout_s

    @property
    def timeout_s(self) -> float:
        """Longest wait for text."""
        return seconds_of(self.timeout, "timeout")

    @property
    def mm_timeout_s(self) -> float:
        """Longest wait for media."""
        return seconds_of(self.mm_timeout, "mmTimeout")


class LocalTokenizer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Exact tokens from the model's own tokenizer files, in the picker."""

    path: Annotated[str, "directory with tokenizer.json and tokenizer_config.json"]


class EngineTokenizer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Exact tokens from the engines themselves: in the picker for embedded ones, else by their /tokenize."""


class TokenProducer(msgspec.Struct, frozen=True, kw_only=True):
    """Counts the prompt's tokens; for a precise prefix producer it also gives them.

    Without a backend, and past the deadline, four bytes of text are one token.  An image, a video or a sound counts as
    about four tokens then: what stands for it in the prompt is a hash of 17 bytes.
    """

    type: ClassVar[str] = "token-producer"
    estimate: Annotated[Estimate | None, "the estimating backend, the default"] = None
    model_name: Annotated[str, "the only model that the backend is for; every model by default"] = ""
    vllm: Annotated[VllmRender | None, "a vLLM server that renders prompts"] = None
    local: Annotated[LocalTokenizer | None, "the model's tokenizer files"] = None
    engine: Annotated[EngineTokenizer | None, "the engines themselves"] = None
    deadline: Annotated[str, "how long a request waits for its tokens before it goes by the estimate"] = "50ms"

    def __post_init__(self) -> None:
        given = [name for name in ("estimate", "vllm", "local", "engine") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"one backend is allowed, got {' and '.join(given)}")
        if not 0.001 <= self.deadline_s <= 60:
            raise ValueError(f"deadline must be 1ms to 60s, got {self.deadline}")

    @property
    def deadline_s(self) -> float:
        """Longest wait for tokens."""
        return seconds_of(self.deadline, "deadline")

    @property
    def is_exact(self) -> bool:
        """Whether a backend gives real tokens."""
        return not (self.vllm is None and self.local is None and self.engine is None)


_OWN_KEYS = Ignored("keys are made with the pool's own secret and xxh3, in the engine's own block size")
_OWN_INDEX = Ignored("budgetBytes bounds the index")
_OWN_WORKERS = Ignored("each picker worker reads all streams")


class TokenProcessorConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How tokens become keys."""

    block_size_tokens: Annotated[int, "tokens per block; the engine's own is used where it says it", _OWN_KEYS] = 16
    block_size: Annotated[int, "old name of blockSizeTokens", _OWN_KEYS] = 0
    hash_seed: Annotated[str, "seed of the keys", _OWN_KEYS] = ""
    hash_algorithm: Annotated[str, "how keys are made", _OWN_KEYS] = ""


class TierWeight(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a block on one tier is worth beside one on the GPU."""

    name: Annotated[str, "tier: gpu, cpu, disk or shared"]
    weight: Annotated[float, "0 to 1"] = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be 0 to 1, got {self.weight}")


class InMemoryIndex(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Size of the index by counts."""

    size: Annotated[int, "keys"] = 100_000_000
    pod_cache_size: Annotated[int, "endpoints per key"] = 10


class CostAwareIndex(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Size of the index by bytes."""

    size: Annotated[str, "bytes"] = "2GiB"


class RedisIndex(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An index outside of the picker."""

    address: Annotated[str, "URL"] = ""
    backend_type: Annotated[str, "redis or valkey"] = ""
    enable_rdma: Annotated[bool, "RDMA"] = msgspec.field(default=False, name="enableRDMA")


class BlockIndexConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where the index lies."""

    in_memory_config: Annotated[InMemoryIndex | None, "by counts", _OWN_INDEX] = None
    cost_aware_memory_config: Annotated[CostAwareIndex | None, "by bytes", _OWN_INDEX] = None
    redis_config: Annotated[
        RedisIndex | None, "outside", Ignored("every picker reads the events; nothing is shared by a database")
    ] = None
    enable_metrics: Annotated[bool, "metrics", Ignored("metrics are always on", alike=(True,))] = False
    metrics_logging_interval: Annotated[int | str, "logged metrics", Ignored("metrics are exported, not logged")] = ""


class IndexerConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The index and what its tiers are worth."""

    kv_block_index_config: Annotated[BlockIndexConfig | None, "where it lies"] = None
    kv_cache_backend_configs: Annotated[
        tuple[TierWeight, ...], "worth of a tier; without it a tier costs the seconds that loading takes"
    ] = ()


class PodDiscovery(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where an endpoint publishes."""

    pod_label_selector: Annotated[str, "labels", Ignored("all endpoints of the pool are read")] = ""
    pod_namespace: Annotated[str, "namespace", Ignored("all endpoints of the pool are read")] = ""
    socket_port: Annotated[int, "port of rank 0; each further rank is one higher; 0 asks the engine"] = 0
    replay_socket_port: Annotated[int, "port of rank 0 for replays; 0 asks the engine"] = 0

    def __post_init__(self) -> None:
        for name, port in (("socketPort", self.socket_port), ("replaySocketPort", self.replay_socket_port)):
            if not 0 <= port <= 65_535:
                raise ValueError(f"{name} must be 0 to 65535, got {port}")


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How KV events are read."""

    zmq_endpoint: Annotated[
        str, "address that engines connect to", Ignored("each endpoint's own socket is read: discoverPods")
    ] = ""
    topic_filter: Annotated[str, "prefix of the topics; what the engine says by default"] = ""
    concurrency: Annotated[int, "readers", _OWN_WORKERS] = 4
    engine_type: Annotated[Literal["", "vllm", "sglang"], "form", Ignored("each message says its form")] = ""
    discover_pods: Annotated[bool, "read each endpoint's own socket", Ignored("always", alike=(True,))] = True
    pod_discovery_config: Annotated[PodDiscovery, "where an endpoint publishes"] = PodDiscovery()


class PrecisePrefixCacheProducer(msgspec.Struct, frozen=True, kw_only=True):
    """Knows which endpoint holds which KV blocks, from the events that engines publish.

    Needs the prompt's tokens: a token-producer with a backend, or else the engines are asked.  An endpoint without
    events, with stale ones, or a request whose tokens come too late goes by the estimate.
    """

    type: ClassVar[str] = "precise-prefix-cache-producer"
    token_processor_config: Annotated[TokenProcessorConfig | None, "how tokens become keys"] = None
    indexer_config: Annotated[IndexerConfig | None, "the index"] = None
    kv_events_config: Annotated[KvEventsConfig, "the events"] = KvEventsConfig()
    speculative_indexing: Annotated[bool, "believe what was sent until events tell"] = True
    speculative_ttl: Annotated[
        str, "how long after its end a request's blocks are believed without an event", Key("speculativeTTL")
    ] = "2s"
    budget_bytes: Annotated[
        int, "hard limit of the index, 18 bytes for each block; the oldest ones go by the estimate then"
    ] = 64 << 20
    cpu_load_s_per_token: Annotated[float, "seconds to load a token from host memory"] = 5e-6
    disk_load_s_per_token: Annotated[float, "seconds to load a token from disk"] = 3e-5
    shared_load_s_per_token: Annotated[float, "seconds to load a token from a shared store"] = 8e-5

    def __post_init__(self) -> None:
        _ = self.speculative_ttl_s
        if not 1 << 20 <= self.budget_bytes <= 1 << 40:
            raise ValueError(f"budgetBytes must be 1048576 to {1 << 40}, got {self.budget_bytes}")
        for name in ("cpu_load_s_per_token", "disk_load_s_per_token", "shared_load_s_per_token"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def speculative_ttl_s(self) -> float:
        """How long unconfirmed blocks are believed."""
        return seconds_of(self.speculative_ttl, "speculativeTTL") if self.speculative_indexing else 0.0

    @property
    def tier_weights(self) -> dict[str, float]:
        """Worth of each tier that the file names."""
        configs = self.indexer_config.kv_cache_backend_configs if self.indexer_config else ()
        return {each.name.lower(): each.weight for each in configs}


class BurstPrefixCacheProducer(msgspec.Struct, frozen=True, kw_only=True):
    """Places requests that come together with the same cold prefix together, so that it is prefilled once.

    For samples of one prompt (RL rollouts) and fan-outs of agents.  An endpoint takes of a group until it is clearly
    busier than the others; then the next one prefills the prefix too.  No request is held back for it.
    """

    type: ClassVar[str] = "burst-prefix-cache-producer"
    window_duration_ms: Annotated[int, "a group ends when none came for so long, 1 to 10000"] = 100
    max_per_replica: Annotated[int, "of one group on one endpoint; -1 for no more than its fair share"] = -1
    block_size_tokens: Annotated[int, "unit of minColocateBlocks"] = 64
    max_prefix_tokens_to_match: Annotated[int, "tokens of a prompt that are compared, 0 for all"] = 0
    min_colocate_blocks: Annotated[int, "what must be shared at the least; half of the prompt always must be"] = 0
    max_batch_size: Annotated[int, "requests of one group"] = 1000
    balance_by: Annotated[Literal["requests", "tokens"], "what a fair share is counted in"] = "requests"

    def __post_init__(self) -> None:
        if not 1 <= self.window_duration_ms <= 10_000:
            raise ValueError(f"windowDurationMs must be 1 to 10000, got {self.window_duration_ms}")
        if self.max_per_replica == 0 or self.max_per_replica < -1:
            raise ValueError(f"maxPerReplica must be -1 or above 0, got {self.max_per_replica}")
        if self.block_size_tokens < 1 or self.max_batch_size < 1:
            raise ValueError("blockSizeTokens and maxBatchSize must be at least 1")
        if self.max_prefix_tokens_to_match < 0 or self.min_colocate_blocks < 0:
            raise ValueError("maxPrefixTokensToMatch and minColocateBlocks must not be negative")
