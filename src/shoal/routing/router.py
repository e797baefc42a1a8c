"""The picker's brain: every event comes in at `handle`, every decision leaves as a command.

Owns the order of things: resolve the model, find candidates, fill the columns, schedule, book, forward, release,
learn.  The figures live in `fleet` and `books`, the choice in `scheduling`, the bytes in the hosts.
"""

from collections import deque
from itertools import islice

import msgspec

from shoal.flow import Ticket
from shoal.kernel import Chance, ClockWentBack
from shoal.pool import FleetView, Outcome, Refusal, RefusalReason, Request, ServedModel
from shoal.prefix import BLOCK_TOKENS, EstimatedIndex, Tail
from shoal.routing.accounts import account_of
from shoal.routing.admission import OF_REQUESTS, Admission, Pending, Sent
from shoal.routing.books import Books, Flight
from shoal.routing.bursts import Bursts
from shoal.routing.candidates import Candidates, Rows
from shoal.routing.changes import Changes
from shoal.routing.columns import COMPLETE, REACH_TOKENS, Columns
from shoal.routing.comebacks import comeback_s
from shoal.routing.commands import Command, Cut, Fetch, Forward, Refuse, Waited
from shoal.routing.config import RouterConfig, load
from shoal.routing.estimate import TokenEstimator
from shoal.routing.events import (
    Arrived,
    Configured,
    Ended,
    Event,
    Evicted,
    Fetched,
    FetchFailed,
    LoadSeen,
    PeerEvent,
    PeerTaught,
    Recorded,
    SessionAborted,
    Ticked,
)
from shoal.routing.exact import ExactCaches, Held
from shoal.routing.explain import Explanations, Refused
from shoal.routing.fetches import Fetches, PromptKeys
from shoal.routing.fleet import Fleet, Member
from shoal.routing.forecasts import Forecasts
from shoal.routing.lessons import Lessons
from shoal.routing.models import ModelTable, Resolved
from shoal.routing.outbox import Outbox
from shoal.routing.peers import Peers, teach
from shoal.routing.refusals import ABORTED, failed, nobody
from shoal.routing.returns import Returns, holders, is_conditional
from shoal.routing.status import FlowStatus, PoolStatus, fleet_status, own_requests
from shoal.routing.whereabouts import Whereabouts
from shoal.scheduling import Scheduler
from shoal.scheduling.plugin import FEW

# A record comes 5 to 100 ms after the end of its stream; past this it never will.
RECORD_TIMEOUT_S = 30.0
# What one step may close, so that no step of a journal is large.
MAX_EXPIRED_PER_STEP = 500


class Router:
    """The router machine.  Not thread-safe; one writer.

    config: validated.  chance: every draw comes from its streams.  shares_pool: whether other routers send to the same
    endpoints, so that their load must be read from the engines' metrics while no peer tells it.  outbox: what peers
    have to hear, open while there are any.
    """

    def __init__(self, config: RouterConfig, chance: Chance, *, shares_pool: bool = False) -> None:
        self._chance = chance
        self._fleet = Fleet()
        self._books = Books(self._fleet)
        self._models = ModelTable()
        self._estimator = TokenEstimator()
        self._flights: dict[str, Flight] = {}
        self._fetches = Fetches()
        self._awaiting_record: deque[tuple[float, str]] = deque()
        self._index = EstimatedIndex(config.pool.index.budget_bytes)
        self._tail = Tail()
        self._exact = ExactCaches(config.precise, self._models.base_at)
        self._bursts = Bursts(config.burst) if config.burst is not None else None
        self._now = float("-inf")
        self._requests_total = self._errors_total = self._orphan_records = 0
        self._mean_uncached_tokens = 0.0
        self._candidates = Candidates(self._fleet, self._models)
        self._whereabouts = Whereabouts(self._fleet, self._books, self._models, self._index, self._exact, self._tail)
        self._forecasts = Forecasts(config.predicted, self._fleet, self._models)
        self.outbox = Outbox(self._books, self._flights)
        self._returns = Returns(config.pool.agents.max_wait_s, self._fleet, self._index, self.outbox)
        self._lessons = Lessons(self._fleet, self._books, self._candidates, self._index, self._tail, self.outbox)
        self._peers = Peers(self._fleet, self._books, self._index, self._lessons, self._returns)
        self.explanations = Explanations(lambda: self._admission)
        self._config = config
        self._scheduler = Scheduler(config.policy, chance)
        self._models.configure(config.pool.aliases, config.rewrites)
        self._changes = Changes(
            *(self._fleet, self._books, self._models, self._candidates, self._index, self._exact, self._peers),
            shares_pool=shares_pool,
        )
        self._changes.follow(self._scheduler)
        self._admission = self._gate(config) if Admission.is_wanted(config) else None

    def prepare(self) -> bool:
        """Take a part of the memory that exact caches will need; returns whether there is more to take.

        A host does it at the start and after each configuration, between other work; no decision depends on it.
        """
        return self._exact.prepare()

    # ------------------------------------------------------------------ the door

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply one event.  Raises ClockWentBack when `now` is older than the last one."""
        if now < self._now:
            raise ClockWentBack(now, self._now)
        self._now = now
        commands, gate = self._step(event, now), self._admission
        if gate is not None and (gate.has_news or type(event) not in OF_REQUESTS):
            commands += gate.after(event, now)
        return commands

    def _step(self, event: Event, now: float) -> list[Command]:
        match event:
            case LoadSeen():
                # The most frequent one by far.
                self._changes.load_seen(event, now)
            case Arrived():
                return self._arrived(event, now)
            case Ended():
                return self._ended(event.request_id, event.outcome, now)
            case Recorded():
                return self._recorded(event.request_id, event.outcome, now)
            case Fetched() | FetchFailed():
                return self._fetched(event.request_id, event if isinstance(event, Fetched) else None, now)
            case Evicted():
                return self._evicted(event.request_id, now)
            case SessionAborted():
                return self._abort(event.session_id, event.tenant_id, now)
            case Configured():
                self._apply(load(event.text, "reload"), now)
            case Ticked():
                self._peers.expire(now)
                return self._expire(now)
            case _ if isinstance(event, PeerEvent):
                self._peers.handle(event, now)
            case _:
                self._changes.handle(event, now)
        return []

    def inflight_at(self, endpoint_id: str) -> int:
        """Own requests in flight on an endpoint, 0 for an unknown one."""
        member = self._fleet.get(endpoint_id)
        return own_requests(self._fleet.columns, member.row) if member is not None else 0

    def deadline(self) -> float | None:
        """When something is given up next: a record, a fetch, a lost peer's bookings, blocks that nobody confirmed."""
        due = self._awaiting_record[0][0] if self._awaiting_record else None
        gate_at = self._admission.deadline() if self._admission is not None else None
        for other in (self._fetches.deadline(), self._exact.deadline(), self._peers.deadline(), gate_at):
            if other is not None and (due is None or other < due):
                due = other
        return due

    # ------------------------------------------------------------------ configuration and fleet

    def _gate(self, config: RouterConfig) -> Admission:
        made = (self, self._fleet, self._whereabouts, self._candidates, self._models)
        return Admission(config, *made, lambda: self._peers.gauges().peers)

    def _apply(self, config: RouterConfig, now: float) -> None:
        self._config = config
        scheduler = Scheduler(config.policy, self._chance)
        scheduler.adopt(self._scheduler)
        self._scheduler = scheduler
        self._models.configure(config.pool.aliases, config.rewrites)
        self._candidates.invalidate()
        if config.burst is None:
            self._bursts = None
        elif self._bursts is None or self._bursts.settings != config.burst:
            self._bursts = Bursts(config.burst)
        self._exact.configure(config.precise)
        self._forecasts.configure(config.predicted)
        self._returns.max_wait_s = config.pool.agents.max_wait_s
        self._changes.follow(scheduler)
        if self._admission is not None:
            self._admission.configure(config, now)
        elif Admission.is_wanted(config):
            self._admission = self._gate(config)

    def teach(self, peer: str, at: int = 0, clock: int = 0) -> tuple[PeerTaught, int | None]:
        """Return what a picker that begins takes over of endpoints from the `at`-th on, and where to go on.

        peer: the name that it knows this router by.  clock: of the first part.  The rows follow.
        """
        return teach(peer, self._fleet, self._index, at, clock)

    def teach_rows(self, peer: str, at: int, clock: int) -> tuple[PeerTaught, int | None]:
        """Return the index's next rows from row `at` on, and where to go on; clock: of the first part."""
        rows, more = self._index.give(at, clock)
        return PeerTaught(peer, rows=rows), more

    # ------------------------------------------------------------------ one request

    def canonical(self, model: str) -> str:
        """The engines' own name of a model, for seeding the hash of a prompt."""
        return self._models.canonical(model)

    def models(self) -> list[ServedModel]:
        """Every model of the pool once, for a merged `/v1/models`."""
        return self._models.listed()

    def _arrived(self, event: Arrived, now: float) -> list[Command]:
        request = event.request
        self._requests_total += 1
        forced = request.headers.get("x-llm-d-model-name-rewrite", "") if request.model else ""
        resolved = self._models.resolve(request.model, forced, self._chance.stream("rewrite"))
        if not self._models.is_known(resolved.target, now):
            message = self._models.unknown(resolved.target)
            return [self.refuse(request, Refusal(reason=RefusalReason.MODEL_NOT_FOUND, message=message))]
        if self._exact.is_on and event.blocks and (wanted := self._fetch(event, resolved, now)) is not None:
            return [wanted]
        return self._place(Pending(request, event.blocks, resolved, now), now)

    def _fetch(self, event: Arrived, resolved: Resolved, now: float) -> Fetch | None:
        """Ask for the prompt's tokens if some candidate's cache is known exactly."""
        request = event.request
        known, sizes = self._exact.wanted(self._fleet.rows, self._candidates.rows(resolved.target, request, now))
        model = self._models.base_at(known) or resolved.target
        if not sizes or not self._fetches.add(event, resolved, model, now, now + self._config.tokens.deadline_s):
            return None
        adapter = resolved.target if self._models.is_adapter(resolved.target, known) else ""
        return Fetch(request.id, model, adapter, sizes)

    def _fetched(self, request_id: str, fetched: Fetched | None, now: float) -> list[Command]:
        """Place a request whose tokens came, or will not come; nothing when it went by the estimate already."""
        waiting = self._fetches.take(request_id)
        if waiting is None:
            return []
        request, keys = waiting.outcome(fetched)
        return self._place(Pending(request, waiting.arrived.blocks, waiting.resolved, waiting.arrived_at, keys), now)

    def _late(self, request_id: str, now: float) -> list[Command]:
        """Place a request without its tokens; a fault of its own costs no other request its command."""
        request = self._fetches.request(request_id)
        try:
            return self._fetched(request_id, None, now)
        except Exception as error:
            self.undo(request_id, now)
            return [self.refuse(request, failed(error))]

    def _place(self, pending: Pending, now: float) -> list[Command]:
        """Send a request, have it wait, or refuse it."""
        if self._admission is not None:
            return self._admission.admit(pending, now)
        rows = self._candidates.rows(pending.resolved.target, pending.request, now)
        sent = self.send(pending, rows, now, None, None)
        return [sent if isinstance(sent, Forward) else self.refuse(pending.request, sent)]

    def send(self, pending: Pending, rows: Rows, now: float, ticket: Ticket | None, waited: Waited | None) -> Sent:
        """Choose an endpoint among `rows` and book the request there, or say why not."""
        request, hashes, resolved, keys = pending.request, pending.hashes, pending.resolved, pending.keys
        if len(rows) == 0:
            return nobody(self._candidates.nobody(resolved.target))
        blocks, match, held = self._whereabouts.of(request, hashes, keys, now)
        # Plugins see the model that will be served; the request keeps the name that the client gave.
        asked = msgspec.structs.replace(request, model=resolved.target) if resolved.is_rewritten else request
        fleet, mean = self._fleet, self._mean_uncached_tokens
        forecasts = self._forecasts if self._forecasts.is_on else None
        columns = Columns(fleet, self._books, self._models, asked, match, now, mean, held, forecasts, blocks)
        among = None if len(rows) == len(fleet) else rows
        view = FleetView(fleet.endpoints, columns, fleet.signals, among, COMPLETE, blocks, REACH_TOKENS)
        if "prefer" in request.headers and is_conditional(request):
            holding = holders(view)
            if isinstance(holding, Refusal):
                return holding
            view = holding
        # Without flow control a priority is only ever one that the client may ask for: a lower one.
        low = ticket.priority if ticket is not None else min(0, self._config.objectives.get(request.objective, 0))
        decision = self._scheduler.schedule(asked, view, now, low)
        if isinstance(decision, Refusal):
            return msgspec.structs.replace(decision, retry_after_s=comeback_s(fleet, view, now))
        if self._bursts is not None and len(blocks):
            decision = self._bursts.join(request, blocks, decision, view, now)
        decision = self._returns.place(request, decision, view, now)
        member = fleet.at(decision.chosen[0])
        flight = Flight(request, resolved.target, hashes, decision, pending.arrived_at)
        flight.dispatched_at, flight.ticket, flight.priority = now, ticket, ticket.priority if ticket is not None else 0
        if match is not None:
            flight.expectation = self._index.expect(match, member.slot)
            flight.matched_tokens = min(flight.expectation.blocks * BLOCK_TOKENS, request.prompt_tokens)
            flight.predicted_tokens = flight.matched_tokens
            flight.matched_tokens += self._tail.tokens(flight.expectation.blocks, request.prompt_tokens)
            self._index.add(member.slot, blocks, match)
            if match.runs or held is not None:
                flight.matched = view.values("matched_tokens") if len(rows) <= FEW else view.column("matched_tokens")
        if held is not None:
            self._expect_exactly(flight, held, member, keys)
        if forecasts is not None:
            forecasts.sent(flight, columns.prediction(forecasts), member)
        self._books.book(flight, member, now)
        self._mean_uncached_tokens += 0.02 * (flight.uncached_tokens - self._mean_uncached_tokens)
        member.requests_total += 1
        self._flights[request.id] = flight
        self._scheduler.dispatched(asked, view, decision, now)
        self.explanations.keep(flight)
        return self._forward(flight, resolved.target if resolved.is_rewritten else "", waited)

    def _expect_exactly(self, flight: Flight, held: Held, member: Member, keys: PromptKeys) -> None:
        """Note what the exact index promises of the chosen endpoint, and what will lie there."""
        tokens = held.tokens(member)
        if tokens is None:
            return
        flight.is_exact = True
        flight.predicted_tokens = tokens
        worth = held.worth(member, self._fleet.cells["prefill_s_per_token"][member.row])
        flight.matched_tokens = int(worth or 0.0)
        self._exact.sent(flight.request.id, member, keys)

    def _forward(self, flight: Flight, model: str, waited: Waited | None) -> Forward:
        request, at = flight.request, self._fleet.at
        chosen = flight.decision.chosen if request.retry_allowed else flight.decision.chosen[:1]
        return Forward(
            request.id,
            tuple([at(name).endpoint.address for name in chosen]),
            self._scheduler.response_headers(request, flight.decision),
            model,
            request.retry_allowed,
            flight.priority,
            waited,
        )

    # ------------------------------------------------------------------ refusals

    def refuse(
        self, request: Request, refusal: Refusal, ticket: Ticket | None = None, waited: Waited | None = None
    ) -> Refuse:
        """Count a refusal and return it; a client that left is none."""
        priority = ticket.priority if ticket is not None else 0
        self._errors_total += refusal.reason is not RefusalReason.CLIENT_GONE
        self.explanations.refused(Refused(request, refusal, priority, waited, ticket, self._now))
        return Refuse(request.id, refusal, request.api, priority, waited)

    def flight(self, request_id: str) -> Flight | None:
        """The booking of a request that was sent and is not closed."""
        return self._flights.get(request_id)

    def undo(self, request_id: str, now: float) -> None:
        """Release what is booked for a request that went wrong; what else is due is left to the step."""
        flight = self._flights.get(request_id)
        if flight is not None and flight.ended_at is None:
            self._release(flight, now)
        elif self._admission is not None and flight is None:
            self._admission.left(request_id, now)

    def _abort(self, session_id: str, tenant_id: str | None, now: float) -> list[Command]:
        """Refuse what waits of a session, and have what runs cut; its next request is one like any other."""
        commands: list[Command] = []
        for request in self._fetches.of_session(session_id, tenant_id):
            self._fetches.take(request.id)
            commands.append(self.refuse(request, ABORTED))
        if self._admission is not None:
            commands += self._admission.drop(lambda request: request.is_of(session_id, tenant_id), ABORTED, now)
        running = [flight.request for flight in self._flights.values() if flight.ended_at is None]
        commands += [Cut(each.id, ABORTED, each.api) for each in running if each.is_of(session_id, tenant_id)]
        return commands

    # ------------------------------------------------------------------ endings: all meet in _close

    def _ended(self, request_id: str, outcome: Outcome | None, now: float) -> list[Command]:
        flight = self._flights.get(request_id)
        if flight is None or flight.ended_at is not None:
            # The client may leave while its tokens are made, or while it waits.
            self._fetches.take(request_id)
            self._orphan_records += flight is None and outcome is not None
            return self._admission.left(request_id, now) if self._admission is not None and flight is None else []
        self._release(flight, now)
        if outcome is not None and flight.outcome is None:
            return self._recorded(request_id, outcome, now)
        return self._expire(now) if flight.outcome is None else self._close(flight)

    def _evicted(self, request_id: str, now: float) -> list[Command]:
        """Take a request off the books that its host has back, and have it wait anew."""
        flight = self._flights.get(request_id)
        if flight is None or flight.ended_at is not None or self._admission is None:
            return []
        del self._flights[request_id]
        self._exact.failed(request_id)
        self._forecasts.ended(flight)
        self._books.release(flight, now)
        self._scheduler.released(request_id)
        self._lessons.taken_back(flight)
        return self._admission.evicted(flight, now)

    def _release(self, flight: Flight, now: float) -> None:
        flight.ended_at = now
        self._exact.ended(flight.request.id, now)
        self._forecasts.ended(flight)
        self._returns.ended(flight, now)
        if self._admission is not None:
            self._admission.ended(flight, now)
        self._books.release(flight, now)
        self._scheduler.released(flight.request.id)
        if flight.outcome is None:
            self._awaiting_record.append((now + RECORD_TIMEOUT_S, flight.request.id))

    def _recorded(self, request_id: str, outcome: Outcome, now: float) -> list[Command]:
        flight = self._flights.get(request_id)
        if flight is None or flight.outcome is not None:
            self._orphan_records += flight is None
            return []
        flight.outcome = self._estimator.complete(flight.request, outcome)
        is_prefilled = self._lessons.learn(flight, flight.outcome, self._config.pool.ejection, now)
        self._forecasts.learn(flight, flight.outcome)
        self._returns.recorded(flight, flight.outcome, self._fleet.at_address(outcome.served_address), now)
        if not is_prefilled:
            self._exact.failed(request_id)
        elif flight.is_exact:
            self._exact.compare(flight)
        if self._admission is not None:
            self._admission.recorded(flight, flight.outcome, now)
        return self._close(flight) if flight.ended_at is not None else []

    def _expire(self, now: float) -> list[Command]:
        commands: list[Command] = []
        self._exact.expire(now)
        for late in islice(self._fetches.late(now), MAX_EXPIRED_PER_STEP):
            commands += self._late(late, now)
        waiting = self._awaiting_record
        while waiting and waiting[0][0] <= now and len(commands) < MAX_EXPIRED_PER_STEP:
            flight = self._flights.get(waiting.popleft()[1])
            if flight is not None:
                commands += self._close(flight)
        return commands

    def _close(self, flight: Flight) -> list[Command]:
        """Drop the flight and account for it: the one place where every request that was forwarded ends."""
        request, outcome = flight.request, flight.outcome
        del self._flights[request.id]
        if self._admission is not None:
            self._admission.closed(flight, self._now)
        waiting = self._awaiting_record
        while waiting and waiting[0][1] not in self._flights:
            waiting.popleft()
        served = self._fleet.at_address(outcome.served_address) if outcome and outcome.served_address else None
        flight.served_id = served.endpoint.id if served else ""
        # The flight stays among the explanations; its blocks may be large and have taught what they could.
        flight.blocks = b""
        if outcome is not None and (outcome.is_upstream_failure or outcome.is_cut or outcome.status >= 500):
            self._errors_total += 1
        return [account_of(flight)]

    # ------------------------------------------------------------------ what others may read

    def status(self) -> PoolStatus:
        """A snapshot for the admin pages."""
        uncached = self._books.uncached_tokens(self._now, self._mean_uncached_tokens)
        gauges = self._index.gauges()
        rows, used_bytes, budget_bytes = self._exact.gauges()
        return PoolStatus(
            endpoints=fleet_status(self._fleet, uncached, self._models.names_at, self._exact.state, self._now),
            requests_total=self._requests_total,
            errors_total=self._errors_total,
            inflight=self._books.inflight,
            peers=self._peers.gauges(),
            returns=self._returns.gauges(),
            latency=self._forecasts.reports(),
            flow=self._admission.status(self._now) if self._admission is not None else FlowStatus(),
            unclosed=len(self._flights),
            orphan_records=self._orphan_records,
            index_entries=gauges.rows,
            index_bytes=gauges.used_bytes,
            index_budget_bytes=gauges.budget_bytes,
            exact_entries=rows,
            exact_bytes=used_bytes,
            exact_budget_bytes=budget_bytes,
            warnings=self._exact.warnings(),
        )
