"""Routers, engines and clients in virtual time, as one pool.

Owns the way of a request: a client sends it, a router places it, an engine serves it, the record comes back a little
later.  The router is the one that runs live; what it is told, and when, is all that is modelled here.
"""

import gc
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from shoal.engine import Aborted, Finish, Refuse, Submitted
from shoal.engine.changes import Change
from shoal.engine.hosttier import HostTier
from shoal.kernel import Chance
from shoal.pool import Api, EndpointState, Outcome, Request, ServedModel
from shoal.pool.kvevents import KvState
from shoal.routing import Arrived, Command, Ended, Forward, Recorded, Router, Ticked, commands, events
from shoal.routing.claims import Claims
from shoal.routing.config import load
from shoal.scheduling.slo import SLO_TPOT_HEADER, SLO_TTFT_HEADER, slo_s
from shoal.simulation.loop import Loop, Rank
from shoal.simulation.nodes import Node, NodeConfig, router_events
from shoal.simulation.results import Sample
from shoal.simulation.sessions import Session, Turn
from shoal.simulation.timeline import Timeline
from shoal.wire.headers import read_headers
from shoal.wire.hints import read_hints

_PROGRESS_EVERY = 50
OnStep = Callable[[int, float, events.Event, list[Command]], None]
Places = Callable[[str], Sequence[str]]
"""Given the session of a request, names the endpoints to try in their order."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A pool.  router: text of a configuration.  routers: pickers that share what they know.

    All delays in seconds.  network_s: picker to engine.  record_s: end of an answer to its record.  scrape_s: between
    two readings of an engine's metrics.  gossip_s: between pickers.  tokenise_s: until a prompt's tokens are there.
    detect_s: until a dead engine is noticed.  concurrency: clients, for sessions without a time of their own.
    store_blocks: that a store holds which engines share, 0 for none.
    """

    nodes: tuple[NodeConfig, ...]
    router: str = ""
    routers: int = 1
    seed: int = 0
    concurrency: int = 32
    network_s: float = 0.0005
    record_s: float = 0.02
    scrape_s: float = 0.5
    gossip_s: float = 0.01
    tokenise_s: float = 0.002
    detect_s: float = 2.0
    store_blocks: int = 0


class Talk:
    """A session under way.  parent: who waits for it.  children: how many sessions it waits for itself.

    slo_*: the latency that its client asks for, NaN for none.
    """

    __slots__ = ("begun_at", "children", "parent", "session", "slo_tpot_s", "slo_ttft_s", "turns")

    def __init__(self, session: Session, parent: "Talk | None", now: float) -> None:
        self.session = session
        self.turns = session.turns()
        self.parent = parent
        self.children = 0
        self.begun_at = now
        self.slo_ttft_s = self.slo_tpot_s = math.nan
        if session.headers:
            wishes = Request(id="", headers=dict(session.headers))
            self.slo_ttft_s = slo_s(wishes, SLO_TTFT_HEADER) or math.nan
            self.slo_tpot_s = slo_s(wishes, SLO_TPOT_HEADER) or math.nan


class Flight:
    """One request on its way.  tenant: as the router knows it.  is_submitted: whether its engine has it."""

    __slots__ = ("arrived_at", "attempts", "endpoints", "is_submitted", "node", "router", "talk", "tenant", "turn")

    def __init__(self, talk: Talk, turn: Turn, tenant: str, router: int, now: float) -> None:
        self.talk = talk
        self.tenant = tenant
        self.turn = turn
        self.router = router
        self.arrived_at = now
        self.attempts = 0
        self.is_submitted = False
        self.endpoints: deque[str] = deque()
        self.node: Node | None = None


class Cluster:
    """One run: `run` it with its sessions; `samples` has one entry per request that ended.

    on_progress: told now and then how many requests have ended, and which share of the sessions (0 to 1).  timeline:
    written now and then, when there is one.  on_step: told of each step of a router, its number first.  places: decides
    in the place of all routers, of which there are none then.
    """

    def __init__(self, config: ClusterConfig, *, on_step: OnStep | None = None, places: Places | None = None) -> None:
        self.loop = Loop()
        self._on_step = on_step
        self.samples: list[Sample] = []
        self.config = config
        loaded = load(config.router, "router")
        self._places = places
        count = config.routers if places is None else 0
        shares = count > 1
        self._chance = Chance(config.seed).stream("clients")
        self.routers = [Router(loaded, Chance(config.seed + n), shares_pool=shares) for n in range(count)]
        self._is_exact = loaded.precise is not None
        self._claims = Claims(loaded)
        self._kept_headers = loaded.request_headers
        store = HostTier(config.store_blocks) if config.store_blocks else None
        self._nodes = {
            each.id: Node(n, each, self.loop, self._answered, self._cached, store)
            for n, each in enumerate(config.nodes)
        }
        self._by_address = {node.endpoint.address: node for node in self._nodes.values()}
        self._flights: dict[str, Flight] = {}
        self._pending = 0
        self._idle: deque[Session] = deque()
        self._coming: Iterator[Session] = iter(())
        self._count = 0
        self.on_progress: Callable[[int, float], None] | None = None
        self.timeline: Timeline | None = None
        self._sessions = 0
        self._deadlines = [math.inf] * config.routers
        for node in self._nodes.values():
            self._join(node)
        if shares:
            self._introduce()

    def run(self, sessions: Iterable[Session]) -> None:
        """Serve all sessions to their end.

        Those with a time of arrival come then; the others are gone through by `concurrency` clients.  An iterator is
        asked for a session when the one before it begins, so that a million need no memory; its times must not go back.
        """
        self._coming = sessions if isinstance(sessions, Iterator) else iter(())
        if isinstance(sessions, Iterator):
            self._expect()
        else:
            for session in sessions:
                self._enlist(session)
        for _ in range(min(self.config.concurrency, len(self._idle))):
            self._begin(self._idle.popleft())
        self._scrape()
        thresholds = gc.get_threshold()
        # A run makes many objects that live long and none that only the collector would find.
        gc.set_threshold(200_000, *thresholds[1:])
        try:
            self.loop.run(lambda: self._pending == 0)
        finally:
            gc.set_threshold(*thresholds)

    def _expect(self) -> None:
        """Enlist sessions up to the next one that has a time."""
        for session in self._coming:
            self._enlist(session)
            if session.arrives_s is not None:
                return

    def _enlist(self, session: Session) -> None:
        self._sessions += 1
        self._pending += 1
        if session.arrives_s is None:
            self._idle.append(session)
        else:
            self.loop.at(session.arrives_s, Rank.CLIENT, self._arrive, session)

    def _arrive(self, session: Session) -> None:
        self._expect()
        self._begin(session)

    # ------------------------------------------------------------------ what happens to engines

    def kill(self, name: str) -> None:
        """Have an engine die now: what it had not begun to answer goes on elsewhere, the rest is cut."""
        node = self._nodes[name]
        node.is_up = False
        for request_id, flight in list(self._flights.items()):
            if flight.node is not node:
                continue
            if flight.is_submitted and node.has_begun(request_id):
                self._cut(request_id, flight, node)
            else:
                flight.node = None
                self._try_next(request_id, flight)
        self.loop.after(self.config.detect_s, Rank.WORLD, self._noticed, node)

    def revive(self, name: str) -> None:
        """Have a dead engine come back with an empty cache."""
        node = self._nodes[name]
        node.restart()
        for number in range(len(self.routers)):
            self._feed(number, events.EndpointChanged(name, EndpointState.LOADING))
        self.loop.after(self.config.detect_s, Rank.WORLD, self._ready, node)

    def slow(self, name: str, factor: float) -> None:
        """Have an engine's steps take `factor` times as long from now on."""
        self._nodes[name].slow_down(factor)

    def _noticed(self, node: Node) -> None:
        if not node.is_up:
            for number in range(len(self.routers)):
                self._feed(number, events.EndpointChanged(node.config.id, EndpointState.LOADING))

    def _join(self, node: Node) -> None:
        for number in range(len(self.routers)):
            self._feed(number, events.EndpointJoined(node.endpoint))
        self._ready(node)

    def _ready(self, node: Node) -> None:
        name = node.config.id
        for number in range(len(self.routers)):
            self._feed(number, events.ModelsSeen(name, (ServedModel(id="m"),)))
            self._feed(number, events.EndpointChanged(name, EndpointState.READY))
            if self._is_exact:
                self._feed(number, events.BlocksCleared(name))
                self._feed(number, events.KvStreamChanged(name, KvState.FRESH))

    def _scrape(self) -> None:
        timeline = self.timeline if self.timeline is not None and self.timeline.wants() else None
        if timeline is not None:
            timeline.tick(self.loop.now, sum(flight.node is None for flight in self._flights.values()))
        for node in self._nodes.values():
            if node.is_up:
                signals = node.signals()
                if timeline is not None:
                    timeline.see(node.config.id, signals)
                seen = events.LoadSeen(node.config.id, signals)
                for number in range(len(self.routers)):
                    self._tell(number, seen)
        for number in range(len(self.routers)):
            self._follow(number)
        if self._pending:
            self.loop.after(self.config.scrape_s, Rank.NEWS, self._scrape)

    def _cached(self, node: Node, changes: list[Change]) -> None:
        if self._is_exact:
            self.loop.after(self.config.network_s, Rank.NEWS, self._hear, list(router_events(node, changes)))

    def _hear(self, heard: list[events.Event]) -> None:
        for number in range(len(self.routers)):
            for event in heard:
                self._tell(number, event)
            self._follow(number)

    # ------------------------------------------------------------------ pickers

    def _introduce(self) -> None:
        for number, router in enumerate(self.routers):
            router.outbox.open()
            for other in range(len(self.routers)):
                if other != number:
                    self._feed(number, events.PeerJoined(str(other)))

    def _feed(self, number: int, event: events.Event) -> None:
        """Give a router an event, carry out what it wants, and see what follows."""
        self._tell(number, event)
        self._follow(number)

    def _tell(self, number: int, event: events.Event) -> None:
        ordered = self.routers[number].handle(event, self.loop.now)
        if self._on_step is not None:
            self._on_step(number, self.loop.now, event, ordered)
        for command in ordered:
            self._carry_out(number, command)

    def _follow(self, number: int) -> None:
        """Have its peers hear the news of a router, and have it told when its deadline has come."""
        router = self.routers[number]
        if len(self.routers) > 1 and (news := tuple(router.outbox.take())):
            told = events.PeerTold(str(number), news)
            for other in range(len(self.routers)):
                if other != number:
                    self.loop.after(self.config.gossip_s, Rank.NEWS, self._feed, other, told)
        deadline = router.deadline()
        if deadline is not None and deadline < self._deadlines[number]:
            self._deadlines[number] = deadline
            self.loop.at(max(deadline, self.loop.now), Rank.NEWS, self._tick, number, deadline)

    def _tick(self, number: int, deadline: float) -> None:
        if self._deadlines[number] == deadline:
            self._deadlines[number] = math.inf
            self._feed(number, Ticked())

    def _carry_out(self, number: int, command: Command) -> None:
        match command:
            case Forward():
                flight = self._flights.get(command.request_id)
                if flight is not None:
                    flight.endpoints.extend(command.endpoints)
                    self._try_next(command.request_id, flight)
            case commands.Refuse():
                flight = self._flights.pop(command.request_id, None)
                if flight is not None:
                    self._close(flight, None)
            case commands.Evict():
                self.loop.after(0.0, Rank.NEWS, self._evict, number, command)
            case commands.Fetch():
                self.loop.after(self.config.tokenise_s, Rank.NEWS, self._fetched, number, command)

    def _evict(self, number: int, command: commands.Evict) -> None:
        """Do as the direct data plane does: take it back before its first byte, or cut it where that is allowed."""
        request_id = command.request_id
        flight = self._flights.get(request_id)
        node = flight.node if flight is not None else None
        if flight is None or node is None:
            self._feed(number, events.Kept(request_id))
        elif not flight.is_submitted or not node.has_begun(request_id):
            flight.node = None
            flight.endpoints.clear()
            node.feed(Aborted(request_id=request_id))
            self._feed(number, events.Evicted(request_id))
        elif command.may_cut:
            node.feed(Aborted(request_id=request_id))
            self._cut(request_id, flight, node)
        else:
            self._feed(number, events.Kept(request_id))

    def _cut(self, request_id: str, flight: Flight, node: Node) -> None:
        """End an answer of which its client has got a part."""
        del self._flights[request_id]
        cut = Outcome(status=200, served_address=node.endpoint.address, attempts=flight.attempts, is_cut=True)
        self._end(request_id, flight, cut)
        self._close(flight, None)

    def _fetched(self, number: int, fetch: commands.Fetch) -> None:
        flight = self._flights.get(fetch.request_id)
        if flight is not None:
            prompt = flight.turn.prompt
            keys = tuple(events.TokenKeys(size, prompt.keys(size)) for size in fetch.block_sizes)
            self._feed(number, events.Fetched(fetch.request_id, prompt.tokens, keys))

    # ------------------------------------------------------------------ the way of a request

    def _begin(self, session: Session, parent: Talk | None = None) -> None:
        self._go_on(Talk(session, parent, self.loop.now))

    def _go_on(self, talk: Talk) -> None:
        """Have a session do what comes next, or end."""
        turn = next(talk.turns, None)
        if isinstance(turn, Turn):
            delay_s = max(turn.think_s, talk.begun_at + turn.at_s - self.loop.now)
            self.loop.after(delay_s, Rank.CLIENT, self._send, talk, turn)
        elif turn is not None:
            talk.children = len(turn.sessions)
            if not turn.sessions:
                self._go_on(talk)
            for session in turn.sessions:
                own, parent = session, talk.session
                child = own._replace(headers=own.headers or parent.headers, tenant=own.tenant or parent.tenant)
                self.loop.after(turn.think_s, Rank.CLIENT, self._begin, child, talk)
        else:
            self._leave(talk)

    def _leave(self, talk: Talk) -> None:
        parent = talk.parent
        if parent is not None:
            parent.children -= 1
            if not parent.children:
                self._go_on(parent)
            return
        self._pending -= 1
        if talk.session.arrives_s is None and self._idle:
            self._begin(self._idle.popleft())

    def _send(self, talk: Talk, turn: Turn) -> None:
        self._count += 1
        session = talk.session
        number = int(self._chance.integers(len(self.routers))) if len(self.routers) > 1 else 0
        request = self._request(f"r{self._count}", session, turn)
        flight = self._flights[request.id] = Flight(talk, turn, request.tenant_id, number, self.loop.now)
        if self._places is None:
            self._feed(number, Arrived(request, turn.prompt.hashes()))
        else:
            flight.endpoints.extend(self._nodes[name].endpoint.address for name in self._places(session.id))
            self._try_next(request.id, flight)

    def _request(self, request_id: str, session: Session, turn: Turn) -> Request:
        """What a picker makes of a turn."""
        heads = read_headers(session.headers, self._kept_headers)
        tokens = turn.prompt.tokens
        request = Request(
            id=request_id,
            api=Api.CHAT,
            model=session.model,
            is_streaming=True,
            prompt_tokens=tokens,
            prompt_bytes=4 * tokens,
            body_bytes=4 * tokens,
            max_output_tokens=turn.max_tokens or None,
            tenant_id=session.tenant or heads.tenant_id,
            session_id=session.id,
            objective=heads.objective,
            headers=heads.kept,
            hints=read_hints(session.headers, None) if session.headers else None,
        )
        return self._claims.settle(request, "")

    def _try_next(self, request_id: str, flight: Flight) -> None:
        """Send a request to the next endpoint of its list; without one it has failed."""
        while flight.endpoints:
            node = self._by_address[flight.endpoints.popleft()]
            flight.attempts += 1
            if node.is_up:
                flight.node, flight.is_submitted = node, False
                delay_s = self.config.network_s + node.config.engine.profile.request_s
                self.loop.after(delay_s, Rank.ENGINE, self._submit, request_id, node)
                return
        del self._flights[request_id]
        self._end(request_id, flight, Outcome(status=503, attempts=max(1, flight.attempts), is_upstream_failure=True))
        self._close(flight, None)

    def _submit(self, request_id: str, node: Node) -> None:
        flight = self._flights.get(request_id)
        if flight is None or flight.node is not node or flight.is_submitted:
            return
        turn = flight.turn
        flight.is_submitted = True
        node.feed(
            Submitted(
                request_id=request_id,
                prompt_tokens=turn.prompt.tokens,
                output_tokens=turn.output_tokens,
                max_tokens=turn.max_tokens,
                block_hashes=turn.prompt.blocks(node.block_size),
                adapter=flight.talk.session.adapter,
            )
        )

    def _answered(self, node: Node, ended: Finish | Refuse) -> None:
        flight = self._flights.get(ended.request_id)
        if flight is None or flight.node is not node:
            return
        del self._flights[ended.request_id]
        now = self.loop.now
        if isinstance(ended, Refuse):
            self._end(ended.request_id, flight, Outcome(status=400, served_address=node.endpoint.address, attempts=1))
            self._close(flight, None)
            return
        first_at = now if ended.first_token_at is None else ended.first_token_at
        outcome = Outcome(
            status=200,
            served_address=node.endpoint.address,
            attempts=flight.attempts,
            ttft_s=first_at - flight.arrived_at,
            duration_s=now - flight.arrived_at,
            prompt_tokens=ended.prompt_tokens,
            completion_tokens=ended.output_tokens,
            cached_tokens=ended.cached_tokens,
        )
        self._end(ended.request_id, flight, outcome)
        self._close(flight, outcome)

    def _end(self, request_id: str, flight: Flight, outcome: Outcome) -> None:
        if self._places is not None:
            return
        self._feed(flight.router, Ended(request_id))
        self.loop.after(self.config.record_s, Rank.NEWS, self._feed, flight.router, Recorded(request_id, outcome))

    def _close(self, flight: Flight, outcome: Outcome | None) -> None:
        """Note what came of a request, and have its session go on; a session that was refused ends."""
        turn, now = flight.turn, self.loop.now
        served = flight.node.config.id if flight.node is not None and outcome is not None else ""
        ttft_s = outcome.ttft_s if outcome is not None and outcome.ttft_s is not None else math.nan
        duration_s = now - flight.arrived_at
        output = (outcome.completion_tokens or 0) if outcome is not None else 0
        tpot_s = (duration_s - ttft_s) / (output - 1) if output > 1 else math.nan
        cached = (outcome.cached_tokens or 0) if outcome is not None else 0
        self.samples.append(
            Sample(
                flight.arrived_at,
                ttft_s,
                tpot_s,
                duration_s,
                turn.prompt.tokens,
                cached,
                output,
                served,
                flight.tenant,
                outcome is None,
                flight.talk.session.id,
                flight.talk.slo_ttft_s,
                flight.talk.slo_tpot_s,
            )
        )
        if self.on_progress is not None and not len(self.samples) % _PROGRESS_EVERY:
            self.on_progress(len(self.samples), 1.0 - self._pending / max(1, self._sessions))
        if outcome is not None:
            self._go_on(flight.talk)
        else:
            self._leave(flight.talk)

    def abort(self, request_id: str) -> None:
        """Have the client of a request leave now."""
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return
        if flight.node is not None:
            flight.node.feed(Aborted(request_id=request_id))
        self._end(request_id, flight, Outcome(status=0, attempts=flight.attempts, is_client_gone=True))
        self._close(flight, None)
