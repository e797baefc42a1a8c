"""Prompts without text: how long they are, and which of them begin alike.

A prompt is its chain of hashes over units of 16 tokens, made from what was appended to it.  Owns the chain, and what
the router's hashes and an engine's blocks are of it; both see the same content by their own block sizes.
"""

import numpy as np
import numpy.typing as npt

from shoal.prefix import BLOCK_TOKENS, MAX_BLOCKS
from shoal.prefix.hashing import REACH, hashes_within

UNIT_TOKENS = 16
"""What is told apart: a unit is the same or it is not."""

Hashes = npt.NDArray[np.uint64]

_UNITS_PER_BLOCK = BLOCK_TOKENS // UNIT_TOKENS
# Constants of splitmix64 (Steele, Lea and Flood 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_BY_30, _BY_27, _BY_31 = np.uint64(30), np.uint64(27), np.uint64(31)
# Of the first units they are at hand: 128 KB for prompts of 262,144 tokens.
_PLACES = np.arange(1 << 14, dtype=np.uint64) * _MIX_2
_ENDS = np.array(REACH[1:], np.intp) * _UNITS_PER_BLOCK - 1


def _mix(values: Hashes) -> None:
    """Scatter 64-bit values in their place (splitmix64's finaliser)."""
    values ^= values >> _BY_30
    values *= _MIX_1
    values ^= values >> _BY_27
    values *= _MIX_2
    values ^= values >> _BY_31


def _mixed(values: Hashes) -> Hashes:
    """Return values scattered."""
    values = values.copy()
    _mix(values)
    return values


def _places(first: int, last: int) -> Hashes:
    """Return what tells the units from place `first` to `last` (not included) apart."""
    if last <= len(_PLACES):
        return _PLACES[first:last].copy()
    return np.arange(first, last, dtype=np.uint64) * _MIX_2


class Prompt:
    """A prompt of `tokens` tokens.

    Values: extending makes a new one.  What was appended is hashed when somebody asks, pieces together.
    """

    __slots__ = ("_chain", "_pieces", "_sum", "tokens")

    def __init__(
        self, tokens: int, chain: Hashes, running: np.uint64, pieces: tuple[tuple[int, int, int], ...] = ()
    ) -> None:
        self.tokens = tokens
        self._chain = chain
        self._sum = running
        self._pieces = pieces

    @property
    def chain(self) -> Hashes:
        """Hash n covers the first n + 1 units; what is left over has none."""
        if self._pieces:
            self._hash()
        return self._chain

    def _hash(self, units: int = 0) -> np.uint64:
        """Hash what was appended.  Returns the running sum behind the first `units` units of it."""
        start, end = self._pieces[0][1], self._pieces[-1][2]
        sums = _places(start, end)
        for content, first, last in self._pieces:
            sums[first - start : last - start] += np.uint64(content * 0x9E3779B97F4A7C15 & _MASK)
        _mix(sums)
        np.add.accumulate(sums, out=sums)
        sums += self._sum
        behind: np.uint64 = sums[units - 1]
        self._sum = sums[-1]
        _mix(sums)
        self._chain = np.concatenate((self._chain, sums))
        self._pieces = ()
        return behind

    @classmethod
    def empty(cls, seed: int) -> "Prompt":
        """Return the beginning of all prompts of one model, adapter and salt, which `seed` stands for."""
        start = _mixed(np.array([seed], np.uint64) + _GOLDEN)
        return cls(0, np.zeros(0, np.uint64), start[0])

    def extend(self, content: int, tokens: int) -> "Prompt":
        """Return the prompt with `tokens` tokens of `content` behind it.

        The same content behind the same prompt is the same; the first n tokens of two equal contents are equal too.
        """
        total = self.tokens + tokens
        first, last = self.tokens // UNIT_TOKENS, total // UNIT_TOKENS
        if last == first:
            return Prompt(total, self._chain, self._sum, self._pieces)
        # Not more than two at once, so that prompts of one origin share what was hashed.
        chain = self.chain if len(self._pieces) > 1 else self._chain
        return Prompt(total, chain, self._sum, (*self._pieces, (content, first, last)))

    def exchange(self, said: int, say: int, answer: int, reply: int) -> "tuple[Prompt, Prompt]":
        """Return the prompt with `say` tokens of `said` behind it, and that with its answer of `reply` tokens.

        The same as extending twice, but hashed at once; both share what they are made of.
        """
        before = len(self.chain)
        asked = self.extend(said, say)
        whole = asked.extend(answer, reply)
        if asked._pieces:
            units = asked.tokens // UNIT_TOKENS
            asked._sum = whole._hash(units - before)
            asked._chain = whole._chain[:units]
            asked._pieces = ()
        return asked, whole

    def units(self, hash_ids: npt.NDArray[np.uint64], tokens: int) -> "Prompt":
        """Return the prompt with units of given content behind it, which must begin at a unit's edge."""
        before = self.chain
        sums = np.cumsum(_mixed(hash_ids * _GOLDEN), dtype=np.uint64) + self._sum
        chain = np.concatenate((before, _mixed(sums)))
        return Prompt(self.tokens + tokens, chain, sums[-1] if len(sums) else self._sum)

    def hashes(self) -> bytes:
        """Return what the router gets: hashes at its own depths, 8 bytes little-endian each."""
        blocks = min(self.tokens // BLOCK_TOKENS, MAX_BLOCKS)
        if blocks:
            return self.chain[_ENDS[: hashes_within(blocks)]].astype("<u8").tobytes()
        whole = self.chain[-1:] if len(self.chain) else _mixed(np.array([self._sum], np.uint64))
        return (whole ^ np.uint64(self.tokens)).astype("<u8").tobytes()

    def blocks(self, block_size: int) -> tuple[int, ...]:
        """Return an engine's hashes: one per full block of `block_size` tokens, a multiple of 16."""
        step = block_size // UNIT_TOKENS
        return tuple(self.chain[step - 1 :: step].tolist())

    def keys(self, block_size: int) -> bytes:
        """Return the same as exact keys, 8 bytes little-endian each."""
        step = block_size // UNIT_TOKENS
        return self.chain[step - 1 :: step].astype("<u8").tobytes()
