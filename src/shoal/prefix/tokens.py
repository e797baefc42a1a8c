"""From token ids to exact keys: what a full block of a prompt is known by, whatever the engine calls it.

Owns the chain over token ids and what it begins with.  The same for prompts (`hash_tokens`) and for the events of
engines (`digests` and `step`, see `ledger`).  Does not tokenise, and keeps nothing of a prompt.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from shoal.prefix.hashing import Blocks

Extras = Sequence[tuple[str, ...] | None]
"""For each block what else its content depends on (images, cache salt), None for nothing; the order does not count."""

MAX_BLOCK_TOKENS = 4096
MAX_STEPS = 8192
"""Powers of A that are kept."""

_WORD = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15
_MAX_SEEDS = 1024
_MAX_KEPT_CHARS = 512


class TokenHasher:
    """Keys of full blocks: 64 bits each, chained, so that equal keys mean equal prompts up to there.

    With A odd, and digest(i) a mixed sum of the block's ids, each times a coefficient of its own:

        key(i) = key(i-1) * A + digest(i)    modulo 2**64

    A and the coefficients come from `key`, so that nobody without it can make blocks that collide.  Both steps are
    sums, so a long prompt takes a few array operations, and a digest can be kept until its parent's key is known.

    key: secret of the pool, 0 to 2**64-1; all routers of a pool share it.  factor: A.  powers, inverse_powers: of
    A and its inverse, from the first on, MAX_STEPS of them.
    """

    __slots__ = ("_coefficients", "_key", "_seeds", "factor", "inverse_powers", "powers")

    def __init__(self, key: int) -> None:
        self._key = key
        self.factor = xxh3_64_intdigest(b"factor", key) | 1
        self.powers = _powers(self.factor)
        self.inverse_powers = _powers(pow(self.factor, -1, 1 << 64))
        self._coefficients: dict[int, Blocks] = {}
        self._seeds: dict[tuple[str, str, int], int] = {}

    def hash_tokens(
        self, tokens: bytes, model: str, adapter: str, salt: str, block_size: int, extras: Extras | None = None
    ) -> bytes:
        """Return the keys of the prompt's full blocks, 8 bytes little-endian each; see `read_blocks`.

        tokens: ids as little-endian uint32.  model, adapter: as the engines name them, "" for no adapter.  salt: the
        request's cache salt; as in the engines it is an extra of the first block.  block_size: tokens per block.
        Raises ValueError for a block size out of range.
        """
        count = len(tokens) // (4 * _checked(block_size))
        if not count:
            return b""
        if salt:
            first = (extras[0] if extras else None) or ()
            extras = [(*first, salt), *(extras[1:] if extras else ())]
        ids = np.frombuffer(tokens, "<u4", count * block_size)
        digests = self.digests(ids, block_size, extras)
        last = self.seed(model, adapter, block_size)
        for start in range(0, count, MAX_STEPS):
            stretch = digests[start : start + MAX_STEPS]
            stretch *= self.inverse_powers[: len(stretch)]
            np.add.accumulate(stretch, out=stretch)
            stretch += np.uint64(last)
            stretch *= self.powers[: len(stretch)]
            last = int(stretch[-1])
        return digests.astype("<u8", copy=False).tobytes()

    def seed(self, model: str, adapter: str, block_size: int) -> int:
        """Return what stands before the first block: the key that its chain begins with."""
        parts = (model, adapter, block_size)
        seed = self._seeds.get(parts)
        if seed is None:
            text = f"{len(model)}:{model}{len(adapter)}:{adapter}{block_size}"
            seed = xxh3_64_intdigest(text.encode(errors="surrogatepass"), self._key)
            if len(text) <= _MAX_KEPT_CHARS:
                if len(self._seeds) >= _MAX_SEEDS:
                    self._seeds.clear()
                self._seeds[parts] = seed
        return seed

    def digests(self, ids: npt.NDArray[np.uint32], block_size: int, extras: Extras | None = None) -> Blocks:
        """Return the digest of each block of `ids`, a whole number of blocks; nothing of the chain is in it."""
        coefficients = self._coefficients.get(block_size)
        if coefficients is None:
            coefficients = self._coefficients[block_size] = self._make_coefficients(_checked(block_size))
        digests: Blocks = ids.reshape(-1, block_size) @ coefficients[1:]
        digests += coefficients[0]
        digests ^= digests >> np.uint64(32)
        digests *= np.uint64(_MIX)
        digests ^= digests >> np.uint64(29)
        if extras:
            for place, extra in enumerate(extras[: len(digests)]):
                if extra:
                    digests[place] ^= np.uint64(self.extra_digest(extra))
        return digests

    def extra_digest(self, extra: tuple[str, ...]) -> int:
        """Return what a block's extras change in its digest; each string carries its length, their order is none."""
        text = "".join([f"{len(part)}:{part}" for part in sorted(extra)])
        return xxh3_64_intdigest(text.encode(errors="surrogatepass"), self.factor)

    def step(self, parent: int, digests: list[int]) -> list[int]:
        """Return the keys of a few blocks that follow the key `parent`."""
        factor = self.factor
        return [parent := (parent * factor + digest) & _WORD for digest in digests]

    def _make_coefficients(self, block_size: int) -> Blocks:
        """Return a summand and a coefficient for each place in a block."""
        made = [xxh3_64_intdigest(b"%d" % place, self.factor) for place in range(block_size + 1)]
        return np.array(made, np.uint64)


def _powers(base: int) -> Blocks:
    """Return the first powers of `base` modulo 2**64, from the first on."""
    return np.multiply.accumulate(np.full(MAX_STEPS, base, np.uint64))


def _checked(block_size: int) -> int:
    if not 0 < block_size <= MAX_BLOCK_TOKENS:
        raise ValueError(f"a block has 1 to {MAX_BLOCK_TOKENS} tokens, not {block_size}")
    return block_size
