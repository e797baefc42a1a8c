"""What a prediction is made from: the figures, their units, and what is believed of each before any record.

Both times are predicted from one row of figures; what tells nothing of one of them has no spread there and stays at 0.
Each figure has a unit that makes it of the order of 1 in a busy engine, so that no coefficient is lost in rounding.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Figure(IntEnum):
    """Place of each figure in a row.

    OWN_TOKENS: of this prompt, to be prefilled.  ATTENTION_PAIRS: own tokens times the mean context that they look at.
    AHEAD_TOKENS: uncached tokens in flight before it.  CONTEXT_TOKENS: the whole prompt.  KV_USAGE: 0 to 1.  WAITING:
    requests in the engine's own queue.
    """

    BASE = 0
    OWN_TOKENS = 1
    ATTENTION_PAIRS = 2
    AHEAD_TOKENS = 3
    INFLIGHT_REQUESTS = 4
    INFLIGHT_OUTPUT_TOKENS = 5
    KV_USAGE = 6
    WAITING = 7
    CONTEXT_TOKENS = 8


UNITS: Floats = np.array([1.0, 1e3, 1e7, 1e3, 10.0, 1e4, 1.0, 10.0, 1e4])
"""Of each figure."""


class Features(NamedTuple):
    """prior: seconds for one unit of each figure before anything was seen.  spread: how far off that may well be, 0 for
    a figure that does not count.  floor_s: no prediction is below."""

    prior: Floats
    spread: Floats
    floor_s: float


def _features(floor_s: float, beliefs: dict[Figure, tuple[float, float]]) -> Features:
    prior, spread = np.zeros(len(Figure)), np.zeros(len(Figure))
    for figure, (believed, off) in beliefs.items():
        prior[figure], spread[figure] = believed, off
    return Features(prior, spread, floor_s)


TTFT = _features(
    0.001,
    {
        Figure.BASE: (0.01, 0.1),
        Figure.OWN_TOKENS: (0.05, 0.3),
        Figure.ATTENTION_PAIRS: (0.0, 0.1),
        Figure.AHEAD_TOKENS: (0.05, 0.3),
        Figure.INFLIGHT_REQUESTS: (0.002, 0.03),
        Figure.INFLIGHT_OUTPUT_TOKENS: (0.0, 0.03),
        Figure.KV_USAGE: (0.0, 0.03),
        Figure.WAITING: (0.02, 0.3),
    },
)
"""Of the time to first token."""

TPOT = _features(
    0.0001,
    {
        Figure.BASE: (0.015, 0.03),
        Figure.AHEAD_TOKENS: (0.0002, 0.001),
        Figure.INFLIGHT_REQUESTS: (0.002, 0.01),
        Figure.KV_USAGE: (0.0, 0.01),
        Figure.WAITING: (0.0, 0.01),
        Figure.CONTEXT_TOKENS: (0.0, 0.003),
    },
)
"""Of the mean time per output token."""
