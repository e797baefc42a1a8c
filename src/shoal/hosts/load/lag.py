"""How late this process's event loop runs.

A generator that runs late measures itself and not the pool.  It does not decide anything: the report says void.
"""

import asyncio
from time import perf_counter
from types import TracebackType

import numpy as np

LAG_LIMIT_S = 0.005
"""A run is void when the loop lag p99 of its generator or of an engine is above this."""

_PERIOD_S = 0.010


class LoopLag:
    """Measures the lag of the running loop between `with` and its end, to the millisecond that uvloop's timers have."""

    __slots__ = ("_due", "_handle", "_loop", "_samples")

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._handle: asyncio.TimerHandle | None = None

    def __enter__(self) -> "LoopLag":
        self._loop = asyncio.get_running_loop()
        self._arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    @property
    def p99_s(self) -> float:
        """The 99th percentile so far in seconds, 0.0 before the first sample."""
        return float(np.quantile(self._samples, 0.99)) if self._samples else 0.0

    def _arm(self) -> None:
        self._due = perf_counter() + _PERIOD_S
        self._handle = self._loop.call_later(_PERIOD_S, self._fire)

    def _fire(self) -> None:
        self._samples.append(max(0.0, perf_counter() - self._due))
        self._arm()
