"""What scheduling decided, with the figures that led there."""

from typing import NamedTuple

import msgspec
import numpy.typing as npt
from numpy import float64


class ScoreColumn(msgspec.Struct, frozen=True, gc=False):
    """One scorer's say.  values: one score of 0 to 1 per candidate, before the weight."""

    name: str
    weight: float
    values: npt.NDArray[float64] | list[float]


class Decision(NamedTuple):
    """The chosen endpoints in order (first is the target, the rest are fallbacks), and why.

    profile: the profile that decided.  candidates: endpoint ids in column order.  scores: each scorer's column.
    total: weighted sum per candidate.  dropped: (filter name, how many it removed), in order.
    """

    profile: str
    chosen: tuple[str, ...]
    candidates: tuple[str, ...]
    scores: tuple[ScoreColumn, ...]
    total: npt.NDArray[float64] | list[float]
    dropped: tuple[tuple[str, int], ...] = ()
