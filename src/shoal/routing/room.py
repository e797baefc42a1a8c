"""Where there is room now: the saturation of each endpoint against the ceiling of a band.

Owns the way from the fleet's columns to the figures of a detector; what is full is the detector's say, how full it may
be for whom the usage limit's.
"""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.flow import FewDetector, Loads
from shoal.flow.adaptive import Draining, FewDraining, Learning, Sample
from shoal.pool import Outcome, Signals
from shoal.routing.books import Flight
from shoal.routing.fleet import Fleet, Floats
from shoal.routing.flowplan import FlowPlan
from shoal.scheduling.plugin import FEW

Rows = npt.NDArray[np.intp]
Levels = list[float] | Floats
CYCLE_S = 0.01
"""A usage limit that lets some cycles pass and others not is asked again after this time."""


class Ceilings(NamedTuple):
    """How full an endpoint may be.  of: each priority; highest: of them all."""

    of: Mapping[int, float]
    highest: float


class Room:
    """The endpoints as flow control sees them when it looks.  priorities: all that a request may have.

    learning: the detector, if it is one that learns.
    """

    __slots__ = (
        "_bands",
        "_ceilings",
        "_cycle",
        "_draining",
        "_endpoints",
        "_few",
        "_few_draining",
        "_fleet",
        "_had_foreign",
        "_is_plain",
        "_is_small",
        "_is_steady",
        "_known",
        "_levels",
        "_plan",
        "learning",
    )

    def __init__(self, fleet: Fleet, plan: FlowPlan, priorities: Collection[int]) -> None:
        self._fleet = fleet
        self._take(plan, priorities)
        self._endpoints: object = None
        self._known: Loads | None = None
        self._had_foreign = False
        self._is_plain = False
        self._is_small = True
        self._cycle = 0
        self._levels: Levels = []

    def configure(self, plan: FlowPlan, priorities: Collection[int]) -> None:
        """Take another plan; what the detector has learned stays."""
        before = self._plan.detector
        self._take(plan, priorities)
        if self.learning is not None and type(self.learning) is type(before):
            self.learning.adopt(before)

    def _take(self, plan: FlowPlan, priorities: Collection[int]) -> None:
        # Asking a protocol costs more than asking the detector.
        self._plan = plan
        self.learning = plan.detector if isinstance(plan.detector, Learning) else None
        self._few = plan.detector if isinstance(plan.detector, FewDetector) else None
        self._few_draining = plan.detector if isinstance(plan.detector, FewDraining) else None
        self._draining = plan.detector if isinstance(plan.detector, Draining) else None
        self._bands = sorted(priorities, reverse=True)
        self._is_steady = plan.usage_limit.is_steady
        self._ceilings = _NO_ROOM

    def look(self, now: float) -> None:
        """See how full each endpoint is now, and how full it may be for whom."""
        loads = self._loads(now)
        if self._few is not None and self._is_small:
            self._levels = self._few.saturation_few(loads)
            self._is_plain = self._is_steady and not self._had_foreign
        else:
            saturation = self._plan.detector.saturation(loads)
            self._levels = saturation.tolist() if len(saturation) <= FEW else saturation
            self._is_plain = False
        if self._ceilings is _NO_ROOM or not self._is_steady:
            self._cycle += 1
            found = self._plan.usage_limit.ceilings(self._bands, _mean_of(self._levels), self._cycle)
            self._ceilings = Ceilings(dict(zip(self._bands, found, strict=True)), max(found))

    def given(self, row: int, now: float) -> bool:
        """See an endpoint again that was given a request since.

        Returns whether there is no room for anybody until an event makes some.
        """
        if self._is_plain and self._few is not None and self._known is not None:
            self._levels[row] = self._few.saturation_at(self._known, row)
        else:
            self.look(now)
        if self._draining is not None or not self._is_steady:
            return False
        levels = self._levels
        return (min(levels) if isinstance(levels, list) else float(levels.min())) >= self._ceilings.highest

    def saturation(self, now: float) -> float:
        """How full the pool is, mean over the endpoints."""
        return _mean_of(self._plan.detector.saturation(self._loads(now)))

    def open(self, rows: Rows, priority: int) -> tuple[Rows, bool]:
        """Those of `rows` that are less full than a band's ceiling, and False.

        If there are none: those that a band may use all the same that is owed its share, and True.
        """
        of, highest = self._ceilings
        own = self._below(rows, of[priority])
        if len(own) or of[priority] >= highest:
            return own, False
        return self._below(rows, highest), True

    def _below(self, rows: Rows, ceiling: float) -> Rows:
        levels = self._levels
        if not isinstance(levels, list):
            return rows[levels[rows] < ceiling]
        count = len(rows)
        own = levels if count == len(levels) else [levels[row] for row in rows.tolist()]
        found = at = 0
        for place, level in enumerate(own):
            if level < ceiling:
                found += 1
                at = place
        if found == count:
            return rows
        # A slice costs a third of an array, and where requests wait seldom more than one endpoint has room.
        return rows[at : at + found] if found < 2 else rows[np.array(own) < ceiling]

    def opens_at(self, rows: Rows, priority: int, now: float) -> float:
        """When an endpoint of `rows` will be below a band's ceiling though nothing happens, infinite for never."""
        if self._draining is None and self._is_steady:
            return math.inf
        found, ceiling = math.inf, self._ceilings.of[priority]
        if self._draining is not None and len(rows):
            found = self._opens_in_s(self._draining, rows, max(ceiling, 1e-9), now)
        if not self._is_steady and ceiling <= 0.0:
            found = min(found, CYCLE_S)
        return now + max(found, 1e-4)

    def _opens_in_s(self, draining: Draining, rows: Rows, ceiling: float, now: float) -> float:
        loads = self._loads(now)
        if self._few_draining is None or not self._is_small:
            return float(draining.opens_in_s(loads, ceiling)[rows].min())
        waits = self._few_draining.opens_in_s_few(loads, ceiling)
        return min(waits) if len(rows) == len(waits) else min([waits[row] for row in rows.tolist()])

    def _loads(self, now: float) -> Loads:
        fleet = self._fleet
        loads = self._known
        if loads is None or self._endpoints is not fleet.endpoints:
            self._endpoints = fleet.endpoints
            self._is_small = len(fleet) <= FEW
            columns = fleet.columns
            loads = self._known = Loads(
                tuple(endpoint.id for endpoint in fleet.endpoints),
                now,
                columns["inflight_requests"],
                columns["booked_uncached_tokens"],
                columns["inflight_output_tokens"],
                columns["kv_capacity_tokens"],
                columns["clear_at"],
                columns["waiting"],
                columns["running"],
                columns["kv_usage"],
                columns["signals_at"],
            )
        loads.now = now
        if fleet.has_foreign or self._had_foreign:
            self._had_foreign = fleet.has_foreign
            own = fleet.columns["inflight_requests"]
            loads.inflight_requests = own + fleet.columns["foreign_requests"] if fleet.has_foreign else own
        return loads

    # ------------------------------------------------------------------ what the detector learns from

    def answered(self, flight: Flight, outcome: Outcome, now: float) -> None:
        """Learn from the record of a request that its chosen endpoint answered."""
        learning = self.learning
        if learning is None:
            return
        member = self._fleet.get(flight.decision.chosen[0])
        if member is None or outcome.status != 200 or outcome.served_address != member.endpoint.address:
            return
        # The first byte of a plain answer comes with its last.
        ttft_s = flight.engine_ttft_s(outcome) if flight.request.is_streaming else None
        if ttft_s is None and (flight.request.is_streaming or outcome.is_cut or outcome.is_client_gone):
            return
        inflight = self._fleet.cells["inflight_requests"][member.row]
        # Its own booking may be released already: it was one of those that the endpoint held.
        inflight += flight.member is None
        s_per_token = member.pace.s_per_token
        own_s = flight.uncached_tokens * s_per_token
        ahead_s = flight.work_tokens * s_per_token - own_s
        sample = Sample(ttft_s, own_s, ahead_s, flight.dispatched_at, inflight)
        learning.answered(member.endpoint.id, sample, now)

    def read(self, endpoint_id: str, signals: Signals, now: float) -> None:
        """Learn from a reading of an engine's metrics."""
        if self.learning is not None and signals.waiting is not None and signals.running is not None:
            self.learning.read(endpoint_id, signals.waiting, signals.running, now)

    def left(self, endpoint_id: str) -> None:
        """Forget an endpoint."""
        if self.learning is not None:
            self.learning.left(endpoint_id)


def _mean_of(levels: Levels) -> float:
    """How full the pool is; full where there is nothing."""
    return float(np.mean(levels)) if len(levels) else 1.0


_NO_ROOM = Ceilings({}, 0.0)
