"""How wrong predictions were lately, and whether they may decide.

Owns the window of recent ratios; whoever predicts reports each outcome.
"""

from collections import deque
from typing import NamedTuple

WINDOW = 64
# Trust is judged by the last ones alone, so that it is not lost for long, nor for how it began.
JUDGED = 32
MIN_RECORDS = 24
# Trust ends above the first median error and begins again below the second.
LOST_RATIO = 0.40
GAINED_RATIO = 0.30
HIGH_QUANTILE = 0.9
_EVERY = 8


class Report(NamedTuple):
    """records: outcomes seen.  mape, median_ratio: mean and median of |predicted - measured| / measured in the window.
    coverage_ratio: share that was not above its predicted 0.9 quantile.  All NaN before any record."""

    records: int
    mape: float
    median_ratio: float
    coverage_ratio: float
    is_trusted: bool


class Errors:
    """is_trusted: whether enough was predicted, and well enough.  high_factor: measured over predicted that nine of ten
    stay below."""

    __slots__ = ("_covered", "_ratios", "_records", "high_factor", "is_trusted")

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=WINDOW)
        self._covered: deque[bool] = deque(maxlen=WINDOW)
        self._records = 0
        self.high_factor = 2.0
        self.is_trusted = False

    def note(self, predicted_s: float, measured_s: float) -> None:
        """Take in one outcome; both above 0."""
        if not (predicted_s > 0.0 and measured_s > 0.0):
            return
        self._records += 1
        ratio = measured_s / predicted_s
        self._covered.append(ratio <= self.high_factor)
        self._ratios.append(ratio)
        if self._records % _EVERY == 0:
            self._judge()

    @property
    def is_bad(self) -> bool:
        """Whether it was tried often enough and was wrong too often."""
        return self._records >= MIN_RECORDS and not self.is_trusted

    def _judge(self) -> None:
        ordered = sorted(self._ratios)
        self.high_factor = ordered[min(int(HIGH_QUANTILE * len(ordered)), len(ordered) - 1)]
        latest = sorted(self._each()[-JUDGED:])
        median = latest[len(latest) // 2]
        if self._records >= MIN_RECORDS:
            self.is_trusted = median <= (LOST_RATIO if self.is_trusted else GAINED_RATIO)

    def _each(self) -> list[float]:
        return [abs(1.0 / ratio - 1.0) for ratio in self._ratios]

    def report(self) -> Report:
        """Return the figures now."""
        count = len(self._ratios)
        if not count:
            return Report(0, float("nan"), float("nan"), float("nan"), self.is_trusted)
        return Report(
            self._records,
            sum(self._each()) / count,
            sorted(self._each())[count // 2],
            sum(self._covered) / count,
            self.is_trusted,
        )
