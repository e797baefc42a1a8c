"""What an engine says about its KV cache: blocks stored, removed, or all dropped.

Values of any engine in one form, whatever its wire format; `wire.kvevents` makes them, `prefix.ledger` reads them.
They hold token ids, so they never stand in a journal or a log.
"""

from enum import StrEnum

import msgspec


class Tier(StrEnum):
    """Where a KV block lies, from the fastest to the slowest.

    EXPECTED: it was sent there to be computed, and the engine has not said yet that it has it.
    """

    GPU = "gpu"
    EXPECTED = "expected"
    CPU = "cpu"
    DISK = "disk"
    SHARED = "shared"


class KvState(StrEnum):
    """How far the picker's view of an endpoint's cache can be trusted.

    NONE: it publishes no events.  CATCHING_UP: a replay is under way.  FRESH: nothing was missed.  STALE: the stream is
    cut, or something was missed and could not be replayed.
    """

    NONE = "none"
    CATCHING_UP = "catching-up"
    FRESH = "fresh"
    STALE = "stale"


class KvSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where one publisher (one data-parallel rank of an endpoint) can be reached.

    endpoint, replay_endpoint: ZMQ addresses as they are dialled (`tcp://10.0.0.7:5557`), "" for no replay.
    topic: prefix to subscribe to.
    """

    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    rank: int = 0


class KvStored(msgspec.Struct, frozen=True, gc=False):
    """A run of full blocks became usable.

    hashes: the engine's own, as unsigned 64-bit numbers, in prefix order.  parent: hash of the block before the first
    one, None at the start of a prompt.  tokens: ids of the run, empty where the event names blocks only (offloading).
    block_size: tokens per block, 0 where unknown.  extras: for each block what else its content depends on, None for
    nothing; the adapter is not among it.  group: KV-cache group of a hybrid model.  kind: of that group, as
    `full_attention`, "" where the engine does not say.
    """

    hashes: list[int]
    parent: int | None
    tokens: list[int]
    block_size: int
    tier: Tier = Tier.GPU
    lora: str = ""
    extras: list[tuple[str, ...] | None] | None = None
    group: int = 0
    kind: str = ""


class KvRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks are gone from one tier."""

    hashes: list[int]
    tier: Tier = Tier.GPU
    group: int = 0


class KvCleared(msgspec.Struct, frozen=True):
    """Everything of this publisher is gone."""


KvEvent = KvStored | KvRemoved | KvCleared
