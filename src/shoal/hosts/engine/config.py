"""The configuration of one embedded engine; defaults live here, once."""

import msgspec

from shoal.engine import EngineConfig, Profile, find_profile
from shoal.engine.cache import HostPolicy
from shoal.hosts.engine.faults import Faults
from shoal.hosts.engine.kvevents import KvEvents
from shoal.hosts.engine.kvforms import KvForm
from shoal.kernel import ConfigError

MAX_RANKS = 64
_KV_EVENTS = "--kv-events-config"


class EngineServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `shoal engine` serves and how it behaves; 0 means the profile's own value."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine by default."""
    port: int = 8000
    """Port to listen on, vLLM's default; 0 takes a free one."""
    models: tuple[str, ...] = ("tiny",)
    """Served names; the first is the one answers carry, the rest are aliases."""
    loras: tuple[str, ...] = ()
    """Adapters loaded at the start."""
    profile: str | Profile = "tiny"
    """Which hardware and model to imitate: a name of the catalogue, or figures of one's own."""
    data_parallel_size: int = 1
    """Ranks of data parallelism behind the one port, each an engine of its own with a cache of its own."""
    num_blocks: int = 0
    """KV blocks of a rank."""
    block_size: int = 0
    """Tokens a KV block."""
    max_num_seqs: int = 0
    """Sequences in one step."""
    max_num_batched_tokens: int = 0
    """New tokens in one step."""
    max_model_len: int = 0
    """Context limit in tokens; never more than the KV cache holds."""
    max_loras: int = 4
    """Different adapters in one step."""
    is_priority_scheduling: bool = False
    """Whether a lower `priority` in the request goes first."""
    is_reporting_cached_tokens: bool = True
    """Whether usage carries cached tokens, as vLLM's --enable-prompt-tokens-details."""
    has_metrics: bool = True
    """Whether /metrics exists."""
    api_key: str = ""
    """When set, /v1 paths want it as a bearer token, as vLLM's --api-key."""
    tls_cert: str = ""
    """Certificate file (PEM); with `tls_key` the server speaks TLS."""
    tls_key: str = ""
    """Key file (PEM)."""
    seed: int = 0
    """Decides answer texts and which requests an injected fault hits."""
    startup_delay_s: float = 0.0
    """How long the engine is loading: /health and all else answer 503."""
    record_last: int = 0
    """How many requests GET /requests tells about (headers, size and digest of the body), for tests; 0 is none."""
    kv_events: KvEvents = KvEvents()
    """KV events over ZMQ; none by default."""
    kv_form: KvForm = KvForm.VLLM_MAP
    """Whose events they are."""
    has_replay_topic: bool | None = None
    """Whether replies to a replay carry the topic, as since vLLM 0.26; None is what goes with `kv_form`."""
    has_bytes_hashes: bool = False
    """Whether events carry hashes as 32 bytes, as with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""
    hash_seed: int = 0
    """Another one gives all blocks other hashes, as another PYTHONHASHSEED does."""
    host_blocks: int = 0
    """KV blocks of a tier in host memory; 0 for none."""
    host_bytes_per_s: float = 0.0
    """How fast they come back; 0 for the default of the model."""
    host_policy: HostPolicy = HostPolicy.WRITE_THROUGH
    """When blocks are copied there."""
    is_describing_host_blocks: bool = False
    """Whether events of the host tier carry token ids, as with vLLM's self_describing_kv_events; SGLang's always do."""
    faults: Faults = Faults()
    """Faults from the start; POST /faults changes them."""

    def engine(self) -> EngineConfig:
        """Return the configuration of the engine model.  Raises ConfigError for what no engine can be."""
        try:
            profile = find_profile(self.profile)
        except ValueError as error:
            raise ConfigError(str(error), source="--profile") from None
        for name in (
            *("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
            *("host_blocks", "host_bytes_per_s"),
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{getattr(self, name)} is below 0", source=f"--{name.replace('_', '-')}")
        if not 1 <= self.data_parallel_size <= MAX_RANKS:
            raise ConfigError(f"it must be 1 to {MAX_RANKS}", source="--data-parallel-size")
        if self.data_parallel_size > 1 and self.kv_form.is_sglang and self.kv_events.has_free_port:
            raise ConfigError("several ranks of SGLang need a port each: give that of the first", source=_KV_EVENTS)
        if self.max_loras < 1:
            raise ConfigError("at least one adapter slot is needed", source="--max-loras")
        self.kv_events.check()
        if self.kv_events.is_on(self.kv_form):
            self.kv_events.of_rank(self.data_parallel_size - 1)
        return EngineConfig(
            profile=profile,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_loras=self.max_loras,
            is_priority_scheduling=self.is_priority_scheduling,
            slow_factor=self.faults.slow_factor,
            has_cache_events=self.kv_events.is_on(self.kv_form),
            is_clearing_at_once=self.kv_form.is_sglang,
            host_blocks=self.host_blocks,
            host_policy=self.host_policy,
            is_describing_host_blocks=self.is_describing_host_blocks or self.kv_form.is_sglang,
            host_bytes_per_s=self.host_bytes_per_s or EngineConfig().host_bytes_per_s,
        )

    def context_limit(self, engine: EngineConfig) -> int:
        """Return the context limit in tokens: what was asked for, or the profile's, cut to what the cache holds."""
        blocks = engine.num_blocks or engine.profile.num_blocks
        block_size = engine.block_size or engine.profile.block_size
        return min(self.max_model_len or engine.profile.max_model_len, blocks * block_size)
