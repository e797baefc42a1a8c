"""How much slower or faster one machine is than the law of its kind.

Owns one factor.  It follows slowly while the machine is steady and jumps when a run of records agrees that it changed:
a throttled accelerator, other weights, a noisy neighbour.
"""

import math
from collections import deque

GAIN = 0.06
# So many records that all agree in the middle make a jump.
RUN = 7
# A shift of the run's median, as a logarithm: 1.28 times as slow, or as fast.
JUMP = 0.25
MAX_LOG = math.log(50.0)
MAX_S = 86_400.0


class Scale:
    """factor: seconds here over seconds by the law, 1.0 before anything was seen."""

    __slots__ = ("_log", "_recent", "factor")

    def __init__(self) -> None:
        self._log = 0.0
        self._recent: deque[float] = deque(maxlen=RUN)
        self.factor = 1.0

    def learn(self, seconds: float, by_law_s: float) -> None:
        """Take in one record; by_law_s: what the law says without this factor, above 0."""
        if not (0.0 < seconds < MAX_S and 0.0 < by_law_s < MAX_S):
            return
        off = math.log(max(seconds / by_law_s, 1e-9)) - self._log
        self._recent.append(off)
        if len(self._recent) == RUN:
            middle = sorted(self._recent)[RUN // 2]
            if abs(middle) > JUMP:
                self._move(middle)
                self._recent.clear()
                return
        self._move(GAIN * min(max(off, -JUMP), JUMP))

    def _move(self, by: float) -> None:
        self._log = min(max(self._log + by, -MAX_LOG), MAX_LOG)
        self._recent = deque([each - by for each in self._recent], RUN)
        self.factor = math.exp(self._log)
