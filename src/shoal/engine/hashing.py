"""Chained hashes of token blocks: equal hash means equal tokens from the start of the prompt.

Owns the rule of the model of the engine only.  It is not vLLM's digest: engine hashes are opaque to a
router anyway.
"""

import numpy as np
import numpy.typing as npt
import xxhash

_TOKEN_BYTES = 4


def hash_blocks(
    tokens: bytes | npt.NDArray[np.uint32], block_size: int, salt: str = "", seed: int = 0
) -> tuple[int, ...]:
    """Return one 64-bit hash per full block of `tokens`, each covering all blocks before it.

    tokens: uint32 ids, as an array or as little-endian bytes (4 a token).  block_size: tokens a block, at least 1.
    salt: keeps requests of other adapters or cache salts apart.  seed: of the engine; another one gives the same tokens
    other hashes.  A partial last block gets no hash.
    """
    packed = tokens if isinstance(tokens, bytes) else np.ascontiguousarray(tokens, dtype="<u4").tobytes()
    size = block_size * _TOKEN_BYTES
    digest = xxhash.xxh3_64_intdigest
    parent = digest(salt.encode(), seed)
    hashes = []
    for start in range(0, len(packed) - size + 1, size):
        parent = digest(packed[start : start + size], parent)
        hashes.append(parent)
    return tuple(hashes)
