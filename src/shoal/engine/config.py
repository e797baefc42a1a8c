"""What one engine is: hardware and model, limits, and what its KV cache does beside caching."""

import msgspec

from shoal.engine.cache import HostPolicy
from shoal.engine.profiles import TINY, Profile


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is; 0 means the profile's own value."""

    profile: Profile = TINY
    num_blocks: int = 0
    """KV blocks."""
    block_size: int = 0
    """Tokens a block."""
    max_num_seqs: int = 0
    """Sequences in one step."""
    max_num_batched_tokens: int = 0
    """New tokens in one step."""
    max_loras: int = 4
    """Different adapters in one step; requests for further ones are deferred."""
    is_priority_scheduling: bool = False
    """Whether a lower `priority` goes first; else first come, first served."""
    slow_factor: float = 1.0
    """Multiplies every step's time."""
    speculation: float = 1.0
    """Tokens that a decode step yields for each sequence on average with speculative decoding, at least 1."""
    max_lag_s: float = 0.05
    """A late tick starts the next step where the last one ended, so lateness of timers does not add up; past
    this lag the lost time is lost."""
    has_cache_events: bool = False
    """Whether each step ends with `CacheChanged` when it changed the cache."""
    is_clearing_at_once: bool = False
    """Whether an emptied cache is told at once, as SGLang does; else with the next step, as vLLM does."""
    host_blocks: int = 0
    """Blocks that the host tier holds; 0 for no such tier."""
    host_policy: HostPolicy = HostPolicy.WRITE_THROUGH
    """When blocks are copied to the host tier."""
    host_bytes_per_s: float = 50e9
    """How fast KV comes back from the host tier; about what a x16 link of PCIe 5 carries."""
    disk_blocks: int = 0
    """Blocks that an SSD below the host tier holds, which get there when the host drops them; 0 for none."""
    disk_bytes_per_s: float = 6e9
    """How fast KV comes back from the SSD; about what one NVMe drive on PCIe 4 reads."""
    store_bytes_per_s: float = 10e9
    """How fast KV comes from a store that engines share; about what a link of 100 Gbit/s carries."""
    is_describing_host_blocks: bool = False
    """Whether changes of the host tier carry token ids; else they name hashes only."""

    @property
    def token_bytes(self) -> float:
        """KV bytes of a token where it is stored or sent."""
        return self.profile.stored_bytes_per_token or self.profile.kv_bytes_per_token
