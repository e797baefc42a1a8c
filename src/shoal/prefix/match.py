"""The answers of the index: how much of a prompt is held where, and what a dispatch expects of it.

Values only; `index` makes them.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Run(NamedTuple):
    """A stretch of a prompt that some endpoints hold up to its end.  holders: set of slots.  stamp: of its last use."""

    holders: int
    blocks: int
    stamp: int


class Match(NamedTuple):
    """How much of one prompt each endpoint is believed to hold.

    blocks: int32, one per slot that was ever open: leading blocks held, summed over the request's prompts.
    total: blocks of the request.  runs: where the figures come from, for `EstimatedIndex.expect`.
    """

    blocks: npt.NDArray[np.int32]
    total: int
    runs: list[Run]


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
