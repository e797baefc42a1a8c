"""From prompt bytes to block hashes: what the rest of the router knows a prompt by.

Owns the block size, the chaining, the key and what a seed is made of.  Does not read APIs (`wire` says which
bytes are the prompt) and keeps nothing of a prompt.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from struct import Struct

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

Blocks = npt.NDArray[np.uint64]
"""Chained hashes in prompt order.  A zero is none: it parts the chains of a request with several prompts."""

BLOCK_BYTES = 256
BLOCK_TOKENS = 64
"""A block is 64 tokens: 256 bytes of text at the estimate of 4 bytes each, or 64 exact ids of 4 bytes.  All counts of
blocks are in this unit."""

MAX_BLOCKS = 8192
"""Blocks hashed of one request: 2 MB of text.  What lies behind is never matched, which bounds the work."""

_TIERS = ((16, 1), (60, 4), (MAX_BLOCKS, 16))
"""(hashes, blocks that each covers).  The deeper in a prompt, the coarser: a hash covers at most a quarter of what
stands before it, so little of a match is ever lost, and a prompt of 100,000 tokens has 160 hashes instead of 1,562."""

SPANS: npt.NDArray[np.int64] = np.array([blocks for count, blocks in _TIERS for _ in range(count)])
"""Blocks that the n-th hash of a chain covers."""

REACH: tuple[int, ...] = (0, *SPANS.cumsum().tolist())
"""Blocks that the first n hashes of a chain cover."""

_split = [(count, Struct(f"{blocks * BLOCK_BYTES}s").iter_unpack, blocks * BLOCK_BYTES) for count, blocks in _TIERS]
_MAX_SEEDS = 1024
_MAX_KEPT_CHARS = 512
_IS_LITTLE = sys.byteorder == "little"


def hashes_within(blocks: int) -> int:
    """Return how many hashes of a chain lie within its first `blocks` blocks."""
    return bisect_right(REACH, blocks) - 1


class BlockHasher:
    """Hashes prompts block by block, each hash covering all the bytes before it.

    key: secret of the pool, 0 to 2**64-1; all routers of a pool share it, and without it nobody can make prompts
    that collide.  max_blocks: per request, over all of its prompts.
    """

    __slots__ = ("_key", "_max_blocks", "_seeds")

    def __init__(self, key: int, max_blocks: int = MAX_BLOCKS) -> None:
        self._key = key
        self._max_blocks = max_blocks
        self._seeds: dict[tuple[str, ...], int] = {}

    def hash_prompt(self, prompts: Sequence[bytes], seed_parts: tuple[str, ...]) -> Blocks:
        """Return the chains of `prompts` one after the other, parted by a zero; an empty prompt has none.

        prompts: UTF-8 text, or token ids as little-endian uint32.  seed_parts: model, adapter, cache salt and
        whatever else must be equal for two prompts to share a cache.  Only whole spans count, so that a growing
        conversation matches on all that it had; a prompt shorter than one block is one block as a whole.
        """
        return read_blocks(self.hash_bytes(prompts, seed_parts))

    def hash_bytes(self, prompts: Sequence[bytes], seed_parts: tuple[str, ...]) -> bytes:
        """Return the same as events carry it: 8 bytes little-endian each, see `read_blocks`."""
        seed = self._seed(seed_parts)
        left = self._max_blocks
        hashes: list[int] = []
        for prompt in prompts:
            if not prompt or left <= 0:
                continue
            if hashes:
                hashes.append(0)
            blocks = min(len(prompt) // BLOCK_BYTES, left)
            if blocks:
                wanted = hashes_within(blocks)
                left -= REACH[wanted]
                _hash_chain(hashes, prompt, wanted, seed)
            else:
                left -= 1
                hashes.append(xxh3_64_intdigest(prompt, seed))
        return array("Q", hashes).tobytes() if _IS_LITTLE else np.array(hashes, "<u8").tobytes()

    def _seed(self, parts: tuple[str, ...]) -> int:
        """Fold the parts into one number; each carries its length, so that ("ab", "c") is not ("a", "bc")."""
        seed = self._seeds.get(parts)
        if seed is None:
            text = "".join([f"{len(part)}:{part}" for part in parts])
            seed = xxh3_64_intdigest(text.encode(), self._key)
            if len(text) <= _MAX_KEPT_CHARS:
                if len(self._seeds) >= _MAX_SEEDS:
                    self._seeds.clear()
                self._seeds[parts] = seed
        return seed


def _hash_chain(hashes: list[int], prompt: bytes, wanted: int, last: int) -> None:
    """Append the first `wanted` hashes of one prompt, each seeded with the one before."""
    text = memoryview(prompt)
    start = 0
    for count, split, span_bytes in _split:
        end = start + min(count, wanted) * span_bytes
        hashes += [last := xxh3_64_intdigest(span, last) for (span,) in split(text[start:end])]
        wanted -= count
        if wanted <= 0:
            return
        start = end


def read_blocks(raw: bytes) -> Blocks:
    """Return the blocks that `Blocks.tobytes()` wrote: 8 bytes little-endian each, as events carry them.

    Raises ValueError when the length is no multiple of 8.
    """
    return np.frombuffer(raw, "<u8")
