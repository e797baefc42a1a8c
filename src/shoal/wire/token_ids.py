"""Prompts that arrive as token ids: lists of whole numbers to little-endian uint32 bytes.

Owns the check of such lists and the marks of media among the tokens.
"""

import sys
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from shoal.kernel import InvalidInput

MAX_ID = 2**32 - 1


def is_id_list(value: Any) -> bool:
    """Whether `value` looks like one prompt of token ids: a list that starts with a number."""
    return isinstance(value, list) and bool(value) and type(value[0]) in (int, float)


def pack_ids(ids: list[Any]) -> bytes:
    """Return `ids` as little-endian uint32.  Raises InvalidInput when they are no token ids."""
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError):
        raise InvalidInput(f"token ids must be a list of whole numbers from 0 to {MAX_ID}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def mark_media(ids: bytes, features: Any) -> bytes:
    """Return `ids` with the first tokens of each media placeholder replaced by a hash of what stands there.

    features: the `features` object of vLLM's token-in API (`mm_hashes`, `mm_placeholders`); a malformed one is
    left for the engine to refuse.
    """
    if not isinstance(features, dict):
        return ids
    hashes, places = features.get("mm_hashes"), features.get("mm_placeholders")
    if not isinstance(hashes, dict) or not isinstance(places, dict):
        return ids
    tokens = np.frombuffer(ids, dtype="<u4").copy()
    for kind, names in sorted(hashes.items()):
        spans = places.get(kind)
        if isinstance(names, list) and isinstance(spans, list):
            for name, span in zip(names, spans, strict=False):
                _mark(tokens, f"{kind}\0{name}", span)
    return tokens.tobytes()


def _mark(tokens: npt.NDArray[np.uint32], name: str, span: Any) -> None:
    offset = span.get("offset") if isinstance(span, dict) else None
    length = span.get("length") if isinstance(span, dict) else None
    if type(offset) is not int or type(length) is not int or not 0 <= offset < len(tokens) or length < 1:
        return
    words = np.frombuffer(xxhash.xxh3_128_digest(name.encode()), dtype="<u4")
    room = min(length, len(words), len(tokens) - offset)
    tokens[offset : offset + room] = words[:room]
