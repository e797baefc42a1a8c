"""Shoal's own detector: how much an endpoint can absorb is learned from how its answers come.

Owns one limit of requests in flight per endpoint: raised while the time to first token holds, lowered when it does not.
What the time should have been is told by whoever knows the endpoint's speed.
"""

import math
from typing import Annotated, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from shoal.flow.detectors import Floats, Loads

USED_RATIO = 0.5
"""Below this part of its limit an endpoint tells nothing about a higher one."""
CUT_RATIO = 0.85
PREFILL_STEP = 1.03
LEAST_PREFILL, MOST_PREFILL = 0.25, 20.0
"""Bounds of the prefill work in flight, in waits: the books may be wrong by as much, not more."""
FLOOR_ANSWERS = 64
"""The time that even a quick answer takes is the least of the last one to two times so many."""


class Sample(NamedTuple):
    """One answer.  ttft_s: as measured, None where it did not stream.  own_s: what its own prefill takes.  ahead_s:
    prefill that was thought to be ahead of it when it was sent.  sent_at: when that was.  inflight: requests on the
    endpoint when it was answered."""

    ttft_s: float | None
    own_s: float
    ahead_s: float
    sent_at: float
    inflight: float


@runtime_checkable
class Draining(Protocol):
    """A detector whose figure falls by itself as time passes."""

    def opens_in_s(self, loads: Loads, ceiling: float) -> Floats:
        """Return after how many seconds each endpoint is below `ceiling`, infinite where only an event helps."""
        ...


@runtime_checkable
class FewDraining(Draining, Protocol):
    """A detector that can tell it of a few endpoints without arrays."""

    def opens_in_s_few(self, loads: Loads, ceiling: float) -> list[float]:
        """Return what `opens_in_s` would."""
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
    """One endpoint.  requests, prefill_s: what it may hold.  is_growing: nothing has ever been too much yet.
    clear_at: when its engine said that nothing waits there, if that is the last that it said."""

    __slots__ = (
        "_answers",
        "_before_s",
        "_least_s",
        "clear_at",
        "cut_at",
        "is_growing",
        "prefill_cut_at",
        "prefill_s",
        "requests",
    )

    def __init__(self, requests: float, prefill_s: float) -> None:
        self.requests = requests
        self.prefill_s = prefill_s
        self.is_growing = True
        self.cut_at = self.prefill_cut_at = self.clear_at = float("-inf")
        self._answers = 0
        self._least_s = self._before_s = math.inf

    def waited_s(self, beyond_s: float) -> float:
        """Return how much longer than it takes at the least an answer took beyond its own prefill."""
        self._least_s = min(self._least_s, max(0.0, beyond_s))
        self._answers += 1
        floor_s = min(self._least_s, self._before_s)
        if self._answers >= FLOOR_ANSWERS:
            self._before_s, self._least_s, self._answers = self._least_s, math.inf, 0
        return max(0.0, beyond_s - floor_s)


class AdaptiveDetector:
    """Fills engines as far as they answer in time: the default.

    What a request waits in an engine, for the prompts of others or for a place, is wait that no priority can shorten;
    an engine in which nothing waits runs dry.  So each endpoint has two limits that move until requests wait there for
    about engineWaitSeconds: the prefill work that is in flight to it, by the picker's books, and the requests in
    flight.  They rise while they are used and answers come in time, and fall when they do not; the limit of requests
    falls only when requests wait three times as long, or stand in the engine's own queue.  An answer that did not
    stream raises that limit if nothing stood there while it was made.  What is in flight has to fit the KV cache as
    well.  The fullest of the three counts.
    """

    type: ClassVar[str] = "adaptive-detector"

    def __init__(
        self,
        *,
        initial_requests: Annotated[int, "limit of an endpoint that is not known yet"] = 32,
        min_requests: Annotated[int, "lowest limit"] = 2,
        max_requests: Annotated[int, "highest limit"] = 1024,
        engine_wait_seconds: Annotated[float, "what a request may wait in an engine for others, in seconds"] = 0.1,
    ) -> None:
        if not 1 <= min_requests <= initial_requests <= max_requests:
            raise ValueError("minRequests, initialRequests and maxRequests must be at least 1 and rise in this order")
        if engine_wait_seconds <= 0:
            raise ValueError(f"engineWaitSeconds must be above 0, got {engine_wait_seconds:g}")
        self._initial = float(initial_requests)
        self._min, self._max = float(min_requests), float(max_requests)
        self._wait_s = engine_wait_seconds
        self._limits: dict[str, _Limit] = {}
        self._ids: object = None
        self._places: dict[str, int] = {}
        self._requests: Floats = np.zeros(0)
        self._prefill_s: Floats = np.zeros(0)

    def saturation(self, loads: Loads) -> Floats:
        """Return the fuller of requests and prefill work."""
        self._follow(loads)
        # Work that is done already counts as less than none: the other figure is the larger one.
        return np.maximum(self._held(loads), (loads.clear_at - loads.now) / self._prefill_s)

    def saturation_few(self, loads: Loads) -> list[float]:
        """Return the same as plain numbers."""
        now = loads.now
        return [
            # A capacity that is not known is NaN, and then neither is larger.
            max(requests / most, (uncached + output) / capacity, (clear_at - now) / prefill_s)
            for requests, uncached, output, capacity, clear_at, most, prefill_s in self._each(loads)
        ]

    def saturation_at(self, loads: Loads, row: int) -> float:
        """Return that of one endpoint."""
        self._follow(loads)
        tokens = loads.inflight_tokens.item(row) + loads.output_tokens.item(row)
        return max(
            loads.inflight_requests.item(row) / self._requests.item(row),
            tokens / loads.kv_capacity_tokens.item(row),
            (loads.clear_at.item(row) - loads.now) / self._prefill_s.item(row),
        )

    def _each(self, loads: Loads) -> "zip[tuple[float, ...]]":
        """The figures of each endpoint: requests, uncached and output tokens, capacity, when clear, and both limits."""
        self._follow(loads)
        return zip(
            loads.inflight_requests.tolist(),
            loads.inflight_tokens.tolist(),
            loads.output_tokens.tolist(),
            loads.kv_capacity_tokens.tolist(),
            loads.clear_at.tolist(),
            self._requests.tolist(),
            self._prefill_s.tolist(),
            strict=True,
        )

    def _follow(self, loads: Loads) -> None:
        """Bring the columns into the order of the fleet."""
        if loads.ids is not self._ids:
            self._ids = loads.ids
            self._places = {name: place for place, name in enumerate(loads.ids)}
            limits = [self._limit(name) for name in loads.ids]
            self._requests = np.array([limit.requests for limit in limits], np.float64)
            self._prefill_s = np.array([limit.prefill_s for limit in limits], np.float64)

    def _held(self, loads: Loads) -> Floats:
        """What does not drain as time passes: requests over the limit, or their tokens over what the KV cache holds."""
        tokens = loads.inflight_tokens + loads.output_tokens
        held: Floats = np.fmax(loads.inflight_requests / self._requests, tokens / loads.kv_capacity_tokens)
        return held

    def opens_in_s(self, loads: Loads, ceiling: float) -> Floats:
        """Return after how long each endpoint is below `ceiling` again if nothing happens, infinite where it is not."""
        self._follow(loads)
        full = self._held(loads) >= ceiling
        return np.where(full, np.inf, np.maximum(0.0, loads.clear_at - loads.now - ceiling * self._prefill_s))

    def opens_in_s_few(self, loads: Loads, ceiling: float) -> list[float]:
        """Return the same as plain numbers."""
        now = loads.now
        return [
            math.inf
            if max(requests / most, (uncached + output) / capacity) >= ceiling
            else max(0.0, clear_at - now - ceiling * prefill_s)
            for requests, uncached, output, capacity, clear_at, most, prefill_s in self._each(loads)
        ]

    def limit(self, endpoint_id: str) -> float:
        """Requests that an endpoint may hold now."""
        return self._limit(endpoint_id).requests

    def prefill_limit_s(self, endpoint_id: str) -> float:
        """Prefill work that may be in flight to an endpoint now, in seconds by the books."""
        return self._limit(endpoint_id).prefill_s

    def answered(self, endpoint_id: str, sample: Sample, now: float) -> None:
        """Move the limits by one answer."""
        limit = self._limit(endpoint_id)
        if sample.ttft_s is None:
            # How long it waited is not known; but what was under way when nothing waited found its place.  So each
            # reading lets the limit rise by as many as ran then, and metrics that stop let it rise no more.
            if limit.cut_at <= sample.sent_at <= limit.clear_at and sample.inflight >= USED_RATIO * limit.requests:
                self._raise(limit)
                self._show(endpoint_id, limit)
            return
        waited_s = limit.waited_s(sample.ttft_s - sample.own_s)
        if waited_s <= self._wait_s:
            if sample.inflight >= USED_RATIO * limit.requests:
                self._raise(limit)
            if sample.ahead_s >= 0.25 * limit.prefill_s:
                limit.prefill_s = min(limit.prefill_s * PREFILL_STEP, MOST_PREFILL * self._wait_s)
        else:
            # What was sent before the last cut tells of the time before it.
            if sample.sent_at >= limit.prefill_cut_at:
                limit.prefill_cut_at = now
                limit.prefill_s = max(limit.prefill_s * CUT_RATIO, LEAST_PREFILL * self._wait_s)
            if waited_s > 3.0 * self._wait_s and sample.sent_at >= limit.cut_at:
                self._cut(limit, sample.inflight, now)
        self._show(endpoint_id, limit)

    def read(self, endpoint_id: str, waiting: float, running: float, now: float) -> None:
        """Lower the limit when requests wait in the engine though its prefill is not what they wait for."""
        limit = self._limit(endpoint_id)
        limit.clear_at = now if waiting < 1.0 else float("-inf")
        if waiting > max(2.0, 0.1 * running) and now - limit.cut_at > 1.0 and running + waiting >= limit.requests:
            self._cut(limit, running + waiting, now)
            self._show(endpoint_id, limit)

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
            limit = self._limits[endpoint_id] = _Limit(self._initial, self._wait_s)
        return limit

    def _raise(self, limit: _Limit) -> None:
        step = 1.0 if limit.is_growing else max(0.25, 4.0 / limit.requests)
        limit.requests = min(self._max, limit.requests + step)

    def _cut(self, limit: _Limit, inflight: float, now: float) -> None:
        limit.is_growing = False
        limit.cut_at = now
        held = min(limit.requests, max(inflight, 0.5 * limit.requests))
        limit.requests = max(self._min, CUT_RATIO * held)

    def _show(self, endpoint_id: str, limit: _Limit) -> None:
        """Bring the columns up to date."""
        place = self._places.get(endpoint_id)
        if place is not None and place < len(self._requests):
            self._requests[place] = limit.requests
            self._prefill_s[place] = limit.prefill_s
