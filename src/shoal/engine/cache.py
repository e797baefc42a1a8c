"""The KV cache of one engine as its batcher sees it: the GPU's blocks, the tiers below them, a record of changes.

Owns when a block goes to which tier and what is recorded; the tiers themselves are `blocks` and `hosttier`.
"""

from enum import StrEnum
from typing import NamedTuple

from shoal.engine.blocks import BlockPool
from shoal.engine.changes import Change, ChangeLog, Stored
from shoal.engine.hosttier import HostTier
from shoal.engine.sequences import Sequence
from shoal.pool.kvevents import Tier


class HostPolicy(StrEnum):
    """When a block is copied to the host: as soon as it is full, or when the GPU drops it."""

    WRITE_THROUGH = "write_through"
    WRITE_BACK = "write_back"


class Lower(NamedTuple):
    """The tiers below the GPU, None for those that are not there, each with the seconds that loading a block takes.

    host: memory.  disk: gets what the host drops.  store: shared by several engines; gets blocks once they are full.
    """

    host: HostTier | None = None
    host_s: float = 0.0
    disk: HostTier | None = None
    disk_s: float = 0.0
    store: HostTier | None = None
    store_s: float = 0.0


class KvCache:
    """All tiers of one engine.

    host: None without one.  has_lower: whether there is any tier below the GPU.  log: None when nobody wants to know of
    changes.  is_describing: whether records of the host tier carry tokens, one block each and the tail first, as vLLM's
    self-describing ones; else they name hashes only.
    """

    __slots__ = (
        "_block_size",
        "_contents",
        "_disk",
        "_is_describing",
        "_is_write_back",
        "_store",
        "_tiers",
        "has_lower",
        "host",
        "log",
        "pool",
    )

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        lower: Lower = Lower(),
        policy: HostPolicy = HostPolicy.WRITE_THROUGH,
        has_log: bool = False,
        is_describing: bool = False,
    ) -> None:
        self.pool = pool
        self.host = lower.host
        self._disk = lower.disk
        self._store = lower.store
        pairs = ((lower.host, lower.host_s), (lower.disk, lower.disk_s), (lower.store, lower.store_s))
        self._tiers = [(tier, block_s) for tier, block_s in pairs if tier is not None]
        self.has_lower = bool(self._tiers)
        self.log = ChangeLog(block_size) if has_log else None
        self._block_size = block_size
        self._is_write_back = policy is HostPolicy.WRITE_BACK
        self._is_describing = is_describing and has_log
        self._contents: dict[int, Stored] = {}
        pool.evicted = [] if lower.host is not None or has_log else None

    def find_below(self, sequence: Sequence, start: int, limit: int) -> tuple[int, float]:
        """Return how many blocks from position `start` on tiers below have without a gap, up to position `limit`.

        And the seconds of loading them, each from the first tier that has it, one block after the other.
        """
        count, seconds = 0, 0.0
        for block_hash in sequence.hashes[start : max(limit, 0)] if self._tiers else ():
            for tier, block_s in self._tiers:
                if block_hash in tier:
                    seconds += block_s
                    break
            else:
                break
            count += 1
        return count, seconds

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks; what they held may go to the host."""
        blocks = self.pool.allocate(count)
        evicted = self.pool.evicted
        if evicted:
            if self.log is not None:
                for block_hash in evicted:
                    self.log.remove(block_hash)
            if self._is_write_back and self.host is not None:
                self._to_host([*evicted], self._contents)
            for block_hash in evicted if self._contents else ():
                self._contents.pop(block_hash, None)
            evicted.clear()
        return blocks

    def seal(self, sequence: Sequence, end_token: int) -> None:
        """Make the blocks of a sequence findable that are full once tokens up to `end_token` are computed.

        Sealing before the step ends lets two equal prompts of one step share, as in vLLM.
        """
        full = min(end_token // self._block_size, len(sequence.hashes))
        start = sequence.sealed
        if full <= start:
            return
        fresh = self.pool.seal(sequence.blocks, sequence.hashes, start, full)
        sequence.sealed = full
        if self.log is not None:
            self.log.store_positions(sequence.hashes, fresh, sequence.tokens, sequence.adapter, sequence.salt)
        if self._store is not None:
            self._store.store(reversed(sequence.hashes[start:full]))
        if self.host is None:
            return
        contents = self._describe(sequence, range(start, full)) if self._is_describing else {}
        if self._is_write_back:
            self._contents.update(contents)
        else:
            self._to_host([*reversed(sequence.hashes[start:full])], contents)

    def may_seal_last(self, hashes: list[int]) -> bool:
        """Whether it is the same to make blocks with these hashes findable now and behind further allocations.

        So it is where nobody else has any of them, and no tier below and no record keeps the order.
        """
        is_plain = not self._tiers and self.log is None
        return is_plain and len(set(hashes)) == len(hashes) and self.pool.has_none(hashes)

    def touch(self, sequence: Sequence, start: int, end: int) -> None:
        """The blocks at positions `start` to `end` (not included) are read from tiers below; the host has them now."""
        hashes = sequence.hashes[start:end][::-1]
        if self._store is not None:
            self._store.store([each for each in hashes if each in self._store])
        if self.host is not None:
            self._to_host([*hashes], self._describe(sequence, range(start, end)) if self._is_describing else {})

    def reset(self, is_all: bool) -> bool:
        """Forget what the GPU's blocks hold, the host's too when `is_all`; False while a request holds a block."""
        if not self.pool.reset():
            return False
        self._contents.clear()
        if is_all:
            for tier in (self.host, self._disk):
                if tier is not None:
                    tier.clear()
        if self.log is not None:
            self.log.clear(is_all)
        return True

    def take_changes(self) -> list[Change]:
        """Return the changes since the last call."""
        return self.log.take() if self.log is not None else []

    def _describe(self, sequence: Sequence, positions: range) -> dict[int, Stored]:
        assert self.log is not None
        hashes, tokens = sequence.hashes, sequence.tokens
        runs = (
            self.log.describe(hashes, each, each + 1, tokens, sequence.adapter, sequence.salt) for each in positions
        )
        return {run.hashes[0]: run._replace(tier=Tier.CPU) for run in runs}

    def _to_host(self, hashes: list[int], contents: dict[int, Stored]) -> None:
        assert self.host is not None
        added, removed = self.host.store(hashes)
        dropped: list[int] = []
        sunk, gone = self._disk.store(removed) if self._disk is not None else (dropped, dropped)
        if self.log is None:
            return
        for block_hash in removed:
            self.log.remove(block_hash, Tier.CPU)
        for block_hash in gone:
            self.log.remove(block_hash, Tier.DISK)
        if sunk:
            self.log.store(Stored(tuple(sunk), tier=Tier.DISK))
        if self._is_describing:
            for block_hash in added:
                self.log.store(contents[block_hash])
        elif added:
            self.log.store(Stored(tuple(added), tier=Tier.CPU))
