"""What is learned of each kind of machine, what was predicted of a request, and what of that is kept with it.

Values only; `forecasts` makes them and learns from what came of them.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.latency import UNITS, Curve, Errors, Turn
from shoal.pool.outcome import Forecast
from shoal.routing.fleet import Floats, Member


class Law(NamedTuple):
    """What is learned of one kind of machine with one model."""

    ttft: Curve
    tpot: Curve
    ttft_errors: Errors
    tpot_errors: Errors


class Board:
    """The laws of one model over the rows of the fleet.

    laws: those that occur.  of_row: which of them each row has.  scales: each machine's own factors, ttft and tpot.
    """

    __slots__ = ("laws", "of_row", "scales")

    def __init__(self, laws: list[Law], of_row: npt.NDArray[np.intp], scales: Floats) -> None:
        self.laws = laws
        self.of_row = of_row
        self.scales = scales

    def coefficients(self) -> Floats:
        """Return seconds for one of each figure: (ttft and tpot, figures, rows), or one row for all."""
        made = np.array([[law.ttft.coefficients for law in self.laws], [law.tpot.coefficients for law in self.laws]])
        columns: Floats = (made / UNITS).transpose(0, 2, 1)
        return columns if len(self.laws) == 1 else np.take(columns, self.of_row, axis=2)


class Prediction:
    """What was predicted of one request for every row of the fleet.

    model: the base model that it was made for.  figures: one row for each `Figure`, one column for each endpoint.
    is_trusted: whether the laws of the whole fleet may decide.  turn: the one that it follows up on, where known.
    """

    __slots__ = ("figures", "is_trusted", "model", "tpot_s", "ttft_s", "turn")

    def __init__(self, model: str, figures: Floats, seconds: Floats, *, is_trusted: bool, turn: Turn | None) -> None:
        self.model = model
        self.figures = figures
        self.ttft_s: Floats = seconds[0]
        self.tpot_s: Floats = seconds[1]
        self.is_trusted = is_trusted
        self.turn = turn


class Noted:
    """What is kept of a prediction: the figures of the chosen endpoint, and each candidate's seconds."""

    __slots__ = ("figures", "forecast", "law", "member", "model", "tpot_s", "ttft_s", "turn")

    def __init__(self, made: Prediction, row: int, member: Member, law: Law, forecast: Forecast) -> None:
        self.figures: Floats = made.figures[:, row].copy()
        self.forecast = forecast
        self.law = law
        self.member = member
        self.model = made.model
        self.ttft_s, self.tpot_s = made.ttft_s, made.tpot_s
        self.turn = made.turn
