"""What is learned of each kind of machine, what was predicted of a request, and what of that is kept with it.

Values only; `forecasts` makes them and learns from what came of them.
"""

from typing import NamedTuple

import numpy as np

from shoal.latency import TPOT, TTFT, UNITS, Curve, Errors, Figure, Turn
from shoal.pool.outcome import Forecast
from shoal.routing.fleet import Floats, Member


class Law(NamedTuple):
    """What is learned of one kind of machine with one model."""

    ttft: Curve
    tpot: Curve
    ttft_errors: Errors
    tpot_errors: Errors


_FLOORS: Floats = np.array([[TTFT.floor_s], [TPOT.floor_s]])


class Board:
    """The laws of one model over the rows of the fleet, ready to be multiplied.

    figures: to be filled for each request: a row for each `Figure`, a column for each endpoint.  is_trusted: whether
    predictions may decide, for all rows or for none: endpoints are compared with each other (docs/latency.md says what
    trust for each kind would gain).  scales: each machine's own factors, (ttft and tpot, rows).
    """

    __slots__ = ("_coefficients", "_laws", "_of_row", "_products", "figures", "is_trusted", "scales")

    def __init__(self, laws: list[Law], of_row: list[int], scales: Floats) -> None:
        self._laws = laws
        self._of_row = np.array(of_row, np.intp)
        self.scales = scales
        # Memory that is used again for each request costs less than memory that has to be had.
        self.figures: Floats = np.ones((len(Figure), len(of_row)))
        self._products: Floats = np.empty((2, len(Figure), len(of_row)))
        self.refresh()

    def law(self, row: int) -> Law:
        """The law of an endpoint."""
        return self._laws[int(self._of_row[row])]

    def refresh(self) -> None:
        """Take over what was learned since."""
        laws = self._laws
        made = np.array([[law.ttft.coefficients for law in laws], [law.tpot.coefficients for law in laws]])
        columns: Floats = np.take((made / UNITS).transpose(0, 2, 1), self._of_row, axis=2)
        self._coefficients: Floats = columns * self.scales[:, None, :]
        tried = [law.ttft_errors for law in laws]
        # A kind that was hardly tried goes by what it inherited: were it to wait for trust, it would never be tried.
        self.is_trusted = any(each.is_trusted for each in tried) and not any(each.is_bad for each in tried)

    def seconds(self) -> Floats:
        """Return what the figures amount to: (ttft and tpot, rows), in an array of its own."""
        np.multiply(self._coefficients, self.figures, out=self._products)
        seconds: Floats = np.add.reduce(self._products, axis=1)
        np.maximum(seconds, _FLOORS, out=seconds)
        return seconds


class Prediction:
    """What was predicted of one request for every row of the fleet.

    model: the base model that it was made for.  board: with its figures, until the next one is made.  is_trusted:
    whether it may decide.  turn: the one that it follows up on, where known.
    """

    __slots__ = ("board", "is_trusted", "model", "tpot_s", "ttft_s", "turn")

    def __init__(self, model: str, board: Board, turn: Turn | None) -> None:
        self.model = model
        self.board = board
        seconds = board.seconds()
        self.ttft_s: Floats = seconds[0]
        self.tpot_s: Floats = seconds[1]
        self.is_trusted = board.is_trusted
        self.turn = turn


class Noted:
    """What is kept of a prediction: the figures of the chosen endpoint, and each candidate's seconds."""

    __slots__ = ("figures", "forecast", "law", "member", "model", "tpot_s", "ttft_s", "turn")

    def __init__(self, made: Prediction, row: int, member: Member, forecast: Forecast) -> None:
        self.figures: Floats = made.board.figures[:, row].copy()
        self.forecast = forecast
        self.law = made.board.law(row)
        self.member = member
        self.model = made.model
        self.ttft_s, self.tpot_s = made.ttft_s, made.tpot_s
        self.turn = made.turn
