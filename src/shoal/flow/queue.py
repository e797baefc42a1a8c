"""Everything that waits: lanes with their bands, what may wait at most, who gives up when, and how fast it drains.

Owns membership: a request is in here from `offer` until `take`, `serve` or `expire` gives it back, once.  It knows
neither endpoints nor clients.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from shoal.flow.bands import Band, BandPolicy, Lane, Occupancy
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


class BandLine(NamedTuple):
    """Who waits of one priority, over all lanes, by tenant.  since: arrival of who waits longest, None for nobody."""

    requests: Mapping[str, int]
    weights: Mapping[str, float]
    since: float | None


class Queue:
    """The requests that wait.

    policy: how they wait.  lanes: by name, in the order in which they came up.  live: by id, in the order in which they
    came.  earliest: none of them gives up before, infinite where none will.
    """

    __slots__ = (
        "_expiry",
        "_number",
        "_occupancy",
        "_pruned_at",
        "earliest",
        "lanes",
        "live",
        "policy",
    )

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.lanes: dict[str, Lane] = {}
        self.live: dict[str, Ticket] = {}
        self._expiry = Ascending()
        self._occupancy: dict[int, Occupancy] = {}
        self._number = 0
        self._pruned_at = 0
        self.earliest = math.inf

    def __len__(self) -> int:
        return len(self.live)

    @property
    def size_bytes(self) -> int:
        """Of the bodies of all that wait."""
        return sum(held.size_bytes for held in self._occupancy.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.live

    # ------------------------------------------------------------------ in

    def offer(self, ticket: Ticket, now: float) -> str:
        """Let a request wait if it can, and note how many are ahead of it.

        Returns what is full, and then it does not wait; "" when it does.
        """
        lane = self.lanes.get(ticket.lane) or self.lane(ticket.lane)
        band = lane.by_priority.get(ticket.priority) or lane.band(ticket.priority)
        policy, held, size_bytes = self.policy, band.held, ticket.size_bytes
        own, full = held.policy, ""
        if policy.max_bytes and self.size_bytes + size_bytes > policy.max_bytes:
            full = "bytes of the queue"
        elif policy.max_requests and len(self.live) >= policy.max_requests:
            full = "requests of the queue"
        elif own.max_bytes and held.size_bytes + size_bytes > own.max_bytes:
            full = "bytes of the band"
        elif own.max_requests and held.requests >= own.max_requests:
            full = "requests of the band"
        if not full:
            self._put(ticket, lane, band, now)
            return ""
        ticket.ahead = lane.ahead_of(ticket.priority)
        self._number = ticket.number = ticket.left = self._number + 1
        return full

    def put(self, ticket: Ticket, now: float) -> None:
        """Let a request wait, however full it is, and note how many are ahead of it."""
        lane = self.lane(ticket.lane)
        self._put(ticket, lane, lane.band(ticket.priority), now)

    def _put(self, ticket: Ticket, lane: Lane, band: Band, now: float) -> None:
        ticket.ahead = band.size if len(lane.bands) == 1 else lane.ahead_of(ticket.priority)
        self._number = ticket.number = number = self._number + 1
        band.push(ticket, now)
        if not lane.size:
            lane.drain.woke(now)
        lane.size += 1
        self.live[ticket.request_id] = ticket
        self._watch(ticket, lane)
        if number > self._pruned_at:
            # At most so many more have come, and left, than wait.
            self._pruned_at = number + len(self.live) + 256
            self._expiry.prune()

    def lane(self, name: str) -> Lane:
        """The lane of that name, made when it is new."""
        lane = self.lanes.get(name)
        if lane is None:
            if len(self.lanes) >= MAX_LANES:
                self.lanes = {each.name: each for each in self.lanes.values() if each.size}
            policy = self.policy
            lane = self.lanes[name] = Lane(name, self._held, policy.is_strict, policy.minimum_share_ratio)
        return lane

    def _held(self, priority: int) -> Occupancy:
        held = self._occupancy.get(priority)
        if held is None:
            held = self._occupancy[priority] = Occupancy(self.policy.of(priority))
        return held

    def waiting_lanes(self) -> list[Lane]:
        """The lanes in which somebody waits, in the order in which they came up first."""
        return [lane for lane in self.lanes.values() if lane.size]

    # ------------------------------------------------------------------ out

    def went(self, ticket: Ticket, tokens: float, now: float) -> None:
        """Note that a request goes to an endpoint, at once or after a wait, and what it is thought to cost.

        Of those that wait it is one that a lane's `next` gave.
        """
        lane = self.lanes.get(ticket.lane) or self.lane(ticket.lane)
        band = lane.by_priority.get(ticket.priority) or lane.band(ticket.priority)
        if ticket.number:
            ticket.left = self._number
            del self.live[ticket.request_id]
            lane.size -= 1
            band.take(ticket, now, True)
        band.turns.charge(ticket.tenant_id, ticket.weight, tokens, now)
        if len(lane.bands) > 1:
            lane.spent(ticket.priority, tokens)
        lane.drain.left(now)

    def take(self, request_id: str, now: float) -> Ticket | None:
        """Take a request out of the queue, wherever it stands; None when it does not wait."""
        ticket = self.live.pop(request_id, None)
        if ticket is not None:
            ticket.left = self._number
            lane = self.lanes[ticket.lane]
            lane.size -= 1
            lane.by_priority[ticket.priority].take(ticket, now, False)
        return ticket

    def correct(self, ticket: Ticket, tokens: float, now: float) -> None:
        """Note that a request which has gone cost so many tokens more (or less) than it was thought to."""
        lane = self.lanes.get(ticket.lane)
        band = lane.by_priority.get(ticket.priority) if lane is not None else None
        if band is not None and tokens:
            band.turns.charge(ticket.tenant_id, ticket.weight, tokens, now, is_late=True)

    # ------------------------------------------------------------------ giving up

    def _gives_up(self, ticket: Ticket, lane: Lane) -> float:
        """When a request waits no longer, as things stand."""
        came, ttl_s, no_endpoint_s = ticket.arrived_at, ticket.ttl_s, self.policy.no_endpoint_ttl_s or math.inf
        if lane.empty_since is not None:
            gives_up = max(came, lane.empty_since) + no_endpoint_s
        else:
            gives_up = max(came, lane.filled_at) + ttl_s
        # However often the pool comes and goes, the two together are the end of it.
        return min(gives_up, came + ttl_s + no_endpoint_s, ticket.deadline)

    def _watch(self, ticket: Ticket, lane: Lane) -> None:
        """Note when a request gives up."""
        gives_up = ticket.arrived_at + ticket.ttl_s
        if ticket.deadline < gives_up or lane.empty_since is not None or lane.filled_at > ticket.arrived_at:
            gives_up = self._gives_up(ticket, lane)
        if gives_up < self.earliest:
            self.earliest = gives_up
        if gives_up < math.inf:
            self._expiry.push(gives_up, ticket)

    def seen(self, lane: Lane, has_endpoints: bool, now: float) -> None:
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
            lane = self.lanes[ticket.lane]
            if self._gives_up(ticket, lane) > now:
                self._watch(ticket, lane)
                continue
            self.take(ticket.request_id, now)
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
        lane = self.lanes.get(ticket.lane)
        return None if lane is None else lane.drain.wait_s(lane.ahead_of(ticket.priority), now)

    def drain_per_s(self, now: float) -> float:
        """Requests that went per second of late, over all lanes."""
        return sum(lane.drain.per_s(now) for lane in self.lanes.values())

    def occupancy(self) -> Mapping[int, Occupancy]:
        """What waits by priority."""
        return self._occupancy

    def oldest(self, count: int) -> list[Ticket]:
        """The first that came of those that wait."""
        return list(itertools.islice(self.live.values(), count))

    def waits(self) -> Collection[Ticket]:
        """Everybody who waits, in the order in which they came."""
        return self.live.values()

    def find(self, request_id: str) -> Ticket | None:
        """A request that waits, None when it does not."""
        return self.live.get(request_id)

    def waiting(self, priority: int) -> BandLine:
        """Who waits of one priority."""
        requests: dict[str, int] = {}
        weights: dict[str, float] = {}
        for lane in self.lanes.values():
            band = lane.by_priority.get(priority)
            for tenant_id, line in band.waiting.items() if band is not None else ():
                head = line.head()
                requests[tenant_id] = requests.get(tenant_id, 0) + line.size
                weights[tenant_id] = head.weight if head is not None else 1.0
        oldest = next((ticket for ticket in self.live.values() if ticket.priority == priority), None)
        return BandLine(requests, weights, None if oldest is None else oldest.arrived_at)

    # ------------------------------------------------------------------ another policy

    def configure(self, policy: QueuePolicy, renew: Callable[[Ticket], None], now: float) -> None:
        """Go on under another policy; whoever waits keeps its place and its arrival.

        renew: brings a request's priority, weight and time to live up to the new configuration.
        """
        waiting = sorted(self.live.values(), key=lambda ticket: ticket.number)
        self.policy, self._occupancy, self._expiry = policy, {}, Ascending()
        self.earliest = math.inf
        self.live = {}
        for lane in self.lanes.values():
            lane.configure(policy.is_strict, policy.minimum_share_ratio)
        for ticket in waiting:
            renew(ticket)
            ahead = ticket.ahead
            self.put(ticket, now)
            ticket.ahead = ahead
