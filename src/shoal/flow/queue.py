"""Everything that waits: lanes with their bands, what may wait at most, who gives up when, and how fast it drains.

Owns membership: a request is in here from `offer` until `take`, `serve` or `expire` gives it back, once.  It knows
neither endpoints nor clients.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from shoal.flow.ahead import Stay
from shoal.flow.bands import BandPolicy, Lane
from shoal.flow.drain import DrainRate
from shoal.flow.lines import Ascending
from shoal.flow.tickets import Ticket

MAX_LANES = 1000


class QueuePolicy(NamedTuple):
    """How requests wait.

    bands: by priority.  fallback, negative_fallback: for other priorities.  max_requests, max_bytes: over all bands, 0
    for no limit.  no_endpoint_ttl_s: how long a request waits for a first endpoint.  minimum_share_ratio: of the tokens
    of a lane for each band but the highest, while it waits.
    """

    fallback: BandPolicy
    negative_fallback: BandPolicy
    bands: Mapping[int, BandPolicy] = {}
    max_requests: int = 0
    max_bytes: int = 0
    no_endpoint_ttl_s: float = 60.0
    is_strict: bool = False
    minimum_share_ratio: float = 0.1

    def of(self, priority: int) -> BandPolicy:
        """The policy of a priority."""
        return self.bands.get(priority) or (self.fallback if priority >= 0 else self.negative_fallback)


class Occupancy:
    """What waits of one priority, over all lanes, and under which policy."""

    __slots__ = ("policy", "requests", "size_bytes")

    def __init__(self, policy: BandPolicy) -> None:
        self.policy = policy
        self.requests = 0
        self.size_bytes = 0


class BandLine(NamedTuple):
    """Who waits of one priority, over all lanes, by tenant.  since: arrival of who waits longest, None for nobody."""

    requests: Mapping[str, int]
    weights: Mapping[str, float]
    since: float | None


class Queue:
    """The requests that wait.

    size: how many; size_bytes: of their bodies.  earliest: none of them gives up before, infinite where none will.
    """

    __slots__ = (
        "_drains",
        "_expiry",
        "_gone",
        "_lanes",
        "_live",
        "_number",
        "_occupancy",
        "_policy",
        "earliest",
        "size",
        "size_bytes",
    )

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._lanes: dict[str, Lane] = {}
        self._live: dict[str, Ticket] = {}
        self._expiry = Ascending()
        self._occupancy: dict[int, Occupancy] = {}
        self._drains: dict[str, DrainRate] = {}
        self._number = 0
        self._gone = 0
        self.size = 0
        self.size_bytes = 0
        self.earliest = math.inf

    def __len__(self) -> int:
        return self.size

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    # ------------------------------------------------------------------ in

    def full(self, ticket: Ticket) -> str:
        """Why a request cannot wait as well: what is full, "" when it can."""
        policy = self._policy
        held = self._occupancy.get(ticket.priority) or Occupancy(policy.of(ticket.priority))
        band = held.policy
        if policy.max_bytes and self.size_bytes + ticket.size_bytes > policy.max_bytes:
            return "bytes of the queue"
        if policy.max_requests and self.size >= policy.max_requests:
            return "requests of the queue"
        if band.max_bytes and held.size_bytes + ticket.size_bytes > band.max_bytes:
            return "bytes of the band"
        return "requests of the band" if band.max_requests and held.requests >= band.max_requests else ""

    def offer(self, ticket: Ticket, now: float) -> None:
        """Let a request wait; whoever asks has looked at `full`."""
        self._number += 1
        ticket.number = self._number
        self._live[ticket.request_id] = ticket
        self.size += 1
        lane = self._lanes.get(ticket.lane) or self.lane(ticket.lane)
        band = lane.by_priority.get(ticket.priority) or lane.band(ticket.priority, self._policy.of)
        band.push(ticket, now)
        if not lane.size and (drain := self._drains.get(ticket.lane)) is not None:
            drain.woke(now)
        lane.size += 1
        held = self._occupancy.get(ticket.priority)
        if held is None:
            held = self._occupancy[ticket.priority] = Occupancy(self._policy.of(ticket.priority))
        held.requests += 1
        held.size_bytes += ticket.size_bytes
        self.size_bytes += ticket.size_bytes
        self._watch(ticket, lane)

    def lane(self, name: str) -> Lane:
        """The lane of that name, made when it is new."""
        lane = self._lanes.get(name)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                self._lanes = {each.name: each for each in self._lanes.values() if each.size}
            policy = self._policy
            lane = Lane(name, is_strict=policy.is_strict, minimum_share_ratio=policy.minimum_share_ratio)
            self._lanes[name] = lane
        return lane

    def waiting_lanes(self) -> list[Lane]:
        """The lanes in which somebody waits, in the order in which they came up first."""
        return [lane for lane in self._lanes.values() if lane.size]

    # ------------------------------------------------------------------ out

    def serve(self, ticket: Ticket, now: float) -> None:
        """Take the request that a lane's `next` gave."""
        self._remove(ticket, now, is_served=True)

    def take(self, request_id: str, now: float) -> Ticket | None:
        """Take a request out of the queue, wherever it stands; None when it does not wait."""
        ticket = self._live.get(request_id)
        if ticket is not None:
            self._remove(ticket, now, is_served=False)
        return ticket

    def _remove(self, ticket: Ticket, now: float, *, is_served: bool) -> None:
        lane = self._lanes[ticket.lane]
        lane.by_priority[ticket.priority].take(ticket, now, is_served=is_served)
        lane.size -= 1
        del self._live[ticket.request_id]
        self.size -= 1
        held = self._occupancy[ticket.priority]
        held.requests -= 1
        held.size_bytes -= ticket.size_bytes
        self.size_bytes -= ticket.size_bytes
        self._gone += 1
        if self._gone > self.size + 256:
            self._gone = 0
            self._expiry.prune()

    def spent(self, ticket: Ticket, tokens: float, now: float) -> None:
        """Note that a request has gone to an endpoint, at once or after a wait, and what it is thought to cost."""
        lane = self._lanes.get(ticket.lane) or self.lane(ticket.lane)
        band = lane.by_priority.get(ticket.priority) or lane.band(ticket.priority, self._policy.of)
        band.turns.charge(ticket.tenant_id, ticket.weight, tokens, now)
        if len(lane.bands) > 1:
            lane.spent(ticket.priority, tokens)
        drain = self._drains.get(ticket.lane)
        if drain is None:
            if len(self._drains) >= MAX_LANES:
                self._drains.clear()
            drain = self._drains[ticket.lane] = DrainRate()
        drain.left(now)

    def correct(self, ticket: Ticket, tokens: float, now: float) -> None:
        """Note that a request which has gone cost so many tokens more (or less) than it was thought to."""
        lane = self._lanes.get(ticket.lane)
        if lane is not None and tokens:
            band = lane.by_priority.get(ticket.priority) or lane.band(ticket.priority, self._policy.of)
            band.turns.charge(ticket.tenant_id, ticket.weight, tokens, now, is_late=True)

    # ------------------------------------------------------------------ giving up

    def _gives_up(self, ticket: Ticket, lane: Lane) -> float:
        """When a request waits no longer, as things stand."""
        came, ttl_s = ticket.arrived_at, ticket.ttl_s
        if lane.empty_since is None and lane.filled_at <= came:
            return came + ttl_s if came + ttl_s < ticket.deadline else ticket.deadline
        no_endpoint_s = self._policy.no_endpoint_ttl_s or math.inf
        if lane.empty_since is not None:
            gives_up = max(came, lane.empty_since) + no_endpoint_s
        else:
            gives_up = max(came, lane.filled_at) + ttl_s
        # However often the pool comes and goes, the two together are the end of it.
        return min(gives_up, came + ttl_s + no_endpoint_s, ticket.deadline)

    def _watch(self, ticket: Ticket, lane: Lane) -> None:
        """Note when a request gives up."""
        gives_up = self._gives_up(ticket, lane)
        if gives_up < math.inf:
            self._expiry.push(gives_up, ticket)
            if gives_up < self.earliest:
                self.earliest = gives_up

    def seen(self, lane: Lane, *, has_endpoints: bool, now: float) -> None:
        """Note whether a lane has any endpoint: what its requests may wait depends on it."""
        if has_endpoints == (lane.empty_since is None):
            return
        if has_endpoints:
            lane.empty_since, lane.filled_at = None, now
        else:
            lane.empty_since = now
        for band in lane.bands:
            for ticket in band.tickets():
                self._watch(ticket, lane)

    def expired(self, now: float, limit: int) -> list[Ticket]:
        """Take up to `limit` requests whose time is over."""
        found: list[Ticket] = []
        while len(found) < limit and (first := self._expiry.first()) is not None and first[0] <= now:
            ticket = first[2]
            self._expiry.pop()
            lane = self._lanes[ticket.lane]
            if self._gives_up(ticket, lane) > now:
                self._watch(ticket, lane)
                continue
            self._remove(ticket, now, is_served=False)
            found.append(ticket)
        due = self.deadline()
        self.earliest = math.inf if due is None else due
        return found

    def deadline(self) -> float | None:
        """When the next request may give up, None when none will."""
        first = self._expiry.first()
        return None if first is None else first[0]

    # ------------------------------------------------------------------ what is known of it

    def wait_s(self, ticket: Ticket, now: float) -> float | None:
        """How long a request that came now would wait, by how fast its lane drains; None while that is not known."""
        lane, drain = self._lanes.get(ticket.lane), self._drains.get(ticket.lane)
        if drain is None:
            return None
        return drain.wait_s(lane.ahead_of(ticket.priority) if lane is not None else 0, now)

    def drain_per_s(self, now: float) -> float:
        """Requests that went per second of late, over all lanes."""
        return sum(drain.per_s(now) for drain in self._drains.values())

    def occupancy(self) -> Mapping[int, Occupancy]:
        """What waits by priority."""
        return self._occupancy

    def oldest(self, count: int) -> list[Ticket]:
        """The first that came of those that wait."""
        return list(itertools.islice(self._live.values(), count))

    @property
    def policy(self) -> QueuePolicy:
        """How requests wait."""
        return self._policy

    def leaving(self, ticket: Ticket, ahead: int) -> Stay:
        """What is kept of a request that leaves now.  ahead: how many were there before it."""
        return Stay(ticket.lane, ticket.priority, ticket.tenant_id, ticket.number, self._number, ahead)

    def turned_away(self, ticket: Ticket, ahead: int) -> Stay:
        """What is kept of a request that came and could not wait."""
        self._number += 1
        return Stay(ticket.lane, ticket.priority, ticket.tenant_id, self._number, self._number, ahead)

    def stays(self) -> list[Stay]:
        """Everybody who waits."""
        return [Stay(each.lane, each.priority, each.tenant_id, each.number) for each in self._live.values()]

    def find(self, request_id: str) -> Ticket | None:
        """A request that waits, None when it does not."""
        return self._live.get(request_id)

    def waiting(self, priority: int) -> BandLine:
        """Who waits of one priority."""
        requests: dict[str, int] = {}
        weights: dict[str, float] = {}
        for lane in self._lanes.values():
            band = lane.by_priority.get(priority)
            for tenant_id, line in band.waiting.items() if band is not None else ():
                head = line.head()
                requests[tenant_id] = requests.get(tenant_id, 0) + line.size
                weights[tenant_id] = head.weight if head is not None else 1.0
        oldest = next((ticket for ticket in self._live.values() if ticket.priority == priority), None)
        return BandLine(requests, weights, None if oldest is None else oldest.arrived_at)

    # ------------------------------------------------------------------ another policy

    def configure(self, policy: QueuePolicy, renew: Callable[[Ticket], None], now: float) -> None:
        """Go on under another policy; whoever waits keeps its place and its arrival.

        renew: brings a request's priority, weight and time to live up to the new configuration.
        """
        waiting = sorted(self._live.values(), key=lambda ticket: ticket.number)
        before = self._lanes
        self._policy, self._lanes, self._occupancy, self._expiry = policy, {}, {}, Ascending()
        self.size = self.size_bytes = 0
        self.earliest = math.inf
        self._live = {}
        for ticket in waiting:
            ticket.is_live = False
            renew(ticket)
            old, lane = before.get(ticket.lane), self.lane(ticket.lane)
            if old is not None:
                lane.empty_since, lane.filled_at = old.empty_since, old.filled_at
            self.offer(ticket, now)
