"""What an engine says about itself, in one reading."""

import msgspec


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """One scrape of an engine's metrics; None means that the engine did not say (never read as 0).

    waiting, running: requests.  kv_usage_ratio: 0 to 1, blocks held by running requests.  block_size_tokens,
    num_blocks: geometry of its KV cache.  prefix_hit_tokens, prefix_query_tokens: counters since its start.
    running_adapters, waiting_adapters: LoRA names; max_adapters: slots, None when LoRA is off.
    """

    waiting: float | None = None
    running: float | None = None
    kv_usage_ratio: float | None = None
    block_size_tokens: int | None = None
    num_blocks: int | None = None
    prefix_hit_tokens: float | None = None
    prefix_query_tokens: float | None = None
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    max_adapters: int | None = None
