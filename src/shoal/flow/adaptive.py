"""Shoal's own detector: how much an endpoint can absorb is learned from how its answers come.

Owns one limit of requests in flight per endpoint: raised while the time to first token holds, lowered when it does not.
What the time should have been is told by whoever knows the endpoint's speed.
"""

import math
from typing import Annotated, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from shoal.flow.detectors import Floats, Loads

USED_RATIO = 0.75
"""Below this part of its limit an endpoint tells nothing about a higher one."""
CUT_RATIO = 0.85
SLACK_S = 0.05
"""A delay this small is a step of an engine, not a queue."""
FLOOR_ANSWERS = 64
"""The time that even a quick answer takes is the least of the last one to two times so many."""


class Sample(NamedTuple):
    """One answer.  ttft_s: as measured.  prefill_s: the part that the prompts ahead and its own explain.  sent_at:
    when it was dispatched.  inflight: requests on the endpoint when the answer was seen."""

    ttft_s: float
    prefill_s: float
    sent_at: float
    inflight: float


@runtime_checkable
class Draining(Protocol):
    """A detector whose figure falls by itself as time passes."""

    def opens_in_s(self, loads: Loads, ceiling: float) -> Floats:
        """Return after how many seconds each endpoint is below `ceiling`, infinite where only an event helps."""
        ...


@runtime_checkable
class Learning(Protocol):
    """A detector that learns."""

    def answered(self, endpoint_id: str, sample: Sample, now: float) -> None:
        """Learn from one answer."""
        ...

    def read(self, endpoint_id: str, waiting: float, running: float, now: float) -> None:
        """Learn from a reading of the engine's queue."""
        ...

    def left(self, endpoint_id: str) -> None:
        """Forget an endpoint that is gone."""
        ...

    def adopt(self, previous: object) -> None:
        """Take over what another instance has learned."""
        ...


class _Limit:
    """One endpoint.  is_growing: nothing has ever been too much yet."""

    __slots__ = ("_answers", "_before_s", "_least_s", "cut_at", "is_growing", "requests")

    def __init__(self, requests: float) -> None:
        self.requests = requests
        self.is_growing = True
        self.cut_at = float("-inf")
        self._answers = 0
        self._least_s = self._before_s = math.inf

    def floor_s(self, beyond_s: float) -> float:
        """Take in what one answer took beyond its prefill; return what that takes at the least."""
        self._least_s = min(self._least_s, max(0.0, beyond_s))
        self._answers += 1
        floor_s = min(self._least_s, self._before_s)
        if self._answers >= FLOOR_ANSWERS:
            self._before_s, self._least_s, self._answers = self._least_s, math.inf, 0
        return floor_s


class AdaptiveDetector:
    """Fills engines as far as they answer in time: the default.

    Each endpoint has a limit of requests in flight.  While it is used and the time to first token stays below
    ttftStretch times what prefill alone explains, the limit rises: fast until it was too much once, then by a few
    requests each time as many have been answered.  When the time does not hold, or requests wait in the engine, it
    falls to 85 %.  Beside it, the prompts in flight to an endpoint may take maxPrefillSeconds to prefill: what is sent
    beyond waits in the engine, where priorities mean nothing.  The fuller of both counts.
    """

    type: ClassVar[str] = "adaptive-detector"

    def __init__(
        self,
        *,
        initial_requests: Annotated[int, "limit of an endpoint that is not known yet"] = 32,
        min_requests: Annotated[int, "lowest limit"] = 2,
        max_requests: Annotated[int, "highest limit"] = 1024,
        ttft_stretch: Annotated[float, "how much longer than prefill alone the first token may take, above 1"] = 2.0,
        max_prefill_seconds: Annotated[float, "prefill work in flight to one full endpoint, in seconds"] = 0.25,
    ) -> None:
        if not 1 <= min_requests <= initial_requests <= max_requests:
            raise ValueError("minRequests, initialRequests and maxRequests must be at least 1 and rise in this order")
        if ttft_stretch <= 1:
            raise ValueError(f"ttftStretch must be above 1, got {ttft_stretch:g}")
        if max_prefill_seconds <= 0:
            raise ValueError(f"maxPrefillSeconds must be above 0, got {max_prefill_seconds:g}")
        self._initial = float(initial_requests)
        self._min, self._max = float(min_requests), float(max_requests)
        self._stretch = ttft_stretch
        self._prefill_s = max_prefill_seconds
        self._limits: dict[str, _Limit] = {}
        self._ids: object = None
        self._places: dict[str, int] = {}
        self._column: Floats = np.zeros(0)

    def saturation(self, loads: Loads) -> Floats:
        """Return the fuller of requests and prefill work."""
        if loads.ids is not self._ids:
            self._ids = loads.ids
            self._places = {name: place for place, name in enumerate(loads.ids)}
            self._column = np.array([self._limit(name).requests for name in loads.ids], np.float64)
        return np.maximum(loads.inflight_requests / self._column, loads.prefill_s / self._prefill_s)

    def opens_in_s(self, loads: Loads, ceiling: float) -> Floats:
        """Return after how long each endpoint is below `ceiling` again if nothing happens, infinite where it is not."""
        full = loads.inflight_requests / self._column >= ceiling
        return np.where(full, np.inf, np.maximum(0.0, loads.prefill_s - ceiling * self._prefill_s))

    def limit(self, endpoint_id: str) -> float:
        """Requests that an endpoint may hold now."""
        return self._limit(endpoint_id).requests

    def answered(self, endpoint_id: str, sample: Sample, now: float) -> None:
        """Raise or lower the limit by one answer."""
        limit = self._limit(endpoint_id)
        expected_s = sample.prefill_s + limit.floor_s(sample.ttft_s - sample.prefill_s)
        if sample.ttft_s > self._stretch * expected_s + SLACK_S:
            # What was sent before the last cut tells of the time before it.
            if sample.sent_at >= limit.cut_at:
                self._cut(endpoint_id, limit, sample.inflight, now)
        elif sample.inflight >= USED_RATIO * limit.requests:
            self._raise(endpoint_id, limit)

    def read(self, endpoint_id: str, waiting: float, running: float, now: float) -> None:
        """Lower the limit when requests wait in the engine though its prefill is not what they wait for."""
        limit = self._limit(endpoint_id)
        if waiting > max(2.0, 0.1 * running) and now - limit.cut_at > 1.0 and running + waiting >= limit.requests:
            self._cut(endpoint_id, limit, running + waiting, now)

    def left(self, endpoint_id: str) -> None:
        """Forget an endpoint."""
        self._limits.pop(endpoint_id, None)

    def adopt(self, previous: object) -> None:
        """Take over the limits of another one."""
        if isinstance(previous, AdaptiveDetector):
            self._limits = previous._limits
            for limit in self._limits.values():
                limit.requests = min(max(limit.requests, self._min), self._max)
            self._ids = None

    def _limit(self, endpoint_id: str) -> _Limit:
        limit = self._limits.get(endpoint_id)
        if limit is None:
            limit = self._limits[endpoint_id] = _Limit(self._initial)
        return limit

    def _raise(self, endpoint_id: str, limit: _Limit) -> None:
        step = 1.0 if limit.is_growing else 4.0 / limit.requests
        self._set(endpoint_id, limit, min(self._max, limit.requests + step))

    def _cut(self, endpoint_id: str, limit: _Limit, inflight: float, now: float) -> None:
        limit.is_growing = False
        limit.cut_at = now
        held = min(limit.requests, max(inflight, 0.5 * limit.requests))
        self._set(endpoint_id, limit, max(self._min, CUT_RATIO * held))

    def _set(self, endpoint_id: str, limit: _Limit, requests: float) -> None:
        limit.requests = requests
        place = self._places.get(endpoint_id)
        if place is not None:
            self._column[place] = requests
