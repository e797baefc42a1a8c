"""When sessions begin: processes of arrivals.

Owns the processes; what the sessions are is `workloads'`.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np

from shoal.simulation.sessions import Session


class Arrivals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When sessions begin.

    closed: as soon as one of `concurrency` clients is free.  The others have `rate_per_s` on average.  constant:
    evenly.  poisson: independently of each other.  gamma: with gaps of coefficient of variation `cv` (1 is poisson,
    more is clumped, less is even).  bursty: poisson at `peak` times the mean rate for a share `burst_share` of the
    time, in bursts of `burst_s` on average, and at a lower rate between them.  diurnal: poisson with a rate that swings
    by `swing` of itself over `period_s`.
    """

    kind: Literal["closed", "constant", "poisson", "gamma", "bursty", "diurnal"] = "closed"
    rate_per_s: Annotated[float, msgspec.Meta(ge=1e-6, le=1e9)] = 1.0
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 32
    cv: Annotated[float, msgspec.Meta(ge=1e-3, le=100)] = 3.0
    peak: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 4.0
    burst_s: Annotated[float, msgspec.Meta(ge=1e-3, le=1e7)] = 10.0
    burst_share: Annotated[float, msgspec.Meta(ge=1e-6, lt=1)] = 0.2
    swing: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    period_s: Annotated[float, msgspec.Meta(ge=1e-3, le=1e9)] = 600.0

    def __post_init__(self) -> None:
        if self.kind == "bursty" and self.peak * self.burst_share > 1.0:
            raise ValueError(
                f"peak x burst_share must be at most 1, got {self.peak:g} x {self.burst_share:g}: "
                "bursts alone would be more than the mean rate"
            )

    def spread(self, sessions: Sequence[Session], rng: np.random.Generator) -> list[Session]:
        """Return the sessions with their times; those that have one keep it."""
        if self.kind == "closed":
            return list(sessions)
        times = self.times(rng)
        return [
            session if session.arrives_s is not None else session._replace(arrives_s=next(times))
            for session in sessions
        ]

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield times of arrival without end, ascending from above 0.  Not for `closed`."""
        match self.kind:
            case "bursty":
                yield from self._bursts(rng)
            case "diurnal":
                yield from self._days(rng)
            case _:
                now = 0.0
                while True:
                    now += self._gap(rng)
                    yield now

    def _gap(self, rng: np.random.Generator) -> float:
        if self.kind == "constant":
            return 1.0 / self.rate_per_s
        shape = 1.0 / self.cv**2 if self.kind == "gamma" else 1.0
        return float(rng.gamma(shape, 1.0 / (shape * self.rate_per_s)))

    def _bursts(self, rng: np.random.Generator) -> Iterator[float]:
        """A Poisson process of two rates; how long each lasts is exponential."""
        between_s = self.burst_s * (1.0 - self.burst_share) / self.burst_share
        low = self.rate_per_s * (1.0 - self.peak * self.burst_share) / (1.0 - self.burst_share)
        now, is_burst = 0.0, bool(rng.random() < self.burst_share)
        while True:
            end = now + float(rng.exponential(self.burst_s if is_burst else between_s))
            rate = self.rate_per_s * self.peak if is_burst else low
            while rate > 0:
                now += float(rng.exponential(1.0 / rate))
                if now >= end:
                    break
                yield now
            now, is_burst = end, not is_burst

    def _days(self, rng: np.random.Generator) -> Iterator[float]:
        """Thinning of a Poisson process at the highest rate (Lewis and Shedler 1979)."""
        most, now = self.rate_per_s * (1.0 + self.swing), 0.0
        while True:
            now += float(rng.exponential(1.0 / most))
            rate = self.rate_per_s * (1.0 + self.swing * float(np.sin(2 * np.pi * now / self.period_s)))
            if rng.random() * most < rate:
                yield now
