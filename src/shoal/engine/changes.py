"""What the KV cache gained and lost, in order, from one step's end to the next.

Owns the record only; who keeps what is `cache`, and how it looks on a wire is the host's.
"""

from collections.abc import Iterable
from typing import NamedTuple

from shoal.pool.kvevents import Tier

_TOKEN_BYTES = 4


class Stored(NamedTuple):
    """Full blocks that follow each other in one prompt can now be found.

    hashes: in prompt order.  parent: hash of the block before the first one, None at the start of a prompt.  tokens:
    theirs, little-endian uint32, empty where the event names blocks only.  start: position of the first block in its
    prompt.  adapter, salt: what else the content depends on, "" for nothing.
    """

    hashes: tuple[int, ...]
    parent: int | None = None
    tokens: bytes = b""
    start: int = 0
    adapter: str = ""
    salt: str = ""
    tier: Tier = Tier.GPU


class Removed(NamedTuple):
    """One block is gone from a tier."""

    block_hash: int
    tier: Tier = Tier.GPU


class Cleared(NamedTuple):
    """The cache was emptied by an operator; the tiers below the GPU only when `is_all`."""

    is_all: bool


Change = Stored | Removed | Cleared


class CacheChanged(NamedTuple):
    """Tell what a step changed in the cache; only an engine with `has_cache_events` says it."""

    changes: list[Change]


class ChangeLog:
    """Changes that nobody has been told of."""

    __slots__ = ("_block_bytes", "_changes")

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * _TOKEN_BYTES
        self._changes: list[Change] = []

    def __len__(self) -> int:
        return len(self._changes)

    def store(self, change: Stored) -> None:
        """Note a run."""
        self._changes.append(change)

    def store_positions(
        self, hashes: tuple[int, ...], positions: Iterable[int], tokens: bytes, adapter: str, salt: str
    ) -> None:
        """Note the blocks at ascending `positions` of a prompt with `hashes` and `tokens`: one `Stored` a run."""
        start = end = -1
        for position in positions:
            if position == end:
                end += 1
                continue
            if end > start:
                self.store(self.describe(hashes, start, end, tokens, adapter, salt))
            start, end = position, position + 1
        if end > start:
            self.store(self.describe(hashes, start, end, tokens, adapter, salt))

    def remove(self, block_hash: int, tier: Tier = Tier.GPU) -> None:
        """Note that a block is gone."""
        self._changes.append(Removed(block_hash, tier))

    def clear(self, is_all: bool) -> None:
        """Note that the cache is empty."""
        self._changes.append(Cleared(is_all))

    def take(self) -> list[Change]:
        """Return what was noted since the last call, oldest first."""
        changes, self._changes = self._changes, []
        return changes

    def describe(self, hashes: tuple[int, ...], start: int, end: int, tokens: bytes, adapter: str, salt: str) -> Stored:
        """Return the run of the positions `start` to `end` (not included) of a prompt."""
        size = self._block_bytes
        return Stored(
            hashes=hashes[start:end],
            parent=hashes[start - 1] if start else None,
            tokens=tokens[start * size : end * size],
            start=start,
            adapter=adapter,
            salt=salt,
        )
