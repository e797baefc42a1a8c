"""Pickers: from the weighted sum of the scores to the endpoints, target first.

Ties are broken by chance in every picker, never by the order of the list.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np

from shoal.pool import Decision, FleetView, Request
from shoal.scheduling.plugin import FEW, Scores

Count = Annotated[int, "how many endpoints to pick; those after the first are fallbacks for a retry"]


_DRAWN_AT_ONCE = 512


class Draws:
    """Uniform numbers from a stream of chance, taken many at a time: singly each costs twenty times as much."""

    __slots__ = ("_left", "_stream")

    def __init__(self, stream: np.random.Generator) -> None:
        self._stream = stream
        self._left: list[float] = []

    def random(self, count: int) -> "list[float] | Scores":
        """Return the next `count` numbers of 0 to 1."""
        if count > FEW:
            return self._stream.random(count)
        left = self._left
        if len(left) < count:
            left += self._stream.random(_DRAWN_AT_ONCE).tolist()
        drawn = left[-count:]
        del left[-count:]
        return drawn


def best(
    total: "Scores | list[float]", count: int, chance: "np.random.Generator | Draws", taken: Sequence[int] = ()
) -> list[int]:
    """Return up to `count` positions by descending total, equal totals in random order, without those `taken`."""
    if isinstance(total, list):
        drawn = chance.random(len(total))
        ranked = sorted(zip(total, drawn, range(len(total)), strict=True), reverse=True)
        order = [position for _, _, position in ranked]
    else:
        order = _ranked(total, count + len(taken), chance)
    return order[:count] if not taken else [position for position in order if position not in taken][:count]


def _ranked(total: Scores, count: int, chance: "np.random.Generator | Draws") -> list[int]:
    """Return at least the `count` best positions in order; of many candidates the best are cut out before."""
    if len(total) > max(count, FEW):
        parted = total.copy()
        parted.partition(-count)
        among = (total >= parted[-count]).nonzero()[0]
        total = total[among]
        positions = among.tolist()
    else:
        positions = list(range(len(total)))
    drawn = chance.random(len(positions))
    if len(positions) > FEW:
        return [positions[at] for at in np.lexsort((np.asarray(drawn), -total)).tolist()]
    ranked = sorted(zip(total.tolist(), drawn, positions, strict=True), reverse=True)
    return [position for _, _, position in ranked]


def _checked(max_num_of_endpoints: int) -> int:
    if max_num_of_endpoints < 1:
        raise ValueError(f"maxNumOfEndpoints must be at least 1, got {max_num_of_endpoints}")
    return max_num_of_endpoints


class MaxScorePicker:
    """Picks the highest totals; among equal totals chance decides."""

    type: ClassVar[str] = "max-score-picker"

    def __init__(self, *, max_num_of_endpoints: Count = 1) -> None:
        self.max_num_of_endpoints = _checked(max_num_of_endpoints)

    def pick(self, total: Scores, chance: np.random.Generator) -> list[int]:
        return best(total, self.max_num_of_endpoints, chance)


class RoundRobinPicker:
    """Picks the candidates in turn, whatever the scores; Shoal's own, to compare other policies with."""

    type: ClassVar[str] = "round-robin-picker"

    def __init__(self, *, max_num_of_endpoints: Count = 1) -> None:
        self.max_num_of_endpoints = _checked(max_num_of_endpoints)
        self._turn = 0

    def pick(self, total: Scores, chance: np.random.Generator) -> list[int]:
        count = len(total)
        return [(self._turn + step) % count for step in range(min(self.max_num_of_endpoints, count))]

    def dispatched(self, request: Request, view: FleetView, decision: Decision, now: float) -> None:
        self._turn += 1

    def endpoint_left(self, endpoint_id: str) -> None:
        pass

    def adopt(self, previous: object) -> None:
        if isinstance(previous, RoundRobinPicker):
            self._turn = previous._turn


class RandomPicker:
    """Picks at random, whatever the scores."""

    type: ClassVar[str] = "random-picker"

    def __init__(self, *, max_num_of_endpoints: Count = 1) -> None:
        self.max_num_of_endpoints = _checked(max_num_of_endpoints)

    def pick(self, total: Scores, chance: np.random.Generator) -> list[int]:
        count = min(self.max_num_of_endpoints, len(total))
        if count == 1:
            return [int(chance.random() * len(total))]
        return [int(position) for position in chance.permutation(len(total))[:count]]


class PowerOfTwoPicker:
    """Draws two candidates at random and picks the one with the higher total; between equal ones chance decides.

    With active-request-scorer this is the power of two choices of Mitzenmacher, "The power of two choices in randomized
    load balancing" (2001), as sglang-router and SMG have it under the name power_of_two.
    """

    type: ClassVar[str] = "power-of-two-picker"

    def __init__(self, *, max_num_of_endpoints: Count = 1) -> None:
        self.max_num_of_endpoints = _checked(max_num_of_endpoints)

    def pick(self, total: Scores, chance: np.random.Generator) -> list[int]:
        drawn = [int(position) for position in chance.choice(len(total), size=min(2, len(total)), replace=False)]
        drawn.sort(key=lambda position: -float(total[position]))
        return drawn[: self.max_num_of_endpoints]


class SoftmaxPicker:
    """Picks at random, the better the total the likelier: the probability is in proportion to exp(t / temperature).

    t is the total on the scale of the candidates' own range, 0 for the lowest and 1 for the highest; where all are
    equal the choice is uniform.  Temperature 0 picks the highest, among equal ones by chance.
    """

    type: ClassVar[str] = "softmax-picker"

    def __init__(
        self,
        *,
        temperature: Annotated[float, "0 always picks the best; the higher, the more even"] = 0.0,
        max_num_of_endpoints: Count = 1,
    ) -> None:
        if temperature < 0:
            raise ValueError(f"temperature must not be negative, got {temperature}")
        self._temperature = temperature
        self.max_num_of_endpoints = _checked(max_num_of_endpoints)

    def pick(self, total: Scores, chance: np.random.Generator) -> list[int]:
        width = float(total.max() - total.min())
        if self._temperature == 0 or width == 0:
            return best(total, self.max_num_of_endpoints, chance)
        # The largest of these keys is a draw from the softmax, the next ones are draws from what is left (Gumbel).
        keys = (total - total.max()) / (width * self._temperature) + chance.gumbel(size=len(total))
        return best(keys, self.max_num_of_endpoints, chance)


class WeightedRandomPicker:
    """Picks at random with the totals as weights, without replacement.

    Each candidate draws the key U ** (1 / total) and the largest keys win (A-Res of Efraimidis and Spirakis,
    "Weighted random sampling with a reservoir", 2006).  A total of 0 has key 0; when all totals are 0 the choice
    is uniform.
    """

    type: ClassVar[str] = "weighted-random-picker"

    def __init__(self, *, max_num_of_endpoints: Count = 1) -> None:
        self.max_num_of_endpoints = _checked(max_num_of_endpoints)

    def pick(self, total: Scores, chance: np.random.Generator) -> list[int]:
        # log(U) / total sorts like U ** (1 / total), and does not round small totals to one key.
        floor = -np.finfo(np.float64).max
        with np.errstate(divide="ignore", over="ignore"):
            keys = np.maximum(np.log1p(-chance.random(len(total))) / total, floor)
        keys[total <= 0] = floor
        return best(keys, self.max_num_of_endpoints, chance)
