"""From prompt bytes to block hashes: what the rest of the router knows a prompt by.

Owns the block size, the chaining, the key and what a seed is made of.  Does not read APIs (`wire` says which
bytes are the prompt) and keeps nothing between calls.
"""

from collections.abc import Sequence
from struct import Struct

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

Blocks = npt.NDArray[np.uint64]
"""Chained block hashes in prompt order.  A zero is no block: it parts the chains of a request with several prompts."""

BLOCK_BYTES = 256
BLOCK_TOKENS = 64
"""A block is 64 tokens: 256 bytes of text at the estimate of 4 bytes each, or 64 exact ids of 4 bytes."""

MAX_BLOCKS = 8192
"""Blocks hashed of one request: 2 MB of text.  What lies behind is never matched, which bounds the work."""

_split = Struct(f"{BLOCK_BYTES}s").iter_unpack


class BlockHasher:
    """Hashes prompts block by block, each hash covering all the bytes before it.

    key: secret of the pool, 0 to 2**64-1; all routers of a pool share it, and without it nobody can make prompts
    that collide.  max_blocks: per request, over all of its prompts.
    """

    __slots__ = ("_key", "_max_blocks")

    def __init__(self, key: int, max_blocks: int = MAX_BLOCKS) -> None:
        self._key = key
        self._max_blocks = max_blocks

    def hash_prompt(self, prompts: Sequence[bytes], seed_parts: Sequence[str]) -> Blocks:
        """Return the chains of `prompts` one after the other, parted by a zero; an empty prompt has none.

        prompts: UTF-8 text, or token ids as little-endian uint32.  seed_parts: model, adapter, cache salt and
        whatever else must be equal for two prompts to share a cache.  Only full blocks count, so that a growing
        conversation matches on all that it had; a prompt shorter than one block is one block as a whole.
        """
        seed = self._seed(seed_parts)
        left = self._max_blocks
        hashes: list[int] = []
        for prompt in prompts:
            if not prompt or left <= 0:
                continue
            if hashes:
                hashes.append(0)
            full = min(len(prompt) // BLOCK_BYTES, left)
            if full:
                last = seed
                text = memoryview(prompt)[: full * BLOCK_BYTES]
                hashes += [last := xxh3_64_intdigest(block, last) for (block,) in _split(text)]
            else:
                hashes.append(xxh3_64_intdigest(prompt, seed))
            left -= full or 1
        return np.array(hashes, np.uint64)

    def _seed(self, parts: Sequence[str]) -> int:
        """Fold the parts into one number; each carries its length, so that ("ab", "c") is not ("a", "bc")."""
        return xxh3_64_intdigest("".join([f"{len(part)}:{part}" for part in parts]).encode(), self._key)


def read_blocks(raw: bytes) -> Blocks:
    """Return the blocks that `Blocks.tobytes()` wrote: 8 bytes little-endian each, as events carry them.

    Raises ValueError when the length is no multiple of 8.
    """
    return np.frombuffer(raw, "<u8")
