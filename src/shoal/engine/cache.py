"""The KV cache of one engine as its batcher sees it: the GPU's blocks, a host tier below them, a record of changes.

Owns when a block goes to the host and what is recorded; the tiers themselves are `blocks` and `hosttier`.
"""

from enum import StrEnum

from shoal.engine.blocks import BlockPool
from shoal.engine.changes import Change, ChangeLog, Stored
from shoal.engine.hosttier import HostTier
from shoal.engine.sequences import Sequence
from shoal.pool.kvevents import Tier


class HostPolicy(StrEnum):
    """When a block is copied to the host: as soon as it is full, or when the GPU drops it."""

    WRITE_THROUGH = "write_through"
    WRITE_BACK = "write_back"


class KvCache:
    """Both tiers of one engine.

    host: None without one.  log: None when nobody wants to know of changes.  is_describing: whether records of the host
    tier carry tokens, one block each and the tail first, as vLLM's self-describing ones; else they name hashes only.
    """

    __slots__ = ("_block_size", "_contents", "_is_describing", "_is_write_back", "host", "log", "pool")

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        host: HostTier | None = None,
        policy: HostPolicy = HostPolicy.WRITE_THROUGH,
        has_log: bool = False,
        is_describing: bool = False,
    ) -> None:
        self.pool = pool
        self.host = host
        self.log = ChangeLog(block_size) if has_log else None
        self._block_size = block_size
        self._is_write_back = policy is HostPolicy.WRITE_BACK
        self._is_describing = is_describing and has_log
        self._contents: dict[int, Stored] = {}
        pool.evicted = [] if host is not None or has_log else None

    def count_loadable(self, sequence: Sequence, start: int, limit: int) -> int:
        """How many blocks from position `start` on can be loaded from the host, up to position `limit`."""
        return self.host.count_run(sequence.hashes, start, limit) if self.host is not None else 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks; what they held may go to the host."""
        blocks = self.pool.allocate(count)
        evicted = self.pool.evicted
        if evicted:
            if self.log is not None:
                for block_hash in evicted:
                    self.log.remove(block_hash)
            if self._is_write_back:
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
        if self.host is None:
            return
        contents = self._describe(sequence, range(start, full)) if self._is_describing else {}
        if self._is_write_back:
            self._contents.update(contents)
        else:
            self._to_host([*reversed(sequence.hashes[start:full])], contents)

    def touch(self, sequence: Sequence, start: int, end: int) -> None:
        """The blocks at the positions `start` to `end` (not included) are read from the host."""
        if self.host is not None:
            self.host.store(reversed(sequence.hashes[start:end]))

    def reset(self, is_all: bool) -> bool:
        """Forget what the GPU's blocks hold, the host's too when `is_all`; False while a request holds a block."""
        if not self.pool.reset():
            return False
        self._contents.clear()
        if self.host is not None and is_all:
            self.host.clear()
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
        if self.log is None:
            return
        for block_hash in removed:
            self.log.remove(block_hash, Tier.CPU)
        if self._is_describing:
            for block_hash in added:
                self.log.store(contents[block_hash])
        elif added:
            self.log.store(Stored(tuple(added), tier=Tier.CPU))
