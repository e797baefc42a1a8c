"""A tier below the GPU: blocks in host memory, on an SSD, or in a store of several engines; the least recently used one
leaves first.

Owns which block is there; when one is written and what loading costs is `cache`'s and the engine's.
"""

from collections import OrderedDict
from collections.abc import Iterable


class HostTier:
    """At most `capacity_blocks` hashes of blocks."""

    __slots__ = ("_held", "capacity_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._held

    def hashes(self) -> list[int]:
        """Return every block that is here, the least recently used first."""
        return list(self._held)

    def store(self, hashes: Iterable[int]) -> tuple[list[int], list[int]]:
        """Put blocks here, the last one as the most recently used; returns (new ones, those that had to leave).

        A block that comes and leaves in the same call stands in neither.
        """
        held = self._held
        added: dict[int, None] = {}
        removed: list[int] = []
        for block_hash in hashes:
            if block_hash in held:
                held.move_to_end(block_hash)
                continue
            if len(held) >= self.capacity_blocks:
                victim = held.popitem(last=False)[0]
                if victim in added:
                    del added[victim]
                else:
                    removed.append(victim)
            held[block_hash] = added[block_hash] = None
        return list(added), removed

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()
