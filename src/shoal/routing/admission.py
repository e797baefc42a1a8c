"""The gate between a request that can be placed and an endpoint: budgets, the queue, and who is let through when.

Owns the order of steps; queues and shares are `flow`, room is `room`, costs are `charges`, tenants are `tenancy`.  It
sends nothing itself: the router gives it the way to place a request, and it is asked after every event.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from shoal.flow import BandPolicy, Lane, Queue, Ticket
from shoal.flow.queue import MAX_LANES
from shoal.flow.recent import Recent
from shoal.pool import Outcome, Refusal, RefusalReason, Request
from shoal.routing import refusals
from shoal.routing.books import Flight, expected_output_tokens
from shoal.routing.candidates import Candidates, Rows
from shoal.routing.charges import Charges
from shoal.routing.commands import Command, Evict, Forward, Hold, Refuse, Waited
from shoal.routing.config import RouterConfig
from shoal.routing.events import (
    Arrived,
    Ended,
    EndpointLeft,
    Event,
    Kept,
    LoadSeen,
    PeerJoined,
    PeerLeft,
    Recorded,
    Ticked,
)
from shoal.routing.evictions import PATIENCE_S, Evictions, Mode
from shoal.routing.fetches import PromptKeys
from shoal.routing.fleet import Fleet
from shoal.routing.flowplan import FlowPlan
from shoal.routing.flowstatus import FlowStatus, flow_status
from shoal.routing.models import ModelTable, Resolved
from shoal.routing.returns import is_conditional
from shoal.routing.room import Room
from shoal.routing.tenancy import Standing, Tenancy, slo_ttft_s, wait_limit_s
from shoal.routing.whereabouts import Whereabouts

OF_REQUESTS = (Arrived, Ended, Recorded)
"""After these the gate says itself whether there is anything to do."""
MAX_SESSIONS = 50_000
SESSION_S = 300.0
"""A session is under way this long after its last request was sent, or was over."""
RETRY_S = 0.05
MAX_PER_STEP = 200
"""What one step may send or give up, so that no step takes long; the rest follows at once."""


class Pending(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A request that can be placed.  keys: exact ones, none for the estimate."""

    request: Request
    hashes: bytes
    resolved: Resolved
    arrived_at: float
    keys: PromptKeys = PromptKeys()


Sent = Forward | Refusal


class Sender(Protocol):
    """What the router does for the gate."""

    def send(self, pending: Pending, rows: Rows, now: float, ticket: Ticket | None, waited: Waited | None) -> Sent:
        """Place a request on one of `rows` and book it, or say why not.  waited: told with it where it has."""
        ...

    def refuse(
        self, request: Request, refusal: Refusal, ticket: Ticket | None = None, waited: Waited | None = None
    ) -> Refuse:
        """Count a refusal and return it.  waited: None where it could not wait."""
        ...

    def flight(self, request_id: str) -> Flight | None:
        """The booking of a request that was sent."""
        ...

    def undo(self, request_id: str, now: float) -> None:
        """Release whatever is booked for a request that went wrong."""
        ...


class Admission:
    """Everything between arrival and dispatch.  peers: how many other pickers share the pool.

    has_news: whether somebody may go now by what happened to requests since `after` was asked.
    """

    def __init__(
        self,
        config: RouterConfig,
        sender: Sender,
        fleet: Fleet,
        whereabouts: Whereabouts,
        candidates: Candidates,
        models: ModelTable,
        peers: Callable[[], int],
    ) -> None:
        self._sender = sender
        self._fleet = fleet
        self._whereabouts = whereabouts
        self._candidates = candidates
        self._models = models
        self._peers = peers
        self._recent = Recent()
        self._charges = Charges(self._recent)
        self._evictions = Evictions()
        self._sessions: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        self._plan: FlowPlan | None = None
        self._room: Room | None = None
        self._queue: Queue | None = None
        self._lanes: dict[str, tuple[Rows | None, str]] = {}
        self._opens_at = math.inf
        self._turn = 0
        self.has_news = False
        self.configure(config, 0.0)

    @staticmethod
    def is_wanted(config: RouterConfig) -> bool:
        """Whether a configuration asks for anything here."""
        return config.flow is not None or Tenancy(config.pool, config.objectives).has_budgets

    def configure(self, config: RouterConfig, now: float) -> None:
        """Take a new configuration; who waits goes on waiting, under its new priority."""
        plan = self._plan = config.flow
        self._tenancy = Tenancy(config.pool, config.objectives, plan.priorities if plan is not None else ())
        self._evicts = plan is not None and plan.eviction is not Mode.NEVER
        self._asks_work = plan is not None and any(
            _asks_work(band) for band in (plan.queue.fallback, plan.queue.negative_fallback, *plan.queue.bands.values())
        )
        if not self._evicts:
            self._evictions.clear()
        if plan is None:
            return
        priorities = self._tenancy.priorities
        if self._room is None or self._queue is None:
            self._room = Room(self._fleet, plan, priorities)
            self._queue = Queue(plan.queue)
            return
        self._room.configure(plan, priorities)
        self._queue.configure(plan.queue, self._renew, now)

    def _renew(self, ticket: Ticket) -> None:
        standing = self._tenancy.of(ticket.item.request)
        ticket.priority, ticket.weight = standing.priority, standing.weight
        if self._plan is not None:
            ticket.ttl_s = self._plan.ttl_s

    # ------------------------------------------------------------------ at the door

    def admit(self, pending: Pending, now: float) -> list[Command]:
        """Send a request, let it wait, or refuse it."""
        request = pending.request
        standing = self._tenancy.of(request)
        rows = self._candidates.rows(pending.resolved.target, request, now)
        ticket = self._ticket(pending, standing, rows)
        if standing.payer and (wait_s := self._charges.open(request, standing, now)):
            ticket.item = None
            return [self._sender.refuse(request, refusals.over_budget(request, wait_s), ticket)]
        queue, room = self._queue, self._room
        if self._plan is None or queue is None or room is None or not request.has_body:
            return [self._straight(ticket, rows, now)]
        has_endpoints, lane = len(rows) > 0, queue.lanes.get(ticket.lane) or queue.lane(ticket.lane)
        if not has_endpoints or lane.empty_since is not None:
            queue.seen(lane, has_endpoints, now)
        if has_endpoints and not lane.size:
            room.look(now)
            open_rows, is_held_back = room.open(rows, ticket.priority)
            if len(open_rows) and not is_held_back:
                sent = self._sender.send(pending, open_rows, now, ticket, None)
                if isinstance(sent, Forward):
                    self._sent(ticket, queue, now)
                    return [sent]
                if sent.reason is not RefusalReason.SATURATED:
                    return [self._turned_away(ticket, self._behind(sent, ticket, now), now)]
        if "prefer" in request.headers and self._is_in_vain(pending, rows, now):
            return [self._turned_away(ticket, refusals.NOWHERE, now)]
        if self._asks_work and has_endpoints:
            self._look_up_work(ticket, rows, now)
        full = queue.offer(ticket, now)
        if full:
            return [self._turned_away(ticket, self._full(full, ticket, has_endpoints, now), now)]
        # Where others wait already, one more of the same or a lower priority cannot go before them.
        if not ticket.ahead or queue.earliest <= now or (self._evictions.is_used and self._evictions.has_any):
            self.has_news = True
        return [Hold(request.id, ticket.priority, ticket.ahead)]

    def _is_in_vain(self, pending: Pending, rows: Rows, now: float) -> bool:
        """Whether a client that wants its prefix or nothing would wait for an endpoint that holds none of it."""
        request = pending.request
        if not is_conditional(request):
            return False
        return not len(rows) or not self._whereabouts.is_anywhere(request, pending.hashes, pending.keys, rows, now)

    def _straight(self, ticket: Ticket, rows: Rows, now: float) -> Command:
        sent = self._sender.send(ticket.item, rows, now, ticket, None)
        if isinstance(sent, Refusal):
            return self._turned_away(ticket, sent, now)
        self._sent(ticket, None, now)
        return sent

    def _sent(self, ticket: Ticket, queue: Queue | None, now: float) -> Flight:
        """Note a request that goes to an endpoint.  queue: None for one that is not charged there."""
        pending, flight = ticket.item, self._sender.flight(ticket.request_id)
        # It stays among the explanations, and the hashes of its prompt may be large.
        ticket.item = None
        assert flight is not None
        if queue is not None:
            self._charges.sent(flight, ticket, queue, now)
        if self._evicts and ticket.priority < 0:
            self._evictions.sent(ticket.request_id, ticket.priority, flight.decision.chosen[0], pending)
        request: Request = pending.request
        if request.session_id:
            key = (request.tenant_id, request.session_id)
            self._sessions[key] = (now, request.prompt_tokens)
            self._sessions.move_to_end(key)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return flight

    def _ticket(self, pending: Pending, standing: Standing, rows: Rows) -> Ticket:
        request, arrived_at, plan = pending.request, pending.arrived_at, self._plan
        prompt, is_follow_up = request.prompt_tokens, False
        if request.session_id:
            seen_at, seen_tokens = self._sessions.get((request.tenant_id, request.session_id), (-math.inf, 0))
            is_follow_up = arrived_at - seen_at < SESSION_S
            prompt -= seen_tokens if is_follow_up else 0
        target = pending.resolved.target
        lane_rows, lane = self._lanes.get(target, _UNKNOWN)
        # Rows are one object until the fleet or a model changes.
        if lane_rows is not rows or request.subset is not None:
            lane = self._lane(pending, target, rows)
        ticket = Ticket(
            request.id,
            lane,
            standing.priority,
            request.tenant_id,
            standing.weight,
            request.body_bytes,
            (prompt if prompt > 0 else 1) + expected_output_tokens(request),
            arrived_at,
            plan.ttl_s if plan is not None else math.inf,
            pending,
            is_follow_up,
        )
        if request.headers:
            ticket.deadline, ticket.slo_ttft_s = arrived_at + wait_limit_s(request), slo_ttft_s(request)
        return ticket

    def _look_up_work(self, ticket: Ticket, rows: Rows, now: float) -> None:
        """See what of a request's work is done already, for an order that asks."""
        pending: Pending = ticket.item
        assert self._plan is not None
        if pending.hashes and _asks_work(self._plan.queue.of(ticket.priority)):
            request = pending.request
            held = self._whereabouts.most_tokens(request, pending.hashes, pending.keys, rows, now)
            ticket.work_tokens = max(1.0, request.prompt_tokens - held) + expected_output_tokens(request)

    def _lane(self, pending: Pending, target: str, rows: Rows) -> str:
        """A name for all requests that can go where this one can: its base model, unless it is choosier than that."""
        name = self._lane_of(pending, target, rows)
        if len(self._lanes) >= MAX_LANES:
            self._lanes.clear()
        self._lanes[target] = (rows, name)
        return name

    def _lane_of(self, pending: Pending, target: str, rows: Rows) -> str:
        if not len(rows):
            return target
        base = self._models.base_at(self._fleet.rows[rows[0]].endpoint.id) or target
        if base == target and pending.request.subset is None:
            return target
        if len(rows) == len(self._candidates.rows(base, _ANY, pending.arrived_at)):
            return base
        return f"{target}|{','.join(map(str, rows.tolist()))}"

    # ------------------------------------------------------------------ after every event

    def after(self, event: Event, now: float) -> list[Command]:
        """Learn from an event what concerns the gate, and let through who can go now.

        Not asked after an event of a request that brought no news; who gives up meanwhile is seen at the deadline.
        """
        if type(event) not in OF_REQUESTS:
            self._learn(event, now)
        self.has_news = False
        queue = self._queue
        if queue is None or not queue.live:
            return []
        if self._plan is None:
            return self._flush(now)
        if queue.earliest > now:
            return self._pump(now)
        gave_up = self._give_up(now)
        return gave_up + self._pump(now) if queue.live else gave_up

    def _learn(self, event: Event, now: float) -> None:
        if isinstance(event, Kept):
            self._evictions.kept(event.request_id)
        elif isinstance(event, LoadSeen) and self._room is not None:
            self._room.read(event.endpoint_id, event.signals, now)
        elif isinstance(event, EndpointLeft) and self._room is not None:
            self._room.left(event.endpoint_id)
        elif isinstance(event, PeerJoined | PeerLeft | Ticked):
            self._charges.budgets.share(1.0 / (1 + self._peers()))

    def _pump(self, now: float) -> list[Command]:
        """Send those whose turn it is while there is room."""
        queue, room = self._queue, self._room
        assert queue is not None
        assert room is not None
        commands: list[Command] = []
        self._opens_at = math.inf
        room.look(now)
        lanes = [*queue.lanes.values()]
        if len(lanes) > 1:
            lanes = [lane for lane in lanes if lane.size]
            turn = self._turn = self._turn + 1
            lanes = lanes[turn % len(lanes) :] + lanes[: turn % len(lanes)]
        for lane in lanes:
            self._pump_lane(lane, commands, now)
        if len(commands) >= MAX_PER_STEP:
            self._opens_at = now
        elif self._evicts and self._evictions.has_any:
            commands += self._evict(now)
        return commands

    def _pump_lane(self, lane: Lane, commands: list[Command], now: float) -> None:
        """Send the next requests of a lane while any may go."""
        queue, room, candidates = self._queue, self._room, self._candidates
        assert queue is not None
        assert room is not None
        while lane.size and len(commands) < MAX_PER_STEP:
            first = lane.first(now)
            assert first is not None
            pending: Pending = first.item
            rows = candidates.rows(pending.resolved.target, pending.request, now)
            has_endpoints = len(rows) > 0
            if not has_endpoints or lane.empty_since is not None:
                queue.seen(lane, has_endpoints, now)
            if not has_endpoints:
                return
            open_rows, is_held_back = room.open(rows, first.priority)
            ticket: Ticket | None = first
            if not len(open_rows):
                ticket = None
            elif is_held_back or len(lane.bands) > 1:
                ticket = lane.next(first, now, is_held_back)
            if ticket is not None and ticket is not first:
                # It is owed a share, and may be choosier than the first one.
                rows = self._rows(ticket, now)
                open_rows, _ = room.open(rows, ticket.priority)
            if ticket is None or not len(open_rows):
                self._opens_at = min(self._opens_at, room.opens_at(rows, (ticket or first).priority, now))
                return
            if not self._let_go(ticket, open_rows, commands, now):
                return

    def _evict(self, now: float) -> list[Command]:
        """Ask running requests back whose place somebody of a higher priority waits for."""
        queue, room, plan = self._queue, self._room, self._plan
        assert queue is not None
        assert room is not None
        assert plan is not None
        commands: list[Command] = []
        for lane in queue.waiting_lanes():
            head = lane.first(now)
            assert head is not None
            rows = self._rows(head, now)
            if not len(rows) or room.opens_at(rows, head.priority, now) < now + PATIENCE_S:
                continue
            places = frozenset(self._fleet.rows[row].endpoint.id for row in rows)
            for name in self._evictions.victims(head.priority, places, lane.ahead_of(head.priority), self._is_running):
                flight = self._sender.flight(name)
                assert flight is not None
                refusal = self._behind(refusals.EVICTED, flight.ticket, now)
                commands.append(Evict(name, refusal, flight.request.api, plan.eviction is Mode.ALWAYS))
        return commands

    def _is_running(self, request_id: str) -> bool:
        flight = self._sender.flight(request_id)
        return flight is not None and flight.ended_at is None

    def evicted(self, flight: Flight, now: float) -> list[Command]:
        """Have a request wait again that was taken back from its engine, with its arrival and a whole time to wait."""
        request = flight.request
        resolved = Resolved(flight.target_model, flight.target_model != request.model)
        pending: Pending = self._evictions.taken_back(request.id) or Pending(
            request, flight.blocks, resolved, flight.arrived_at
        )
        rows = self._candidates.rows(pending.resolved.target, request, now)
        ticket, queue = self._ticket(pending, self._tenancy.of(request), rows), self._queue
        if queue is not None:
            self._charges.taken_back(flight, queue, now)
        if self._plan is None or queue is None:
            return [self._straight(ticket, rows, now)]
        ticket.ttl_s += now - pending.arrived_at
        lane = queue.lane(ticket.lane)
        queue.seen(lane, len(rows) > 0, now)
        if len(rows):
            self._look_up_work(ticket, rows, now)
        queue.put(ticket, now)
        return [Hold(request.id, ticket.priority, ticket.ahead)]

    def _rows(self, ticket: Ticket, now: float) -> Rows:
        pending: Pending = ticket.item
        return self._candidates.rows(pending.resolved.target, pending.request, now)

    def _let_go(self, ticket: Ticket, rows: Rows, commands: list[Command], now: float) -> bool:
        """Send a request that waited to one of `rows`; returns whether somebody else may go as well."""
        queue, room = self._queue, self._room
        assert queue is not None
        assert room is not None
        pending: Pending = ticket.item
        request, arrived_at, target = pending.request, ticket.arrived_at, pending.resolved.target
        waited = Waited(ticket.tenant_id, ticket.priority, request.model, target, now - arrived_at)
        try:
            sent = self._sender.send(pending, rows, now, ticket, waited)
        except Exception as error:
            # This request is not the one whose event is handled: its fault must not cost others their commands.
            queue.take(ticket.request_id, now)
            commands.append(self._failed(ticket, error, now))
            return True
        if isinstance(sent, Refusal):
            if sent.reason is RefusalReason.SATURATED:
                # A filter lets nobody pass: what it looks at may change without an event.
                self._opens_at = min(self._opens_at, now + RETRY_S)
                return False
            queue.take(ticket.request_id, now)
            commands.append(self._turned_away(ticket, self._behind(sent, ticket, now), now))
            return True
        commands.append(sent)
        member = self._sent(ticket, queue, now).member
        return member is None or not room.given(member.row, now)

    def _failed(self, ticket: Ticket, error: Exception, now: float) -> Refuse:
        """Refuse a request that waited and that a plugin failed on."""
        self._sender.undo(ticket.request_id, now)
        return self._turned_away(ticket, refusals.failed(error), now)

    def _flush(self, now: float) -> list[Command]:
        """Flow control was turned off while requests waited: they go at once."""
        queue = self._queue
        assert queue is not None
        commands: list[Command] = []
        for ticket in queue.oldest(MAX_PER_STEP):
            queue.take(ticket.request_id, now)
            try:
                commands.append(self._straight(ticket, self._rows(ticket, now), now))
            except Exception as error:
                commands.append(self._failed(ticket, error, now))
        self._opens_at = now if len(queue) else math.inf
        return commands

    # ------------------------------------------------------------------ endings

    def left(self, request_id: str, now: float) -> list[Command]:
        """A client has gone: take its request out of the queue; nothing when it does not wait."""
        self.has_news = True
        ticket = self._queue.take(request_id, now) if self._queue is not None else None
        if ticket is None:
            # A plugin may have failed on it before it was sent.
            self._charges.dropped(request_id, now)
            return []
        self._recent.waited(ticket.priority, now - ticket.arrived_at, now)
        refusal = Refusal(reason=RefusalReason.CLIENT_GONE, message="the client left while its request was queued")
        return [self._turned_away(ticket, refusal, now)]

    def drop(self, is_meant: Callable[[Request], bool], refusal: Refusal, now: float) -> list[Command]:
        """Refuse those of the requests that wait which are meant."""
        queue = self._queue
        if queue is None:
            return []
        meant = [ticket for ticket in queue.oldest(len(queue)) if is_meant(ticket.item.request)]
        for ticket in meant:
            queue.take(ticket.request_id, now)
            self._recent.waited(ticket.priority, now - ticket.arrived_at, now)
        return [self._turned_away(ticket, refusal, now) for ticket in meant]

    def recorded(self, flight: Flight, outcome: Outcome, now: float) -> None:
        """Learn from the record of a request."""
        if self._room is not None and self._room.learning is not None and self._plan is not None:
            self._room.answered(flight, outcome, now)

    def ended(self, flight: Flight, now: float) -> None:
        """Note that a place is free, and that a session is under way as of the end of its turn."""
        self.has_news = True
        request = flight.request
        if request.session_id:
            key = (request.tenant_id, request.session_id)
            if key in self._sessions:
                self._sessions[key] = (now, self._sessions[key][1])

    def closed(self, flight: Flight, now: float) -> None:
        """Settle a request that was sent."""
        if self._evictions.is_used:
            self._evictions.over(flight.request.id)
        self._charges.closed(flight, self._queue, now)

    def deadline(self) -> float | None:
        """When somebody gives up, or there will be room, None when nobody waits."""
        if self._queue is None or not self._queue.live:
            return None
        gives_up = self._queue.deadline()
        due = min(self._opens_at, math.inf if gives_up is None else gives_up)
        return due if due < math.inf else None

    # ------------------------------------------------------------------ refusals

    def _turned_away(self, ticket: Ticket, refusal: Refusal, now: float) -> Refuse:
        self._charges.dropped(ticket.request_id, now)
        self._evictions.over(ticket.request_id)
        request, target = ticket.item.request, ticket.item.resolved.target
        ticket.item = None
        waited = Waited(ticket.tenant_id, ticket.priority, request.model, target, now - ticket.arrived_at)
        return self._sender.refuse(request, refusal, ticket, waited)

    def _behind(self, refusal: Refusal, ticket: Ticket | None, now: float) -> Refusal:
        wait_s = self._queue.wait_s(ticket, now) if self._queue is not None and ticket is not None else None
        return refusals.behind(refusal, wait_s)

    def _full(self, what: str, ticket: Ticket, has_endpoints: bool, now: float) -> Refusal:
        assert self._queue is not None
        if not has_endpoints:
            nobody = self._candidates.nobody(ticket.item.resolved.target)
            return refusals.nobody(f"{nobody} And as many requests wait as may.")
        return refusals.full(what, self._queue.wait_s(ticket, now))

    def _give_up(self, now: float) -> list[Command]:
        """Refuse those whose time is over."""
        queue = self._queue
        assert queue is not None
        commands: list[Command] = []
        for ticket in queue.expired(now, MAX_PER_STEP):
            waited_s = now - ticket.arrived_at
            self._recent.waited(ticket.priority, waited_s, now)
            if not len(self._rows(ticket, now)):
                nobody = self._candidates.nobody(ticket.item.resolved.target)
                refusal = refusals.nobody(f"{nobody} The request waited {waited_s:.0f} s for one.")
            else:
                refusal = refusals.gave_up(waited_s, queue.wait_s(ticket, now))
            commands.append(self._turned_away(ticket, refusal, now))
        return commands

    # ------------------------------------------------------------------ what is known of it

    def status(self, now: float) -> FlowStatus:
        """The queue in plain values."""
        queue, plan = self._queue, self._plan
        if queue is None or plan is None or self._room is None:
            return FlowStatus()
        saturation, charges = self._room.saturation(now), len(self._charges) + len(self._evictions)
        return flow_status(queue, self._recent, saturation, charges, now)

    def waits(self) -> Collection[Ticket]:
        """Everybody who waits."""
        return self._queue.waits() if self._queue is not None else ()

    def waiting(self, name: str) -> Ticket | None:
        """A request that waits, by its own or its client's id."""
        queue = self._queue
        if queue is None or not name:
            return None
        meant = [each for each in queue.oldest(len(queue)) if each.item.request.client_id == name]
        return queue.find(name) or (meant[-1] if meant else None)


_ANY = Request(id="")
_UNKNOWN: tuple[Rows | None, str] = (None, "")


def _asks_work(policy: BandPolicy) -> bool:
    return getattr(policy.ordering, "needs_work", False)
