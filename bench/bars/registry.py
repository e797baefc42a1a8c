"""The register of bars: id, text, limit, and the function that returns the figure."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured value.

    void: why it means nothing ("" when it does), as a generator that ran late.  why: said beside a figure that falls
    short, where the number alone does not say it.  details: what else was seen.
    """

    value: float
    void: str = ""
    why: str = ""
    details: dict[str, Any] = {}


Measure = Callable[[float], Figure]
Measuring = TypeVar("Measuring", bound=Callable[..., Figure])


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A promise.  limit: the figure may not be above it, or not below it when is_floor."""

    id: str
    part: int
    text: str
    unit: str
    limit: float
    is_floor: bool
    measure: Measure

    def is_met(self, figure: Figure) -> bool:
        """Whether the figure keeps the promise; a void one does not."""
        if figure.void:
            return False
        return figure.value >= self.limit if self.is_floor else figure.value <= self.limit


BARS: dict[str, Bar] = {}
"""Every bar by its id, in the order in which they run."""


def bar(
    id: str,
    text: str,
    *,
    unit: str = "",
    at_most: float | None = None,
    at_least: float | None = None,
    part: int = 1,
) -> Callable[[Measuring], Measuring]:
    """Register the decorated function as the measurement of a bar; exactly one limit is given.

    It takes the scale; what else it takes has defaults.
    """
    if (at_most is None) == (at_least is None):
        raise ValueError(f"{id}: give either at_most or at_least")
    limit = at_most if at_most is not None else at_least
    assert limit is not None

    def register(measure: Measuring) -> Measuring:
        if id in BARS:
            raise ValueError(f"{id} is registered twice")
        BARS[id] = Bar(
            id=id, part=part, text=text, unit=unit, limit=limit, is_floor=at_least is not None, measure=measure
        )
        return measure

    return register
