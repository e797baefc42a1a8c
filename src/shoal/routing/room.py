"""Where there is room now: the saturation of each endpoint against the ceiling of a band.

Owns the way from the fleet's columns to the figures of a detector; what is full is the detector's say, how full it may
be for whom the usage limit's.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from shoal.flow import Loads
from shoal.flow.adaptive import Draining, Learning, Sample
from shoal.flow.ceilings import StaticUsageLimit
from shoal.pool import Outcome, Signals
from shoal.routing.books import Books, Flight
from shoal.routing.fleet import Fleet, Floats
from shoal.routing.flowplan import FlowPlan

Rows = npt.NDArray[np.intp]
CYCLE_S = 0.01
"""A usage limit that lets some cycles pass and others not is asked again after this time."""


class Room:
    """The endpoints as flow control sees them."""

    __slots__ = ("_books", "_cycle", "_endpoints", "_fleet", "_ids", "_plan")

    def __init__(self, fleet: Fleet, books: Books, plan: FlowPlan) -> None:
        self._fleet = fleet
        self._books = books
        self._plan = plan
        self._endpoints: object = None
        self._ids: tuple[str, ...] = ()
        self._cycle = 0

    def configure(self, plan: FlowPlan) -> None:
        """Take another plan; what the detector has learned stays."""
        detector, before = plan.detector, self._plan.detector
        self._plan = plan
        if isinstance(detector, Learning) and type(detector) is type(before):
            detector.adopt(before)

    def saturation(self, now: float) -> Floats:
        """How full each endpoint of the fleet is, by row."""
        return self._plan.detector.saturation(self._loads(now))

    def _loads(self, now: float) -> Loads:
        fleet = self._fleet
        columns = fleet.columns
        if self._endpoints is not fleet.endpoints:
            self._endpoints = fleet.endpoints
            self._ids = tuple(endpoint.id for endpoint in fleet.endpoints)
        inflight = columns["inflight_requests"]
        if fleet.has_foreign:
            inflight = inflight + columns["foreign_requests"]
        return Loads(
            self._ids,
            inflight,
            columns["booked_uncached_tokens"],
            np.maximum(columns["clear_at"] - now, 0.0),
            columns["waiting"],
            columns["running"],
            columns["kv_usage"],
            now - columns["signals_at"],
        )

    def ceilings(self, priorities: Iterable[int], saturation: Floats) -> Mapping[int, float]:
        """How full an endpoint may be for each of the priorities."""
        bands = sorted(priorities, reverse=True)
        mean = float(saturation.mean()) if len(saturation) else 1.0
        self._cycle += 1
        return dict(zip(bands, self._plan.usage_limit.ceilings(bands, mean, self._cycle), strict=True))

    def opens_at(self, rows: Rows, ceiling: float, now: float) -> float:
        """When an endpoint of `rows` will be below the ceiling though nothing happens, infinite for never."""
        detector = self._plan.detector
        found = np.inf
        if isinstance(detector, Draining) and len(rows):
            found = float(detector.opens_in_s(self._loads(now), max(ceiling, 1e-9))[rows].min())
        if not isinstance(self._plan.usage_limit, StaticUsageLimit) and ceiling <= 0.0:
            found = min(found, CYCLE_S)
        return now + max(found, 1e-4)

    # ------------------------------------------------------------------ what the detector learns from

    def answered(self, flight: Flight, outcome: Outcome, now: float) -> None:
        """Learn from the record of a request that its chosen endpoint streamed."""
        detector = self._plan.detector
        member = self._fleet.get(flight.decision.chosen[0])
        ttft_s = outcome.ttft_s if outcome.engine_ttft_s is None else outcome.engine_ttft_s
        if not isinstance(detector, Learning) or member is None or ttft_s is None or outcome.status != 200:
            return
        if not flight.request.is_streaming or outcome.served_address != member.endpoint.address:
            return
        inflight = self._fleet.cells["inflight_requests"][member.row]
        # Its own booking may be released already: it was one of those that the endpoint held.
        inflight += flight.member is None
        prefill_s = flight.work_tokens * member.pace.s_per_token
        detector.answered(member.endpoint.id, Sample(ttft_s, prefill_s, flight.dispatched_at, inflight), now)

    def read(self, endpoint_id: str, signals: Signals, now: float) -> None:
        """Learn from a reading of an engine's metrics."""
        detector = self._plan.detector
        if isinstance(detector, Learning) and signals.waiting is not None and signals.running is not None:
            detector.read(endpoint_id, signals.waiting, signals.running, now)

    def left(self, endpoint_id: str) -> None:
        """Forget an endpoint."""
        if isinstance(self._plan.detector, Learning):
            self._plan.detector.left(endpoint_id)
