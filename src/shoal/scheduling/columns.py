"""Reading columns of a fleet view where some values are unknown.

NaN is unknown.  It never reads as 0: an endpoint whose load nobody knows must not look like the idlest one, so it
takes the place of the worst endpoint that is known.  Where nothing is known of any candidate the column stays
NaN, all candidates score alike, and other scorers or chance decide.

The functions here are on the path of every decision: `argmax` finds a maximum, or the first NaN, in a fifth of the
time of `max`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from shoal.pool import Endpoint, FleetView, Request
from shoal.scheduling.plugin import Scores

T = TypeVar("T")


def known(view: FleetView, name: str) -> Scores:
    """Return the column of `name`, all NaN when nobody fills it."""
    try:
        return view.column(name)
    except KeyError:
        return np.full(len(view), np.nan)


def highest(column: Scores) -> float:
    """Return the largest value, NaN when any is unknown.  Raises ValueError for an empty column."""
    return float(column[column.argmax()])


def lowest(column: Scores) -> float:
    """Return the smallest value, NaN when any is unknown.  Raises ValueError for an empty column."""
    return float(column[column.argmin()])


def is_known(column: Scores) -> bool:
    """Whether no value is unknown."""
    return not math.isnan(column[column.argmax()])


def worst_high(column: Scores) -> Scores:
    """Return `column` with each NaN replaced by the largest known value (where low is good)."""
    if is_known(column):
        return column
    return np.where(np.isnan(column), np.fmax.reduce(column, initial=np.nan), column)


def worst_low(column: Scores) -> Scores:
    """Return `column` with each NaN replaced by the smallest known value (where high is good)."""
    if is_known(column):
        return column
    return np.where(np.isnan(column), np.fmin.reduce(column, initial=np.nan), column)


def fewest_first(column: Scores) -> Scores:
    """Return (max - value) / (max - min), all within 0 to 1; 1 for all when all are equal, 0 when none is known."""
    top = highest(column)
    if math.isnan(top):
        column = worst_high(column)
        top = highest(column)
        if math.isnan(top):
            return np.zeros(len(column))
    width = top - lowest(column)
    return (top - column) / width if 0.0 < width < math.inf else np.ones(len(column))


def favour(chosen: Sequence[int], load: Scores) -> Scores:
    """Return scores that choose these positions, 1 each, and name the rest as fallbacks, 0 to 0.5 by least load."""
    scores: Scores = 0.5 * fewest_first(load)
    scores[list(chosen)] = 1.0
    return scores


def own_tokens(request: Request, view: FleetView, name: str = "matched_tokens") -> Scores:
    """Return the prompt tokens that each candidate would have to prefill; what is not known is not cached.

    name: of the column that says what is cached.
    """
    matched = known(view, name)
    if not view.is_complete(name) and not is_known(matched):
        matched = np.fmax(matched, 0.0)
    own: Scores = np.maximum(request.prompt_tokens - matched, 0.0)
    return own


class PerFleet(Generic[T]):
    """A value derived from the endpoints of the fleet alone, made again only when the fleet changes.

    The fleet is recognised by identity: a view's fleet is never changed in place.
    """

    __slots__ = ("_fleet", "_make", "_value")

    def __init__(self, make: Callable[[Sequence[Endpoint]], T]) -> None:
        self._make = make
        self._fleet: Sequence[Endpoint] | None = None
        self._value: T | None = None

    def of(self, view: FleetView) -> T:
        """Return the value for the whole fleet of `view`, whatever its candidates."""
        fleet = view.fleet
        if self._value is None or fleet is not self._fleet:
            self._fleet, self._value = fleet, self._make(fleet)
        return self._value
