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
Piece = tuple[int, int, int]
"""Content, and the units from which on, up to which (not included), it goes."""

_UNITS_PER_BLOCK = BLOCK_TOKENS // UNIT_TOKENS
# Constants of splitmix64 (Steele, Lea and Flood 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_BY_30, _BY_27, _BY_31 = np.uint64(30), np.uint64(27), np.uint64(31)
# Of the first units they are at hand: 128 KB for prompts of 262,144 tokens.
_PLACES = np.arange(1 << 14, dtype=np.uint64) * _MIX_2
_WIRE = np.dtype("<u8")
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
    """Return what tells the units from place `first` to `last` (not included) apart, to be read."""
    if last <= len(_PLACES):
        return _PLACES[first:last]
    return np.arange(first, last, dtype=np.uint64) * _MIX_2


def _piece(content: int, before: int, total: int) -> tuple[Piece, ...]:
    """Return what is appended to `before` tokens to make `total`: nothing where no unit becomes full."""
    first, last = before // UNIT_TOKENS, total // UNIT_TOKENS
    return ((content, first, last),) if last > first else ()


class Prompt:
    """A prompt of `tokens` tokens.

    Values: extending makes a new one.  What was appended is hashed when somebody asks, pieces together; what grew at
    once with it, too.
    """

    __slots__ = ("_blocks", "_chain", "_parts", "_pieces", "_sum", "_whole", "tokens")

    def __init__(self, tokens: int, chain: Hashes, running: np.uint64, pieces: tuple[Piece, ...] = ()) -> None:
        self.tokens = tokens
        self._chain = chain
        self._sum = running
        self._pieces = pieces
        self._whole: Prompt | None = None
        self._parts: list[Prompt] = []
        self._blocks: tuple[int, tuple[int, ...]] = (0, ())

    @property
    def chain(self) -> Hashes:
        """Hash n covers the first n + 1 units; what is left over has none."""
        whole = self._whole or self
        if whole._pieces:
            whole._hash()
        return self._chain

    def _hash(self) -> None:
        """Hash what was appended, for all that it begins with."""
        start, end = self._pieces[0][1], self._pieces[-1][2]
        contents = np.array([content * 0x9E3779B97F4A7C15 & _MASK for content, _, _ in self._pieces], np.uint64)
        sums = _places(start, end) + contents.repeat([last - first for _, first, last in self._pieces])
        _mix(sums)
        np.add.accumulate(sums, out=sums)
        sums += self._sum
        parts, self._parts, self._pieces = [self, *self._parts], [], ()
        for part in parts:
            if part.tokens // UNIT_TOKENS > start:
                part._sum = sums[part.tokens // UNIT_TOKENS - start - 1]
        _mix(sums)
        chain = np.concatenate((self._chain, sums))
        for part in parts:
            part._chain = chain[: part.tokens // UNIT_TOKENS]

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
        # Not more than two at once, so that prompts of one origin share what was hashed.
        chain = self.chain if self._whole is not None or len(self._pieces) > 1 else self._chain
        return Prompt(total, chain, self._sum, self._pieces + _piece(content, self.tokens, total))

    def grow(self, *pieces: tuple[int, int]) -> "list[Prompt]":
        """Return what comes of appending each of several pieces (content, tokens), the last one with all of them.

        The same as extending by one after the other, but hashed at once when anybody asks, and sharing what they hold.
        """
        chain, total = self.chain, self.tokens
        parts: list[Prompt] = []
        appended: list[Piece] = []
        for content, tokens in pieces:
            appended += _piece(content, total, total + tokens)
            total += tokens
            parts.append(Prompt(total, chain, self._sum))
        whole = parts[-1]
        whole._parts, whole._pieces = parts[:-1], tuple(appended)
        for part in whole._parts:
            part._whole = whole
        return parts

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
            return self.chain.take(_ENDS[: hashes_within(blocks)]).astype(_WIRE, copy=False).tobytes()
        whole = self.chain[-1:] if len(self.chain) else _mixed(np.array([self._sum], np.uint64))
        return (whole ^ np.uint64(self.tokens)).astype(_WIRE, copy=False).tobytes()

    def blocks(self, block_size: int) -> tuple[int, ...]:
        """Return an engine's hashes: one per full block of `block_size` tokens, a multiple of 16."""
        whole = self._whole or self
        size, blocks = whole._blocks
        if size != block_size:
            step = block_size // UNIT_TOKENS
            blocks = tuple(whole.chain[step - 1 :: step].tolist())
            if whole is not self:
                # Others that it begins with will be asked, too.
                whole._blocks = block_size, blocks
        return blocks[: self.tokens // block_size]

    def keys(self, block_size: int) -> bytes:
        """Return the same as exact keys, 8 bytes little-endian each."""
        step = block_size // UNIT_TOKENS
        return self.chain[step - 1 :: step].astype(_WIRE).tobytes()
