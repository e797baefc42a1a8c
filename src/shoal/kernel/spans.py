"""Times counted in classes, each so much longer than the one before: small to keep, and sums of counts are counts.

Owns the classes and the quantiles of what was counted.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

SHORTEST_S = 0.001
"""Shorter times are class 0."""
GROWTH = 1.2
"""A quantile is exact within a tenth."""
_PER_LOG = 1.0 / math.log(GROWTH)


def count(times_s: Sequence[float], counts: dict[int, int]) -> None:
    """Add times to what was counted by class; many at once cost little."""
    times = np.array(times_s, np.float64)
    classes = 1 + (np.log(np.maximum(times, SHORTEST_S) / SHORTEST_S) * _PER_LOG).astype(np.int64)
    classes[times < SHORTEST_S] = 0
    for each, number in enumerate(np.bincount(classes).tolist()):
        if number:
            counts[each] = counts.get(each, 0) + number


def quantile_s(counts: Mapping[int, int], q: float) -> float | None:
    """Return the time that a share q (0 to 1) of those counted did not exceed; None when there are none.

    counts: of times by their class.  0.0 stands for all that is shorter than SHORTEST_S.
    """
    wanted, seen, found = q * sum(counts.values()), 0, 0
    if not any(counts.values()):
        return None
    for found in sorted(counts):
        seen += counts[found]
        if seen >= wanted:
            break
    return SHORTEST_S * GROWTH ** (found - 0.5) if found else 0.0
