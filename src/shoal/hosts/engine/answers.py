"""What the embedded engine says: words without meaning, the same for the same seed and request.

Owns one long tape of four-letter words (a space and a syllable), one word a token; an answer is a stretch of it.
"""

import numpy as np
import xxhash

from shoal.hosts.engine.tokens import TOKEN_BYTES
from shoal.kernel import Chance

_TAPE_TOKENS = 1 << 16
_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_SHORTEST, _LONGEST = 48, 176


class Answers:
    """The tape of one seed.  tape: ASCII bytes, four a token, needs no JSON escape."""

    __slots__ = ("_seed", "tape")

    def __init__(self, seed: int) -> None:
        words = [f" {a}{b}{c}" for a in _CONSONANTS for b in _VOWELS for c in _CONSONANTS]
        picks = Chance(seed).stream("answers").integers(0, len(words), _TAPE_TOKENS)
        self.tape = "".join(words[pick] for pick in picks).encode()
        self._seed = seed

    def offset(self, prompt: bytes, sample: int) -> int:
        """Return the token of the tape where an answer starts; `sample` tells apart the n of one request."""
        digest = xxhash.xxh3_64_intdigest(prompt, self._seed + sample)
        return digest % _TAPE_TOKENS

    def natural_length(self, offset: int) -> int:
        """Return how many tokens an answer has when the client sets no limit: 48 to 176."""
        return _SHORTEST + (offset * 2654435761 >> 7) % (_LONGEST - _SHORTEST + 1)

    def packed(self, offset: int, count: int) -> bytes:
        """Return `count` tokens of the tape from `offset` on, starting over at its end."""
        start = offset * TOKEN_BYTES
        size = count * TOKEN_BYTES
        tape = self.tape
        if start + size <= len(tape):
            return tape[start : start + size]
        return (tape[start:] + tape * (size // len(tape) + 1))[:size]


def vector(prompt: bytes, dimensions: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return a unit vector that only the prompt decides: an embedding without meaning."""
    source = np.random.Generator(np.random.PCG64(xxhash.xxh3_64_intdigest(prompt)))
    values = source.standard_normal(dimensions, dtype=np.float32)
    return values / np.float32(np.linalg.norm(values))


def score(prompt: bytes) -> float:
    """Return a score of 0 to 1 that only the prompt decides."""
    return round(xxhash.xxh3_64_intdigest(prompt) / 2**64, 6)
