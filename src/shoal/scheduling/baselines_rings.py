"""Policies of other routers that place requests on a ring of hashes.

Owns the ring, KubeAI's bounded loads on it and production-stack's sessions.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

import numpy as np
from xxhash import xxh64_intdigest

from shoal.pool import Decision, Endpoint, FleetView, Request
from shoal.scheduling.columns import PerFleet, favour, known, worst_high
from shoal.scheduling.plugin import Scores


def place_of(text: str) -> int:
    """Return the place of `text` on a ring, 0 to 2 ** 64 - 1."""
    return xxh64_intdigest(text.encode())


class HashRing:
    """Points of each endpoint on a circle of 64-bit hashes; few keys move when an endpoint joins or leaves."""

    __slots__ = ("_count", "_places", "_rows")

    def __init__(self, fleet: Sequence[Endpoint], points: int) -> None:
        made = [
            (place_of(f"{endpoint.id}{point}"), row) for row, endpoint in enumerate(fleet) for point in range(points)
        ]
        made.sort()
        self._count = len(fleet)
        self._places = [place for place, _ in made]
        self._rows = [row for _, row in made]

    def walk(self, key: int) -> Iterator[int]:
        """Yield each row once, in the order in which the ring comes to it from the key's place on."""
        rows, seen = self._rows, set[int]()
        start = bisect_left(self._places, key) - len(rows)
        for at in range(start, start + len(rows)):
            row = rows[at]
            if row not in seen:
                seen.add(row)
                yield row
                if len(seen) == self._count:
                    return


def positions(view: FleetView) -> dict[int, int]:
    """Return the position of each candidate by its row in the fleet."""
    rows = range(len(view)) if view.rows is None else view.rows.tolist()
    return {row: position for position, row in enumerate(rows)}


class KubeaiBoundedHashScorer:
    """Chooses as the strategy PrefixHash of KubeAI (July 2025): consistent hashing with bounded loads.

    The key is the model and the first block of the prompt.  From its place on the ring the first endpoint is taken for
    which requests + 1 <= (total + 1) / endpoints * meanLoadPercentage / 100, requests being those in flight there and
    total those in flight anywhere; with total 0, or where none is, the first one.  Not as there: the block is the
    prompt's first 256 bytes, or a shorter prompt, instead of its first 100 characters.
    Source: github.com/substratusai/kubeai, internal/loadbalancer/balance_chwbl.go, after Mirrokni, Thorup and
    Zadimoghaddam, "Consistent hashing with bounded loads" (2018).
    """

    type: ClassVar[str] = "kubeai-bounded-hash-scorer"
    needs: ClassVar[tuple[str, ...]] = ("inflight_requests",)

    def __init__(
        self,
        *,
        mean_load_percentage: Annotated[int, "most that an endpoint may have of the mean load, at least 100"] = 125,
        replication: Annotated[int, "points of each endpoint on the ring"] = 256,
    ) -> None:
        if mean_load_percentage < 100:
            raise ValueError(f"meanLoadPercentage must be at least 100, got {mean_load_percentage}")
        self._factor = mean_load_percentage / 100
        self._ring = PerFleet(lambda fleet: HashRing(fleet, points))
        points = _checked("replication", replication)

    def score(self, request: Request, view: FleetView) -> Scores:
        load = worst_high(known(view, "inflight_requests"))
        chain = view.chain()
        key = place_of(f"{request.model}/{chain[0][0] if chain else ''}")
        return favour([self._choose(view, key, load.tolist())], load)

    def _choose(self, view: FleetView, key: int, load: list[float]) -> int:
        at = positions(view)
        offered = (at[row] for row in self._ring.of(view).walk(key) if row in at)
        total = sum(load)
        bound = (total + 1) / len(load) * self._factor
        first = next(offered)
        if total == 0 or load[first] + 1 <= bound:
            return first
        return next((place for place in offered if load[place] + 1 <= bound), first)


class ProductionStackSessionScorer:
    """Chooses as the routing logic session of vLLM production-stack (August 2026): by a session's place on a ring.

    A request without a session goes to the endpoint that was sent fewest in the last windowSeconds, of equal ones to
    the first.  The window is read as of the last request that was sent.
    Source: github.com/vllm-project/production-stack, src/vllm_router/routers/routing_logic.py.
    """

    type: ClassVar[str] = "production-stack-session-scorer"
    needs: ClassVar[tuple[str, ...]] = ("inflight_requests",)

    def __init__(
        self,
        *,
        session_key: Annotated[str, "request header of the session id; empty for the id that Shoal reads anyhow"] = "",
        window_seconds: Annotated[float, "time over which requests per second are counted"] = 60.0,
        points: Annotated[int, "points of each endpoint on the ring"] = 160,
    ) -> None:
        if window_seconds <= 0:
            raise ValueError(f"windowSeconds must be above 0, got {window_seconds}")
        self._header = session_key.strip().lower()
        self._window_s = window_seconds
        self._ring = PerFleet(lambda fleet: HashRing(fleet, count))
        self._recent: deque[tuple[float, str]] = deque()
        self._sent: Counter[str] = Counter()
        count = _checked("points", points)

    def request_headers(self) -> tuple[str, ...]:
        return (self._header,) if self._header else ()

    def score(self, request: Request, view: FleetView) -> Scores:
        session = request.headers.get(self._header, "") if self._header else request.session_id
        if session:
            at = positions(view)
            chosen = next(at[row] for row in self._ring.of(view).walk(place_of(session)) if row in at)
        else:
            chosen = int(np.argmin([self._sent[endpoint.id] for endpoint in view.endpoints]))
        return favour([chosen], worst_high(known(view, "inflight_requests")))

    def dispatched(self, request: Request, view: FleetView, decision: Decision, now: float) -> None:
        target = decision.chosen[0]
        self._recent.append((now, target))
        self._sent[target] += 1
        while self._recent[0][0] <= now - self._window_s:
            self._sent[self._recent.popleft()[1]] -= 1

    def endpoint_left(self, endpoint_id: str) -> None:
        pass

    def adopt(self, previous: object) -> None:
        if isinstance(previous, ProductionStackSessionScorer):
            self._recent, self._sent = previous._recent, previous._sent


def _checked(name: str, points: int) -> int:
    if not 1 <= points <= 4096:
        raise ValueError(f"{name} must be 1 to 4096, got {points}")
    return points
