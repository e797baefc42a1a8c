"""The paged KV cache: blocks with reference counts, an LRU list of free ones, and reuse by hash.

Follows vLLM's block pool: a block nobody holds keeps its content until it is needed again, the least
recently released goes first, and of one request the tail goes before the head.  Owns no request.
"""

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """A fixed number of KV blocks.

    Every block is either held (reference count above 0) or free; free ones may still carry a hash and be found
    by it.  A hash has at most one holder.  `num_free + num_held == num_blocks` at all times.  evicted: hashes that
    `allocate` forgot, for the owner to take; None when nobody asks for them.  Blocks that were never used go first and
    take no memory.
    """

    __slots__ = ("_free", "_hash_of", "_holder_of", "_references", "evicted", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.evicted: list[int] | None = None
        self._references: list[int] = []
        self._hash_of: list[int | None] = []
        self._holder_of: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those with reusable content included."""
        return len(self._free) + self.num_blocks - len(self._references)

    @property
    def num_held(self) -> int:
        """Blocks that at least one request holds."""
        return len(self._references) - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their hash, held or not."""
        return len(self._holder_of)

    @property
    def usage_ratio(self) -> float:
        """Held blocks over all blocks, 0 to 1: vLLM's `kv_cache_usage_perc`; reusable free blocks do not count."""
        return self.num_held / self.num_blocks

    def references(self, block: int) -> int:
        """How many requests hold `block`."""
        return self._references[block] if block < len(self._references) else 0

    def match(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Return the blocks that hold the longest cached prefix of `hashes`, at most `limit` of them."""
        holder_of = self._holder_of
        blocks = []
        for block_hash in hashes[: max(limit, 0)]:
            block = holder_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody holds; holding them takes as many from the free list."""
        references = self._references
        return [references[block] for block in blocks].count(0)

    def hold(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of `blocks`; idle ones leave the free list."""
        references, free = self._references, self._free
        for block in blocks:
            count = references[block]
            if not count:
                del free[block]
            references[block] = count + 1

    def allocate(self, count: int) -> list[int]:
        """Take the `count` least recently released blocks; what they cached is forgotten.

        The caller has checked that `count` blocks are free.
        """
        hash_of = self._hash_of
        references = self._references
        pop = self._free.popitem
        fresh = min(count, self.num_blocks - len(references))
        blocks = list(range(len(references), len(references) + fresh))
        references += [1] * fresh
        hash_of += [None] * fresh
        for _ in range(count - fresh):
            block = pop(last=False)[0]
            block_hash = hash_of[block]
            if block_hash is not None:
                hash_of[block] = None
                del self._holder_of[block_hash]
                if self.evicted is not None:
                    self.evicted.append(block_hash)
            references[block] = 1
            blocks.append(block)
        return blocks

    def seal(self, blocks: Sequence[int], hashes: Sequence[int], start: int, end: int) -> list[int]:
        """Make the full blocks at positions `start` to `end` (not included) findable by their hashes.

        Returns the positions whose hash no block had before.  When another block has the same content, a held one
        keeps the hash and an idle one yields it to the fresher block, so that a hot block does not age away.
        """
        holder_of = self._holder_of
        hash_of = self._hash_of
        fresh = []
        for position in range(start, end):
            block = blocks[position]
            block_hash = hashes[position]
            holder = holder_of.get(block_hash)
            if holder is not None:
                if holder == block or self._references[holder] > 0:
                    continue
                hash_of[holder] = None
            else:
                fresh.append(position)
            holder_of[block_hash] = block
            hash_of[block] = block_hash
        return fresh

    def has_none(self, hashes: Sequence[int]) -> bool:
        """Whether no block can be found by any of these hashes."""
        return self._holder_of.keys().isdisjoint(hashes)

    def cached_hashes(self) -> list[int]:
        """Return every hash that can be found."""
        return list(self._holder_of)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each of a request's `blocks` (in prompt order), tail first."""
        references = self._references
        free = self._free
        for block in reversed(blocks):
            references[block] = count = references[block] - 1
            if not count:
                free[block] = None

    def reset(self) -> bool:
        """Forget all cached content; returns False and does nothing while a block is held."""
        if self.num_held:
            return False
        self._holder_of.clear()
        self._hash_of = [None] * len(self._hash_of)
        return True
