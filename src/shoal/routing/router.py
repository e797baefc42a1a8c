"""The picker's brain: every event comes in at `handle`, every decision leaves as a command.

Owns the order of things: resolve the model, find candidates, fill the columns, schedule, book, forward, release,
learn.  The figures live in `fleet` and `books`, the choice in `scheduling`, the bytes in the hosts.
"""

from collections import deque

import msgspec

from shoal.kernel import Chance, ClockWentBack
from shoal.pool import (
    EndpointState,
    FleetView,
    Outcome,
    Refusal,
    RefusalReason,
    Request,
    ServedModel,
)
from shoal.prefix import BLOCK_TOKENS, EstimatedIndex, capacity_blocks, read_blocks
from shoal.routing.books import Books, Flight
from shoal.routing.candidates import Candidates
from shoal.routing.columns import COMPLETE, Columns
from shoal.routing.commands import Account, Command, Forward, Refuse
from shoal.routing.config import RouterConfig, load
from shoal.routing.estimate import TokenEstimator
from shoal.routing.events import (
    Arrived,
    Configured,
    Ended,
    EndpointChanged,
    EndpointJoined,
    EndpointLeft,
    Event,
    LoadSeen,
    ModelsSeen,
    PeerJoined,
    PeerLeft,
    PeerSynced,
    PeerTaught,
    PeerTold,
    Recorded,
    Ticked,
)
from shoal.routing.explain import Explanations
from shoal.routing.fleet import Fleet
from shoal.routing.lessons import Lessons
from shoal.routing.models import ModelTable
from shoal.routing.outbox import Outbox
from shoal.routing.peers import Peers, teach
from shoal.routing.status import PoolStatus, endpoint_status, own_requests
from shoal.scheduling import Scheduler
from shoal.scheduling.plugin import FEW

# A record comes 5 to 100 ms after the end of its stream; past this it never will.
RECORD_TIMEOUT_S = 30.0
# What one step may close, so that no step of a journal is large.
MAX_EXPIRED_PER_STEP = 500
# After a start or the loss of a peer, load that others put on the engines is read from their metrics; own books replace
# it over this time.
ADOPTION_S = 20.0


class Router:
    """The router machine.  Not thread-safe; one writer.

    config: validated.  chance: every draw comes from its streams.  shares_pool: whether other routers send to the same
    endpoints, so that their load must be read from the engines' metrics while no peer tells it.  outbox: what peers
    have to hear, open while there are any.
    """

    def __init__(self, config: RouterConfig, chance: Chance, *, shares_pool: bool = False) -> None:
        self._chance = chance
        self._shares_pool = shares_pool
        self._fleet = Fleet()
        self._books = Books(self._fleet)
        self._models = ModelTable()
        self._estimator = TokenEstimator()
        self._flights: dict[str, Flight] = {}
        self._awaiting_record: deque[tuple[float, str]] = deque()
        self._index = EstimatedIndex(config.pool.index.budget_bytes)
        self._now = float("-inf")
        self._started_at: float | None = None
        self._requests_total = 0
        self._errors_total = 0
        self._orphan_records = 0
        self._mean_uncached_tokens = 0.0
        self._candidates = Candidates(self._fleet, self._models)
        self.outbox = Outbox(self._books, self._flights)
        self._lessons = Lessons(self._fleet, self._books, self._candidates, self._index, self.outbox)
        self._peers = Peers(self._fleet, self._books, self._index, self._lessons)
        self.explanations = Explanations()
        self._config = config
        self._scheduler = Scheduler(config.policy, chance)
        self._models.configure(config.pool.aliases, config.rewrites)

    # ------------------------------------------------------------------ the door

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply one event.  Raises ClockWentBack when `now` is older than the last one."""
        if now < self._now:
            raise ClockWentBack(now, self._now)
        self._now = now
        if self._started_at is None:
            self._started_at = now
        match event:
            case Arrived():
                return self._arrived(event, now)
            case Ended():
                return self._ended(event.request_id, now)
            case Recorded():
                return self._recorded(event.request_id, event.outcome, now)
            case LoadSeen():
                self._load_seen(event, now)
            case ModelsSeen():
                self._models_seen(event)
            case EndpointJoined():
                self._joined(event, now)
            case EndpointChanged():
                self._changed(event)
            case EndpointLeft():
                self._left(event.endpoint_id)
            case Configured():
                self._apply(load(event.text, "reload"))
            case Ticked():
                self._peers.expire(now)
                return self._expire(now)
            case PeerTold() | PeerJoined() | PeerSynced() | PeerTaught() | PeerLeft():
                self._peers.handle(event, now)
        return []

    def inflight_at(self, endpoint_id: str) -> int:
        """Own requests in flight on an endpoint, 0 for an unknown one."""
        member = self._fleet.get(endpoint_id)
        return own_requests(self._fleet.columns, member.row) if member is not None else 0

    def deadline(self) -> float | None:
        """When the oldest missing record is given up, or a lost peer's bookings; None when nothing is waited for."""
        lost_at = self._peers.deadline()
        if not self._awaiting_record:
            return lost_at
        record_at = self._awaiting_record[0][0]
        return record_at if lost_at is None else min(record_at, lost_at)

    # ------------------------------------------------------------------ configuration and fleet

    def _apply(self, config: RouterConfig) -> None:
        self._config = config
        scheduler = Scheduler(config.policy, self._chance)
        scheduler.adopt(self._scheduler)
        self._scheduler = scheduler
        self._models.configure(config.pool.aliases, config.rewrites)
        self._candidates.invalidate()

    def _joined(self, event: EndpointJoined, now: float) -> None:
        known_member = self._fleet.get(event.endpoint.id)
        if known_member is not None:
            self._fleet.join(event.endpoint, event.state, known_member.slot)
            return
        member = self._fleet.join(event.endpoint, event.state, self._index.open_slot())
        self._peers.endpoint_joined(member, now)

    def _changed(self, event: EndpointChanged) -> None:
        member = self._fleet.get(event.endpoint_id)
        if member is None:
            return
        if event.state is EndpointState.LOADING and member.state is not EndpointState.LOADING:
            # It went away: whatever it held, a restarted engine starts with an empty cache.
            self._index.clear(member.slot)
        if event.state is EndpointState.READY and member.state is EndpointState.LOADING:
            self._candidates.succeeded(member)
        self._fleet.set_state(member, event.state)

    def _left(self, endpoint_id: str) -> None:
        member = self._fleet.leave(endpoint_id)
        if member is None:
            return
        self._index.remove(member.slot)
        self._models.remove(endpoint_id)
        self._candidates.forget(endpoint_id)
        self._scheduler.endpoint_left(endpoint_id)

    def _models_seen(self, event: ModelsSeen) -> None:
        member = self._fleet.get(event.endpoint_id)
        if member is not None:
            self._models.update(event.endpoint_id, event.models)
            self._candidates.invalidate()

    def teach(self, peer: str) -> PeerTaught:
        """Return the first part of what a picker that begins takes over, under the name `peer`; the rows follow."""
        return teach(peer, self._fleet, self._index)

    def teach_rows(self, peer: str, at: int, clock: int) -> tuple[PeerTaught, int | None]:
        """Return the index's next rows from row `at` on, and where to go on; clock: of the first part."""
        rows, more = self._index.give(at, clock)
        return PeerTaught(peer, rows=rows), more

    def _load_seen(self, event: LoadSeen, now: float) -> None:
        member = self._fleet.get(event.endpoint_id)
        if member is None:
            return
        before, signals = member.signals, event.signals
        if before is not None and _went_back(before.prefix_query_tokens, signals.prefix_query_tokens):
            # Another process answers at this address: its cache is empty, and the failures were the old one's.
            self._index.clear(member.slot)
            self._candidates.succeeded(member)
        self._fleet.take_signals(member, signals, now)
        if signals.num_blocks and signals.block_size_tokens:
            capacity = capacity_blocks(signals.num_blocks, signals.block_size_tokens)
            self._index.set_capacity(member.slot, capacity)
        foreign = 0.0
        if signals.running is not None and self._started_at is not None:
            seen = signals.running + (signals.waiting or 0.0)
            # What a lost peer sent goes on behind a gateway, and only the engines know of it then.
            since = max(self._started_at, self._peers.lost_at)
            is_blind = self._shares_pool and not self._peers.is_connected
            share = 1.0 if is_blind else max(0.0, 1.0 - (now - since) / ADOPTION_S)
            foreign = share * max(0.0, seen - float(self._fleet.columns["inflight_requests"][member.row]))
        self._fleet.set_foreign(member, foreign)

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
        if not self._models.is_known(resolved.target):
            return [self._refuse(request, RefusalReason.MODEL_NOT_FOUND, self._unknown_model(resolved.target))]
        rows = self._candidates.rows(resolved.target, request, now)
        if len(rows) == 0:
            return [self._refuse(request, RefusalReason.NO_ENDPOINTS, self._no_endpoint(resolved.target), 1.0)]
        blocks = read_blocks(event.blocks)
        match = self._index.match(blocks) if len(blocks) else None
        # Plugins see the model that will be served; the request keeps the name that the client gave.
        asked = msgspec.structs.replace(request, model=resolved.target) if resolved.is_rewritten else request
        fleet = self._fleet
        columns = Columns(fleet, self._books, self._models, asked, match, now, self._mean_uncached_tokens)
        among = None if len(rows) == len(fleet) else rows
        view = FleetView(fleet.endpoints, columns, fleet.signals, among, COMPLETE)
        decision = self._scheduler.schedule(asked, view, now)
        if isinstance(decision, Refusal):
            return [self._refuse(request, decision.reason, decision.message, decision.retry_after_s)]
        member = fleet.at(decision.chosen[0])
        flight = Flight(request, resolved.target, event.blocks, decision, now)
        if match is not None:
            flight.expectation = self._index.expect(match, member.slot)
            flight.matched_tokens = min(flight.expectation.blocks * BLOCK_TOKENS, request.prompt_tokens)
            self._index.add(member.slot, blocks, match)
            if match.runs:
                flight.matched = view.values("matched_tokens") if len(rows) <= FEW else view.column("matched_tokens")
        self._books.book(flight, member, now)
        self._mean_uncached_tokens += 0.02 * (flight.uncached_tokens - self._mean_uncached_tokens)
        member.requests_total += 1
        self._flights[request.id] = flight
        self._scheduler.dispatched(asked, view, decision, now)
        self.explanations.keep(flight)
        return [self._forward(flight, resolved.target if resolved.is_rewritten else "")]

    def _forward(self, flight: Flight, model: str) -> Forward:
        request, at = flight.request, self._fleet.at
        chosen = flight.decision.chosen if request.retry_allowed else flight.decision.chosen[:1]
        return Forward(
            request.id,
            tuple([at(name).endpoint.address for name in chosen]),
            self._scheduler.response_headers(request, flight.decision),
            model,
            request.retry_allowed,
        )

    # ------------------------------------------------------------------ refusals

    def _refuse(
        self, request: Request, reason: RefusalReason, message: str, retry_after_s: float | None = None
    ) -> Refuse:
        self._errors_total += 1
        return Refuse(request.id, Refusal(reason=reason, message=message, retry_after_s=retry_after_s), request.api)

    def _unknown_model(self, name: str) -> str:
        near = self._models.near(name)
        hint = f" Did you mean {', '.join(near)}?" if near else " GET /v1/models lists the models of this pool."
        return f"The model `{name[:200]}` does not exist in this pool.{hint}"

    def _no_endpoint(self, model: str) -> str:
        known = len(self._fleet)
        loading = sum(member.state is EndpointState.LOADING for member in self._fleet)
        what = f"No endpoint is ready for the model `{model[:200]}`" if model else "No endpoint is ready"
        if not known:
            return f"{what}: the pool knows none."
        return f"{what}: {loading} of {known} still loading." if loading else f"{what}: {known} known, 0 loading."

    # ------------------------------------------------------------------ endings: all meet in _close

    def _ended(self, request_id: str, now: float) -> list[Command]:
        flight = self._flights.get(request_id)
        if flight is None or flight.ended_at is not None:
            return []
        flight.ended_at = now
        self._books.release(flight, now)
        if flight.outcome is not None:
            return self._close(flight)
        self._awaiting_record.append((now + RECORD_TIMEOUT_S, request_id))
        return self._expire(now)

    def _recorded(self, request_id: str, outcome: Outcome, now: float) -> list[Command]:
        flight = self._flights.get(request_id)
        if flight is None or flight.outcome is not None:
            self._orphan_records += flight is None
            return []
        flight.outcome = self._complete(flight.request, outcome)
        self._lessons.learn(flight, flight.outcome, self._config.pool.ejection, now)
        return self._close(flight) if flight.ended_at is not None else []

    def _complete(self, request: Request, outcome: Outcome) -> Outcome:
        """Estimate the completion tokens that the engine did not report, and mark them so."""
        if outcome.completion_tokens is not None:
            if not outcome.is_cut and not outcome.is_client_gone and not outcome.is_estimated:
                self._estimator.learn(
                    request.api, request.is_streaming, outcome.response_bytes, outcome.completion_tokens
                )
            return outcome
        if outcome.status != 200 or not outcome.response_bytes:
            return outcome
        tokens = self._estimator.tokens(request.api, request.is_streaming, outcome.response_bytes)
        return msgspec.structs.replace(outcome, completion_tokens=tokens, is_estimated=True)

    def _expire(self, now: float) -> list[Command]:
        commands: list[Command] = []
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
        waiting = self._awaiting_record
        while waiting and waiting[0][1] not in self._flights:
            waiting.popleft()
        served = self._fleet.at_address(outcome.served_address) if outcome and outcome.served_address else None
        served_id = served.endpoint.id if served else ""
        flight.served_id = served_id
        # The flight stays among the explanations; its blocks may be large and have taught what they could.
        flight.blocks = b""
        if outcome is not None and (outcome.is_upstream_failure or outcome.is_cut or outcome.status >= 500):
            self._errors_total += 1
        return [
            Account(
                request_id=request.id,
                client_id=request.client_id,
                api=request.api,
                model=request.model,
                target_model=flight.target_model,
                tenant_id=request.tenant_id,
                endpoint_id=served_id,
                is_streaming=request.is_streaming,
                arrived_at=flight.arrived_at,
                queue_s=flight.dispatched_at - flight.arrived_at,
                prompt_tokens=request.prompt_tokens,
                predicted_cached_tokens=flight.matched_tokens,
                outcome=outcome or Outcome(),
                trace_parent=request.headers.get("traceparent", ""),
                is_moved=bool(served_id) and served_id != flight.decision.chosen[0],
                is_recorded=outcome is not None,
            )
        ]

    # ------------------------------------------------------------------ what others may read

    def status(self) -> PoolStatus:
        """A snapshot for the admin pages."""
        uncached = self._books.uncached_tokens(self._now, self._mean_uncached_tokens)
        gauges = self._index.gauges()
        return PoolStatus(
            endpoints=[
                endpoint_status(
                    m, self._fleet.columns, int(uncached[m.row]), self._models.names_at(m.endpoint.id), self._now
                )
                for m in self._fleet
            ],
            requests_total=self._requests_total,
            errors_total=self._errors_total,
            inflight=self._books.inflight,
            peers=self._peers.gauges(),
            unclosed=len(self._flights),
            orphan_records=self._orphan_records,
            index_entries=gauges.rows,
            index_bytes=gauges.used_bytes,
            index_budget_bytes=gauges.budget_bytes,
            warnings=[*self._config.warnings],
        )


def _went_back(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after < before
