"""What happens to an engine: requests come and go, steps end, an operator turns a knob."""

from enum import StrEnum

import msgspec


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """A request for generation.

    request_id: unique among the live ones.  prompt_tokens: at least 1.  output_tokens: how many tokens this
    answer will have (the model's choice, known to the model of the engine only); 0 for a request that only
    prefills (embeddings, scores).  max_tokens: the client's limit; an answer that reaches it ends with
    `length`, a shorter one with `stop`.  block_hashes: chained hashes of the full blocks of prompt and answer,
    in order (see `hash_blocks`); may cover the prompt only, or be empty: blocks without a hash are never reused.
    adapter: LoRA name, "" for the base model.  priority: lower goes first, used only with priority scheduling.
    received_tokens: of the prompt, whose KV came from another engine that prefilled them.
    tokens, cache_salt: ids of prompt and answer as little-endian uint32, and what else the hashes cover; only records
    of the cache repeat them, so they may be empty where nobody asks for those.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int = 0
    block_hashes: tuple[int, ...] = ()
    adapter: str = ""
    priority: int = 0
    received_tokens: int = 0
    tokens: bytes = b""
    cache_salt: str = ""


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """The client of a request left, or an operator ends it; unknown and finished ids are ignored."""

    request_id: str


class Ticked(msgspec.Struct, frozen=True):
    """Time passed; ends the running step when its deadline has come."""


class CacheReset(msgspec.Struct, frozen=True, kw_only=True):
    """The operator wants the prefix cache empty; possible only while no block is held.

    is_forced: running requests give their blocks back at the end of the step and are computed again.  is_all: the host
    tier too.
    """

    is_forced: bool = False
    is_all: bool = False


class PauseMode(StrEnum):
    """What becomes of requests when an engine pauses: they end now, may end first, or stand still."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class Paused(msgspec.Struct, frozen=True, kw_only=True):
    """The operator wants no step to begin.  is_clearing: the prefix cache is emptied once nothing runs.

    Requests that arrive meanwhile wait.
    """

    mode: PauseMode = PauseMode.ABORT
    is_clearing: bool = True


class Resumed(msgspec.Struct, frozen=True):
    """The operator ends a pause."""


class PaceChanged(msgspec.Struct, frozen=True, kw_only=True):
    """From the next step on every step takes `slow_factor` times its model time."""

    slow_factor: float


Event = Submitted | Aborted | Ticked | CacheReset | Paused | Resumed | PaceChanged
