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
    """The endpoints as flow control sees them.  priorities: all that a request may have."""

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
        "_is_small",
        "_known",
        "_learning",
        "_plan",
    )

    def __init__(self, fleet: Fleet, plan: FlowPlan, priorities: Collection[int]) -> None:
        self._fleet = fleet
        self._take(plan, priorities)
        self._endpoints: object = None
        self._known: Loads | None = None
        self._had_foreign = False
        self._is_small = True
        self._cycle = 0

    def configure(self, plan: FlowPlan, priorities: Collection[int]) -> None:
        """Take another plan; what the detector has learned stays."""
        before = self._plan.detector
        self._take(plan, priorities)
        if self._learning is not None and type(self._learning) is type(before):
            self._learning.adopt(before)

    def _take(self, plan: FlowPlan, priorities: Collection[int]) -> None:
        # Asking a protocol costs more than asking the detector.
        self._plan = plan
        self._learning = plan.detector if isinstance(plan.detector, Learning) else None
        self._few = plan.detector if isinstance(plan.detector, FewDetector) else None
        self._few_draining = plan.detector if isinstance(plan.detector, FewDraining) else None
        self._draining = plan.detector if isinstance(plan.detector, Draining) else None
        self._bands = sorted(priorities, reverse=True)
        self._ceilings: Ceilings | None = None

    def levels(self, now: float) -> Levels:
        """How full each endpoint of the fleet is, by row; plain numbers for a few."""
        loads = self._loads(now)
        if self._few is not None and self._is_small:
            return self._few.saturation_few(loads)
        saturation = self._plan.detector.saturation(loads)
        return saturation.tolist() if len(saturation) <= FEW else saturation

    def open(self, rows: Rows, levels: Levels, ceiling: float, highest: float) -> tuple[Rows, bool]:
        """Those of `rows` that are less full than a band's ceiling, and False.

        If there are none: those that a band may use all the same that is owed its share, and True.
        """
        own = self.below(rows, levels, ceiling)
        if len(own) or ceiling >= highest:
            return own, False
        return self.below(rows, levels, highest), True

    @staticmethod
    def below(rows: Rows, levels: Levels, ceiling: float) -> Rows:
        """Those of `rows` that are less full than a ceiling."""
        if not isinstance(levels, list):
            return rows[levels[rows] < ceiling]
        own = levels if len(rows) == len(levels) else [levels[row] for row in rows.tolist()]
        picked = [place for place, level in enumerate(own) if level < ceiling]
        if len(picked) == len(rows):
            return rows
        # A slice costs a third of an array, and where requests wait seldom more than one endpoint has room.
        at = picked[0] if picked else 0
        return rows[at : at + len(picked)] if len(picked) < 2 else rows[picked]

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

    def ceilings(self, levels: Levels) -> Ceilings:
        """How full an endpoint may be for each priority."""
        known = self._ceilings
        if known is None:
            policy = self._plan.usage_limit
            self._cycle += 1
            found = policy.ceilings(self._bands, mean_of(levels), self._cycle)
            known = Ceilings(dict(zip(self._bands, found, strict=True)), max(found))
            if policy.is_steady:
                self._ceilings = known
        return known

    def is_shut(self, levels: Levels, ceilings: Ceilings) -> bool:
        """Whether there is no room for anybody until an event makes some."""
        if self._draining is not None or self._ceilings is None:
            return False
        return (min(levels) if isinstance(levels, list) else float(levels.min())) >= ceilings.highest

    def opens_at(self, rows: Rows, ceiling: float, now: float) -> float:
        """When an endpoint of `rows` will be below the ceiling though nothing happens, infinite for never."""
        if self._draining is None and self._plan.usage_limit.is_steady:
            return math.inf
        found = math.inf
        if self._draining is not None and len(rows):
            found = self._opens_in_s(self._draining, rows, max(ceiling, 1e-9), now)
        if not self._plan.usage_limit.is_steady and ceiling <= 0.0:
            found = min(found, CYCLE_S)
        return now + max(found, 1e-4)

    def _opens_in_s(self, draining: Draining, rows: Rows, ceiling: float, now: float) -> float:
        loads = self._loads(now)
        if self._few_draining is None or not self._is_small:
            return float(draining.opens_in_s(loads, ceiling)[rows].min())
        waits = self._few_draining.opens_in_s_few(loads, ceiling)
        return min(waits) if len(rows) == len(waits) else min([waits[row] for row in rows.tolist()])

    # ------------------------------------------------------------------ what the detector learns from

    def answered(self, flight: Flight, outcome: Outcome, now: float) -> None:
        """Learn from the record of a request that its chosen endpoint answered."""
        learning = self._learning
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
        if self._learning is not None and signals.waiting is not None and signals.running is not None:
            self._learning.read(endpoint_id, signals.waiting, signals.running, now)

    def left(self, endpoint_id: str) -> None:
        """Forget an endpoint."""
        if self._learning is not None:
            self._learning.left(endpoint_id)


def mean_of(levels: Levels) -> float:
    """How full the pool is; full where there is nothing."""
    return float(np.mean(levels)) if len(levels) else 1.0
