"""From the token ids of a request to what the router is told of them: a count, and keys.  Ids go no further."""

from collections.abc import Iterable, Sequence

from shoal.prefix.tokens import TokenHasher
from shoal.routing.events import TokenKeys

MAX_BLOCK_SIZES = 8
MAX_EXTRA_BLOCKS = 1 << 16


def make_keys(
    maker: TokenHasher,
    ids: bytes,
    *,
    model: str,
    adapter: str,
    salt: str,
    block_sizes: Iterable[int],
    media: Sequence[tuple[str, int, int]] = (),
) -> tuple[TokenKeys, ...]:
    """Return the keys of one prompt at each block size, in their order; sizes that no engine has are left out.

    ids: little-endian uint32.  media: (hash, place of its first token, tokens) of each image or sound; as in the engine
    each block that it stands in depends on its hash.
    """
    found = []
    for size in list(block_sizes)[:MAX_BLOCK_SIZES]:
        if size > 0:
            extras = _extras(media, len(ids) // 4 // size, size) if media else None
            found.append(TokenKeys(size, maker.hash_tokens(ids, model, adapter, salt, size, extras)))
    return tuple(found)


def _extras(media: Sequence[tuple[str, int, int]], blocks: int, block_size: int) -> list[tuple[str, ...] | None] | None:
    if not 0 < blocks <= MAX_EXTRA_BLOCKS:
        return None
    found: list[list[str]] = [[] for _ in range(blocks)]
    for name, place, tokens in media:
        for block in range(place // block_size, min(blocks, -(-(place + tokens) // block_size))):
            found[block].append(name)
    return [tuple(names) or None for names in found]
