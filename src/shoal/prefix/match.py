"""The answers of the index: how much of a prompt is held where, and what a dispatch expects of it.

Values only; `index` makes them.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.prefix.sets import slots_of

# Up to so many holders the plain way is faster than the one made for many.
_FEW = 6


class Run(NamedTuple):
    """A stretch of a prompt that some endpoints hold up to its end.  holders: set of slots.  stamp: of its last use."""

    holders: int
    blocks: int
    stamp: int


class Match(NamedTuple):
    """How much of one prompt each endpoint is believed to hold.

    total: blocks of the request.  runs: where the figures come from.  width: slots that were ever open.  keys and rows:
    the hashes of a short prompt and where each lies, -1 for nowhere, for an `add` in the same step; empty for others.
    """

    total: int
    runs: list[Run]
    width: int
    keys: list[int] = []  # noqa: RUF012
    rows: list[int] = []  # noqa: RUF012

    @property
    def blocks(self) -> npt.NDArray[np.int32]:
        """Leading blocks held by each slot, summed over the request's prompts."""
        held = np.zeros(self.width, np.int32)
        for holders, depth, _ in self.runs:
            if holders.bit_count() > _FEW:
                held[slots_of(holders)] += depth
                continue
            while holders:
                low = holders & -holders
                held[low.bit_length() - 1] += depth
                holders ^= low
        return held

    def held(self, slot: int) -> int:
        """Leading blocks held by one slot."""
        blocks = 0
        for holders, depth, _ in self.runs:
            if holders >> slot & 1:
                blocks += depth
        return blocks


class Expectation(NamedTuple):
    """What a request is sent out with, kept with its booking until the engine says what was cached.

    blocks of total: believed to be cached at `slot`.  age: blocks that came to the endpoint since the deepest of them
    was last used.  epoch: tells a later endpoint in the same slot, or the same one after `clear`, from this one.
    """

    slot: int
    epoch: int
    blocks: int
    total: int
    age: int
