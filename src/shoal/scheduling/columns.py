"""Reading columns of a fleet view where some values are unknown.

NaN is unknown.  It never reads as 0: an endpoint whose load nobody knows must not look like the idlest one, so it
takes the place of the worst endpoint that is known.  Where nothing is known of any candidate the column stays
NaN, all candidates score alike, and other scorers or chance decide.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from shoal.pool import Endpoint, FleetView
from shoal.scheduling.plugin import Scores

T = TypeVar("T")


def known(view: FleetView, name: str) -> Scores:
    """Return the column of `name`, all NaN when nobody fills it."""
    if view.has(name):
        return view.column(name)
    return np.full(len(view), np.nan)


def worst_high(column: Scores) -> Scores:
    """Return `column` with each NaN replaced by the largest known value (where low is good)."""
    unknown = np.isnan(column)
    return np.where(unknown, np.fmax.reduce(column, initial=np.nan), column) if unknown.any() else column


def worst_low(column: Scores) -> Scores:
    """Return `column` with each NaN replaced by the smallest known value (where high is good)."""
    unknown = np.isnan(column)
    return np.where(unknown, np.fmin.reduce(column, initial=np.nan), column) if unknown.any() else column


def fewest_first(column: Scores) -> Scores:
    """Return (max - value) / (max - min); 1 for all when all are equal, NaN when none is known."""
    top = column.max()
    if top != top:
        column = worst_high(column)
        top = column.max()
    width = top - column.min()
    return np.ones(len(column)) if width == 0 else np.subtract(top, column) / width


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
