"""Routers, engines and clients in virtual time, as one pool.

Owns the way of a request: a client sends it, a router places it, an engine serves it, the record comes back a little
later.  The router is the one that runs live; what it is told, and when, is all that is modelled here.  Where engines
have roles, two routers decide, one over the engines that decode and one over those that prefill (`handover`).
"""

import gc
import itertools
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
from shoal.routing import Arrived, Command, Ended, Forward, Recorded, Router, commands, events
from shoal.routing.claims import Claims
from shoal.routing.config import RouterConfig, load
from shoal.simulation.flights import Flight, Talk
from shoal.simulation.handover import Handover, Links, Role
from shoal.simulation.loop import Loop, Rank
from shoal.simulation.network import Network
from shoal.simulation.nodes import Node, NodeConfig, router_events
from shoal.simulation.pickers import OnStep, Pickers
from shoal.simulation.results import Sample
from shoal.simulation.sessions import Session, Turn
from shoal.simulation.timeline import Timeline
from shoal.wire.headers import read_headers
from shoal.wire.hints import read_hints

_PROGRESS_EVERY = 50
LEFT_RUNS = 16
"""What is left of so many runs only the collector finds, 50 MB of each router, and it would never look by itself; to
look each time costs more than a short run."""
_runs = itertools.count(1)
Places = Callable[[str], Sequence[str]]
"""Given the session of a request, names the endpoints to try in their order."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A pool.  router: text of a configuration.  routers: pickers that share what they know.

    All delays in seconds.  network_s: picker to engine; jitter_s: what comes on top, see `Network`.  record_s: end of
    an answer to its record.  scrape_s: between two readings of an engine's metrics.  gossip_s: between pickers.
    tokenise_s: until a prompt's tokens are there.  detect_s: until a dead engine is noticed.  concurrency: clients, for
    sessions without a time of their own.  store_blocks: that a store holds which engines share, 0 for none.  handover:
    for engines with roles.  late: engines that are not there at the start.
    """

    nodes: tuple[NodeConfig, ...]
    router: str = ""
    routers: int = 1
    seed: int = 0
    concurrency: int = 32
    network_s: float = 0.0005
    jitter_s: tuple[float, ...] = ()
    record_s: float = 0.02
    scrape_s: float = 0.5
    gossip_s: float = 0.01
    tokenise_s: float = 0.002
    detect_s: float = 2.0
    store_blocks: int = 0
    handover: Handover = Handover()
    late: frozenset[str] = frozenset()

    @property
    def has_roles(self) -> bool:
        """Whether some engines only prefill."""
        return any(node.role is Role.PREFILL for node in self.nodes)

    @property
    def prefill_router(self) -> str:
        """Text of the configuration that places prefills."""
        return self.handover.config or self.router


class Cluster:
    """One run: `run` it with its sessions; `samples` has one entry per request that ended.

    on_progress: told now and then how many requests have ended, and which share of the sessions (0 to 1).  timeline:
    written now and then, when there is one.  on_step: told of each step of a router, its number first; those that place
    prefills come behind the others.  places: decides in the place of all routers, of which there are none then.
    """

    def __init__(self, config: ClusterConfig, *, on_step: OnStep | None = None, places: Places | None = None) -> None:
        self.loop = Loop()
        self.samples: list[Sample] = []
        self.config = config
        loaded, prefilling = (load(text, "router") for text in (config.router, config.prefill_router))
        self._places = places
        count = config.routers if places is None else 0
        chance = Chance(config.seed)
        self._chance = chance.stream("clients")
        self._network = Network(config.network_s, config.jitter_s, chance.stream("network"))

        def pickers(settings: RouterConfig, first: int) -> Pickers:
            made = [Router(settings, Chance(config.seed + first + n), shares_pool=count > 1) for n in range(count)]
            return Pickers(
                made, self.loop, self._carry_out,
                gossip_s=config.gossip_s, is_exact=settings.precise is not None, on_step=on_step, first=first,
            )  # fmt: skip

        self._pickers = pickers(loaded, 0)
        self.routers = self._pickers.routers
        self._prefillers = pickers(prefilling, count) if config.has_roles and count else None
        self.prefill_routers = self._prefillers.routers if self._prefillers is not None else []
        self._links = Links(config.handover.latency_s)
        self._prefills = 0
        self._claims = Claims(loaded)
        self._kept_headers = tuple(dict.fromkeys(loaded.request_headers + prefilling.request_headers))
        store = HostTier(config.store_blocks) if config.store_blocks else None
        self._nodes = {
            each.id: Node(n, each, self.loop, self._answered, self._cached, store)
            for n, each in enumerate(config.nodes)
        }
        self._scraped = [(name, node, self._told(node)) for name, node in self._nodes.items()]
        self._by_address = {node.endpoint.address: node for node in self._nodes.values()}
        self._flights: dict[str, Flight] = {}
        self._pending = 0
        self._idle: deque[Session] = deque()
        self._coming: Iterator[Session] = iter(())
        self._count = 0
        self.on_progress: Callable[[int, float], None] | None = None
        self.timeline: Timeline | None = None
        self._sessions = 0
        self._has_leaving = False
        for node in self._nodes.values():
            if node.config.id in config.late:
                node.is_up = False
            else:
                self._join(node)
                self._ready(node)
        for each in (self._pickers, self._prefillers):
            if each is not None:
                each.introduce()

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
        if next(_runs) % LEFT_RUNS == 0:
            gc.collect()
        # A run makes many objects that live long and none that only the collector would find; those from before it need
        # not be looked at.
        gc.set_threshold(200_000, *thresholds[1:])
        gc.freeze()
        try:
            self.loop.run(lambda: self._pending == 0)
        finally:
            gc.unfreeze()
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
        for flight in self._flights.values():
            if flight.source is node:
                # What it had prefilled and not sent yet is gone.
                flight.source = flight.prefilled = None
        self.loop.after(self.config.detect_s, Rank.WORLD, self._noticed, node)

    def revive(self, name: str) -> None:
        """Have a dead engine come back with an empty cache."""
        node = self._nodes[name]
        node.restart()
        self._told(node).feed_all(events.EndpointChanged(name, EndpointState.LOADING))
        self.loop.after(self.config.detect_s, Rank.WORLD, self._ready, node)

    def join(self, name: str) -> None:
        """Have an engine with an empty cache join the pool; one that has not left yet stays, with what it has."""
        node = self._nodes[name]
        if node.is_up:
            node.is_leaving = False
            self._told(node).feed_all(events.EndpointChanged(name, EndpointState.READY))
            return
        node.restart()
        self._join(node)
        self.loop.after(self.config.detect_s, Rank.WORLD, self._ready, node)

    def leave(self, name: str) -> None:
        """Have an engine get no more requests, and leave the pool when it has answered those that it has."""
        node = self._nodes[name]
        if node.is_up and not node.is_leaving:
            node.is_leaving = self._has_leaving = True
            self._told(node).feed_all(events.EndpointChanged(name, EndpointState.DRAINING))

    def _left(self) -> None:
        """See which engines that leave have nothing left to do."""
        leaving = [node for node in self._nodes.values() if node.is_leaving and node.is_up]
        busy = {flight.node for flight in self._flights.values()} | {each.source for each in self._flights.values()}
        for node in leaving:
            if node not in busy:
                node.is_up = False
                self._told(node).feed_all(events.EndpointLeft(node.config.id))

    def slow(self, name: str, factor: float) -> None:
        """Have an engine's steps take `factor` times as long from now on."""
        self._nodes[name].slow_down(factor)

    def _told(self, node: Node) -> Pickers:
        """Who decides over an engine."""
        is_prefill = self._prefillers is not None and node.config.role is Role.PREFILL
        return self._prefillers if is_prefill and self._prefillers is not None else self._pickers

    def _noticed(self, node: Node) -> None:
        if not node.is_up:
            self._told(node).feed_all(events.EndpointChanged(node.config.id, EndpointState.LOADING))

    def _join(self, node: Node) -> None:
        self._told(node).feed_all(events.EndpointJoined(node.endpoint))

    def _ready(self, node: Node) -> None:
        name, pickers = node.config.id, self._told(node)
        if not node.is_up or node.is_leaving:
            return
        pickers.feed_all(events.ModelsSeen(name, (ServedModel(id="m"),)))
        pickers.feed_all(events.EndpointChanged(name, EndpointState.READY))
        if pickers.is_exact:
            pickers.feed_all(events.BlocksCleared(name))
            pickers.feed_all(events.KvStreamChanged(name, KvState.FRESH))

    def _scrape(self) -> None:
        if self._has_leaving:
            self._left()
        timeline = self.timeline if self.timeline is not None and self.timeline.wants() else None
        if timeline is not None:
            held = sum(flight.node is None and not flight.prefill for flight in self._flights.values())
            timeline.tick(self.loop.now, held)
        for name, node, pickers in self._scraped:
            if node.is_up:
                signals = node.signals()
                if timeline is not None:
                    timeline.see(name, signals)
                pickers.tell_all(events.LoadSeen(name, signals))
        for each in (self._pickers, self._prefillers):
            if each is not None:
                each.follow_all()
        if self._pending:
            self.loop.after(self.config.scrape_s, Rank.NEWS, self._scrape)

    def _cached(self, node: Node, changes: list[Change]) -> None:
        pickers = self._told(node)
        if pickers.is_exact:
            heard = list(router_events(node, changes))
            self.loop.after(self.config.network_s, Rank.NEWS, self._hear, pickers, heard)

    def _hear(self, pickers: Pickers, heard: list[events.Event]) -> None:
        for event in heard:
            pickers.tell_all(event)
        pickers.follow_all()

    # ------------------------------------------------------------------ what pickers want

    def _carry_out(self, pickers: Pickers, number: int, command: Command) -> None:
        match command:
            case Forward():
                flight = self._flights.get(command.request_id)
                if flight is not None:
                    flight.endpoints.extend(command.endpoints)
                    if self._prefillers is not None and self._is_for_others(command.request_id, flight):
                        self._prefill(command.request_id, flight, self._prefillers)
                    else:
                        self._try_next(command.request_id, flight)
            case commands.Refuse():
                flight = self._flights.pop(command.request_id, None)
                if flight is not None:
                    self._close(flight, None)
            case commands.Evict():
                self.loop.after(0.0, Rank.NEWS, self._evict, pickers, number, command)
            case commands.Fetch():
                self.loop.after(self.config.tokenise_s, Rank.NEWS, self._fetched, pickers, number, command)

    def _evict(self, pickers: Pickers, number: int, command: commands.Evict) -> None:
        """Do as the direct data plane does: take it back before its first byte, or cut it where that is allowed."""
        request_id = command.request_id
        flight = self._flights.get(request_id)
        node = flight.node if flight is not None else None
        if flight is not None and flight.prefill:
            self._stop_prefill(flight)
            flight.endpoints.clear()
            pickers.feed(number, events.Evicted(request_id))
        elif flight is None or node is None:
            pickers.feed(number, events.Kept(request_id))
        elif not flight.is_submitted or not node.has_begun(request_id):
            flight.node = flight.source = flight.prefilled = None
            flight.endpoints.clear()
            node.feed(Aborted(request_id=request_id))
            pickers.feed(number, events.Evicted(request_id))
        elif command.may_cut:
            node.feed(Aborted(request_id=request_id))
            self._cut(request_id, flight, node)
        else:
            pickers.feed(number, events.Kept(request_id))

    def _cut(self, request_id: str, flight: Flight, node: Node) -> None:
        """End an answer of which its client has got a part."""
        del self._flights[request_id]
        cut = Outcome(status=200, served_address=node.endpoint.address, attempts=flight.attempts, is_cut=True)
        self._end(request_id, flight, cut)
        self._close(flight, None)

    def _fetched(self, pickers: Pickers, number: int, fetch: commands.Fetch) -> None:
        flight = self._flights.get(fetch.request_id)
        if flight is not None:
            prompt = flight.turn.prompt
            keys = tuple(events.TokenKeys(size, prompt.keys(size)) for size in fetch.block_sizes)
            pickers.feed(number, events.Fetched(fetch.request_id, prompt.tokens, keys))

    # ------------------------------------------------------------------ prefill on another engine

    def _is_for_others(self, request_id: str, flight: Flight) -> bool:
        """Whether another engine is to prefill a request that was just placed."""
        if flight.whole or self._by_address[flight.endpoints[0]].config.role is not Role.DECODE:
            return False
        booked = flight.pickers.routers[flight.router].flight(request_id)
        held_tokens = booked.predicted_tokens if booked is not None else 0
        return flight.turn.prompt.tokens - held_tokens >= self.config.handover.least_tokens

    def _prefill(self, request_id: str, flight: Flight, prefillers: Pickers) -> None:
        """Have the router of the engines that prefill place the prompt, as a request for one token."""
        self._prefills += 1
        flight.prefill = f"{request_id}.prefill{self._prefills}"
        turn = flight.turn._replace(output_tokens=1, max_tokens=1, whole=None)
        own = Flight(flight.talk, turn, flight.tenant, prefillers, flight.router, self.loop.now)
        own.whole = request_id
        self._flights[flight.prefill] = own
        request = self._request(flight.prefill, flight.talk.session, turn)
        prefillers.feed(flight.router, Arrived(request, turn.prompt.hashes()))

    def _prefilled(self, own: Flight, outcome: Outcome | None) -> None:
        """A prefill is over: the request goes on where it is decoded, with the KV or, when it failed, without."""
        flight = self._flights[own.whole]
        flight.prefill = ""
        flight.prefill_s += self.loop.now - own.arrived_at
        if outcome is not None:
            flight.source, flight.prefilled = own.node, outcome
        self._try_next(own.whole, flight)

    def _stop_prefill(self, flight: Flight) -> None:
        """Nobody wants a prefill any more that is under way."""
        name, flight.prefill = flight.prefill, ""
        own = self._flights.pop(name)
        if own.node is not None:
            own.node.feed(Aborted(request_id=name))
        self._end(name, own, Outcome(status=0, attempts=own.attempts, is_client_gone=True))

    def _transferred_at(self, source: Node, node: Node, flight: Flight, now: float) -> float:
        """Return when an engine has what another one prefilled; what it has of the prompt itself is not sent."""
        prompt = flight.turn.prompt
        tokens = max(0, prompt.tokens - node.held_tokens(prompt.blocks(node.block_size)))
        ends = source.config, node.config
        seconds = tokens * node.config.engine.token_bytes / min(each.transfer_bytes_per_s for each in ends)
        return self._links.send(source.config.id, node.config.id, seconds, now)

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
        flight = Flight(talk, turn, request.tenant_id, self._pickers, number, self.loop.now)
        self._flights[request.id] = flight
        if self._places is None:
            self._pickers.feed(number, Arrived(request, turn.prompt.hashes()))
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
            tenant_id=heads.tenant_id,
            session_id=session.id,
            objective=heads.objective,
            headers=heads.kept,
            hints=read_hints(session.headers, None) if session.headers else None,
        )
        # Whose a session is stands in the workload and is no claim, as the owner of a key.
        return self._claims.settle(request, session.tenant)

    def _try_next(self, request_id: str, flight: Flight) -> None:
        """Send a request to the next endpoint of its list; without one it has failed."""
        if flight.source is None:
            flight.prefilled = None
        while flight.endpoints:
            node = self._by_address[flight.endpoints.popleft()]
            flight.attempts += 1
            if node.is_up:
                flight.node, flight.is_submitted = node, False
                at = self.loop.now + self._network.delay_s() + node.config.engine.profile.request_s
                if flight.source is not None:
                    at = self._transferred_at(flight.source, node, flight, at)
                self.loop.at(at, Rank.ENGINE, self._submit, request_id, node)
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
        received_tokens = turn.prompt.tokens if flight.source is not None else 0
        flight.source = None
        node.feed(
            Submitted(
                request_id=request_id,
                prompt_tokens=turn.prompt.tokens,
                output_tokens=turn.output_tokens,
                max_tokens=turn.max_tokens,
                block_hashes=turn.blocks(node.block_size),
                adapter=flight.talk.session.adapter,
                received_tokens=received_tokens,
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
        ttft_s = first_at - flight.arrived_at
        outcome = Outcome(
            status=200,
            served_address=node.endpoint.address,
            attempts=flight.attempts,
            ttft_s=ttft_s,
            # What another engine took for the prefill says nothing of this one.
            engine_ttft_s=ttft_s - flight.prefill_s if flight.prefill_s else None,
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
        feed, number = flight.pickers.feed, flight.router
        feed(number, Ended(request_id))
        self.loop.after(self.config.record_s, Rank.NEWS, feed, number, Recorded(request_id, outcome))

    def _close(self, flight: Flight, outcome: Outcome | None) -> None:
        """Note what came of a request, and have its session go on; a session that was refused ends."""
        if flight.whole:
            self._prefilled(flight, outcome)
            return
        turn, now = flight.turn, self.loop.now
        served = flight.node.config.id if flight.node is not None else ""
        ttft_s = outcome.ttft_s if outcome is not None and outcome.ttft_s is not None else math.nan
        duration_s = now - flight.arrived_at
        output = (outcome.completion_tokens or 0) if outcome is not None else 0
        tpot_s = (duration_s - ttft_s) / (output - 1) if output > 1 else math.nan
        prefilled = outcome if flight.prefilled is None or outcome is None else flight.prefilled
        cached = (prefilled.cached_tokens or 0) if prefilled is not None else 0
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
                self._by_address[flight.prefilled.served_address].config.id if flight.prefilled is not None else "",
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
        if flight.prefill:
            self._stop_prefill(flight)
        if flight.node is not None:
            flight.node.feed(Aborted(request_id=request_id))
        self._end(request_id, flight, Outcome(status=0, attempts=flight.attempts, is_client_gone=True))
        self._close(flight, None)
