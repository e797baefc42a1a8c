"""What is heard of the KV caches of engines: blocks that came and went, and how far that can be trusted."""

import msgspec

from shoal.pool.kvevents import KvState, Tier


class BlocksStored(msgspec.Struct, frozen=True, tag="stored"):
    """An engine holds these blocks now.  keys: exact keys, 8 bytes little-endian each; never token ids."""

    endpoint_id: str
    keys: bytes
    tier: Tier = Tier.GPU
    block_size_tokens: int = 16
    rank: int = 0


class BlocksRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """An engine holds these blocks no longer on that tier."""

    endpoint_id: str
    keys: bytes
    tier: Tier = Tier.GPU
    rank: int = 0


class BlocksCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """All that a publisher held is gone: it restarted, was reset, or has other weights.  rank: None for all ranks."""

    endpoint_id: str
    rank: int | None = None


class KvStreamChanged(msgspec.Struct, frozen=True, tag="kv-stream"):
    """How far an endpoint's KV events can be trusted from now on."""

    endpoint_id: str
    state: KvState
