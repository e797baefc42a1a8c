"""How full the pool may be before a band has to wait: a ceiling for each band, the highest priority first."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Protocol, runtime_checkable


def _ratio(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value:g}")


@runtime_checkable
class UsageLimit(Protocol):
    """A policy.  is_steady: its ceilings depend on the bands alone."""

    is_steady: ClassVar[bool]

    def ceilings(self, priorities: Sequence[int], saturation: float, cycle: int) -> list[float]:
        """Return for each of `priorities` (descending) how saturated an endpoint may be to get its requests.

        saturation: mean over the pool, 1 is full.  cycle: counts the times that anybody asked.
        """
        ...


class StaticUsageLimit:
    """The same ceiling for every band."""

    type: ClassVar[str] = "static-usage-limit-policy"
    is_steady: ClassVar[bool] = True

    def __init__(self, *, threshold: Annotated[float, "the ceiling; 1 uses all there is"] = 1.0) -> None:
        _ratio("threshold", threshold)
        self._threshold = threshold

    def ceilings(self, priorities: Sequence[int], saturation: float, cycle: int) -> list[float]:
        """Return the threshold for all."""
        return [self._threshold] * len(priorities)


class PriorityHoldback:
    """Room is held back for higher bands: the highest gets maxCeiling, the lowest minCeiling, the others in between."""

    type: ClassVar[str] = "priority-holdback-policy"
    is_steady: ClassVar[bool] = True

    def __init__(
        self,
        *,
        min_ceiling: Annotated[float, "of the lowest band, above 0 and at most 1"],
        max_ceiling: Annotated[float, "of the highest band; a band that is alone is the highest"] = 1.0,
    ) -> None:
        _ratio("minCeiling", min_ceiling)
        _ratio("maxCeiling", max_ceiling)
        if min_ceiling > max_ceiling:
            raise ValueError(f"minCeiling must not be above maxCeiling, got {min_ceiling:g} and {max_ceiling:g}")
        self._min, self._max = min_ceiling, max_ceiling

    def ceilings(self, priorities: Sequence[int], saturation: float, cycle: int) -> list[float]:
        """Return a straight line from the highest to the lowest."""
        last = max(1, len(priorities) - 1)
        return [self._max - place * (self._max - self._min) / last for place in range(len(priorities))]


class SoftReflectiveCeiling:
    """Lower bands are let through more and more seldom as the pool fills; the highest one always may.

    Of N bands the one at place i (0 is the highest) has the reflective ceiling r = 1 - i * saturation / (N - 1).  Below
    it the band may go; at or above it, it may on one cycle in every max(1, round(saturation / (1 - saturation))), and
    never once the pool is full.
    """

    type: ClassVar[str] = "soft-reflective-ceiling-policy"
    is_steady: ClassVar[bool] = False

    def ceilings(self, priorities: Sequence[int], saturation: float, cycle: int) -> list[float]:
        """Return 1 for those that may go in this cycle and 0 for the others."""
        last = max(1, len(priorities) - 1)
        found = []
        for place in range(len(priorities)):
            if place == 0 or saturation < 1.0 - place * saturation / last:
                found.append(1.0)
            elif saturation >= 1.0:
                found.append(0.0)
            else:
                every = max(1, round(saturation / (1.0 - saturation)))
                found.append(1.0 if cycle % every == 0 else 0.0)
        return found
