"""How often the beginnings of prompts are used, of late.

Owns the counts, by the hash of a beginning.  What follows from them for a choice is the scorers'.
"""

import math
from collections import OrderedDict

WINDOW_S = 60.0
"""A use counts for 1/e after this time."""
APART_S = 0.25
"""Uses that follow a counted one sooner than this count as one with it: the samples of one prompt come together once,
and say nothing of a prompt that will come again."""
MAX_PREFIXES = 20_000
"""Beginnings that are kept, a few megabytes; those not used for the longest time give way."""


class Heat:
    """Uses of each beginning after its first one, with less weight the longer ago."""

    __slots__ = ("_now", "_uses")

    def __init__(self) -> None:
        self._now = 0.0
        self._uses: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def of(self, prefix: int) -> float:
        """Return the uses of a beginning as of the last time that any was used, 0.0 for one that is not known."""
        found = self._uses.get(prefix)
        return found[0] * math.exp((found[1] - self._now) / WINDOW_S) if found is not None else 0.0

    def used(self, prefix: int, now: float) -> None:
        """Note a use.  prefix: a hash, not 0."""
        self._now = now
        count, at = self._uses.pop(prefix, (-1.0, now))
        if count < 0.0:
            count = 0.0
        elif now - at >= APART_S:
            count, at = count * math.exp((at - now) / WINDOW_S) + 1.0, now
        self._uses[prefix] = (count, at)
        if len(self._uses) > MAX_PREFIXES:
            self._uses.popitem(last=False)
