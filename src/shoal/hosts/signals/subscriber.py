"""The subscriber of KV events of one worker process: which publishers are followed, and how fresh each endpoint is.

Follows the fleet's events and turns what engines publish into router events.  One publisher's stream is `connection`;
who may be dialled is decided where `Endpoint.kv_sources` is made.
"""

import asyncio
from collections.abc import Callable

import zmq

from shoal.hosts.logs import Log
from shoal.hosts.signals.cache import Cache
from shoal.hosts.signals.connection import Connection, Kit
from shoal.hosts.signals.counts import KvCounts
from shoal.hosts.signals.pump import Pump
from shoal.hosts.signals.replay import Slots
from shoal.hosts.signals.settings import KvSettings
from shoal.hosts.signals.sockets import Sockets
from shoal.measures import Family
from shoal.pool import Endpoint, ServedModel
from shoal.pool.kvevents import KvSource, KvState
from shoal.prefix.ledger import Ledger
from shoal.routing.events import BlocksCleared, EndpointJoined, EndpointLeft, Event, KvStreamChanged, ModelsSeen

log = Log("kvevents")

MAX_RANKS = 256
# An endpoint is as fresh as the worst of its ranks.
_WORST_FIRST = (KvState.STALE, KvState.CATCHING_UP, KvState.FRESH)

Sources = Callable[[Endpoint], tuple[KvSource, ...]]


class _Followed:
    """One endpoint.  owned: addresses that no other may follow.  told: the state that the router knows."""

    __slots__ = ("connections", "endpoint", "is_telling", "model", "owned", "sources", "told")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.sources: tuple[KvSource, ...] = ()
        self.model = ""
        self.connections: list[Connection] = []
        self.owned: list[str] = []
        self.told = KvState.NONE
        self.is_telling = False


class KvSubscriber:
    """Follows the publishers of a fleet.

    feed: takes router events, `Driver.feed`.  make_ledger: a ledger that knows nothing, for the name of a base model.
    It follows nobody before `configure`.  All calls belong on the running event loop.
    """

    def __init__(
        self,
        feed: Callable[[Event], object],
        make_ledger: Callable[[str], Ledger],
        settings: KvSettings | None = None,
    ) -> None:
        settings = settings or KvSettings()
        self._feed = feed
        self._make_ledger = make_ledger
        self._sources: Sources | None = None
        self._counts = KvCounts()
        self._sockets = Sockets(settings)
        self._kit = Kit(self._sockets, Pump(settings.slice_s), Slots(settings.replays), settings, self._counts)
        self._followed: dict[str, _Followed] = {}
        self._owners: dict[str, str] = {}
        self._shut_out: dict[str, set[str]] = {}

    def configure(self, sources: Sources | None) -> None:
        """Follow what `sources` names of each endpoint, or nobody any more for None.

        A router forgets all blocks when it is told to keep none; so each time they are wanted again, all is read anew.
        """
        if sources is None:
            for followed in self._followed.values():
                self._drop_connections(followed)
                followed.sources, followed.told = (), KvState.NONE
        self._sources = sources
        for followed in self._followed.values():
            self._join(followed.endpoint)

    def observe(self, event: Event) -> None:
        """Take one event of the fleet, before the router does.  What follows for the router comes later."""
        match event:
            case EndpointJoined():
                self._join(event.endpoint)
            case ModelsSeen():
                self._see_models(event.endpoint_id, event.models)
            case BlocksCleared():
                # Whoever keeps the fleet knows better, as when an engine got other weights.
                followed = self._followed.get(event.endpoint_id)
                for connection in followed.connections if followed is not None else ():
                    if event.rank in (None, connection.source.rank):
                        connection.forget()
            case EndpointLeft():
                followed = self._followed.pop(event.endpoint_id, None)
                if followed is not None:
                    self._drop_connections(followed)

    def states(self) -> dict[str, KvState]:
        """How far the view of each endpoint's cache can be trusted, by id."""
        return {endpoint_id: _state(followed) for endpoint_id, followed in sorted(self._followed.items())}

    def families(self) -> list[Family]:
        """What was counted."""
        active = sum(len(followed.connections) for followed in self._followed.values())
        ledgers = {
            endpoint_id: [connection.gauges() for connection in followed.connections]
            for endpoint_id, followed in sorted(self._followed.items())
        }
        return self._counts.families(self.states(), active, ledgers)

    def close(self) -> None:
        """Close every socket and end the I/O thread."""
        for followed in self._followed.values():
            self._drop_connections(followed)
        self._followed.clear()
        self._sockets.close()

    # ------------------------------------------------------------------ inside

    def _join(self, endpoint: Endpoint) -> None:
        followed = self._followed.get(endpoint.id)
        if followed is None:
            followed = self._followed[endpoint.id] = _Followed(endpoint)
        followed.endpoint = endpoint
        sources = self._sources(endpoint)[:MAX_RANKS] if self._sources is not None else ()
        if sources != followed.sources:
            followed.sources = sources
            self._connect(endpoint.id, followed)

    def _see_models(self, endpoint_id: str, models: tuple[ServedModel, ...]) -> None:
        followed = self._followed.get(endpoint_id)
        # Of several names of one engine the one that the router asks for tokens with (`ModelTable.base_at`).
        model = min((model.id for model in models if not model.parent), default="")
        if followed is not None and model and model != followed.model:
            followed.model = model
            self._connect(endpoint_id, followed)

    def _connect(self, endpoint_id: str, followed: _Followed) -> None:
        """Follow what the endpoint publishes now, from the beginning."""
        had_connections = bool(followed.connections)
        self._drop_connections(followed)
        if had_connections:
            asyncio.get_running_loop().call_soon(self._clear, endpoint_id, followed)
        # Keys are made with the model's name, so nothing can be read before it is known.
        for source in followed.sources if followed.model else ():
            owner = self._owners.setdefault(source.endpoint, endpoint_id)
            if owner != endpoint_id:
                # Its blocks would be credited to an engine that does not hold them.
                log.warning("two endpoints name one publisher", endpoint=endpoint_id, first=owner, at=source.endpoint)
                self._shut_out.setdefault(source.endpoint, set()).add(endpoint_id)
                continue
            followed.owned.append(source.endpoint)
            self._follow(endpoint_id, followed, source)
        self._changed(endpoint_id)

    def _follow(self, endpoint_id: str, followed: _Followed, source: KvSource) -> None:
        model = followed.model
        cache = Cache(endpoint_id, source.rank, lambda: self._make_ledger(model), self._feed, self._counts)
        try:
            connection = Connection(endpoint_id, source, cache, self._kit, lambda: self._changed(endpoint_id))
        except zmq.ZMQError as error:
            self._counts.errors.add((endpoint_id, "connect"))
            log.warning("KV events cannot be subscribed to", endpoint=endpoint_id, at=source.endpoint, why=error)
            return
        followed.connections.append(connection)

    def _drop_connections(self, followed: _Followed) -> None:
        for connection in followed.connections:
            connection.close()
        followed.connections = []
        for address in [each for each, waiting in self._shut_out.items() if followed.endpoint.id in waiting]:
            self._shut_out[address].discard(followed.endpoint.id)
            if not self._shut_out[address]:
                del self._shut_out[address]
        for address in followed.owned:
            if self._owners.pop(address, None) is not None and address in self._shut_out:
                asyncio.get_running_loop().call_soon(self._let_in, address)
        followed.owned = []

    def _let_in(self, address: str) -> None:
        """Have one that named this publisher too follow it, as when an endpoint goes on under another id."""
        waiting = self._shut_out.pop(address, set())
        for endpoint_id in sorted(waiting):
            followed = self._followed.get(endpoint_id)
            if followed is not None and any(source.endpoint == address for source in followed.sources):
                if address in self._owners:
                    self._shut_out.setdefault(address, set()).add(endpoint_id)
                else:
                    self._connect(endpoint_id, followed)

    def _changed(self, endpoint_id: str) -> None:
        """Have the router told of the endpoint's state, once for all changes of this turn of the loop."""
        followed = self._followed.get(endpoint_id)
        if followed is not None and not followed.is_telling:
            followed.is_telling = True
            asyncio.get_running_loop().call_soon(self._tell, endpoint_id, followed)

    def _tell(self, endpoint_id: str, followed: _Followed) -> None:
        followed.is_telling = False
        if self._followed.get(endpoint_id) is not followed:
            return
        state = _state(followed)
        if state is not followed.told:
            followed.told = state
            self._feed(KvStreamChanged(endpoint_id, state))

    def _clear(self, endpoint_id: str, followed: _Followed) -> None:
        if self._followed.get(endpoint_id) is followed:
            self._feed(BlocksCleared(endpoint_id))


def _state(followed: _Followed) -> KvState:
    if not followed.sources:
        return KvState.NONE
    states = {connection.state for connection in followed.connections}
    if len(followed.connections) < len(followed.sources):
        return KvState.STALE
    return next(state for state in _WORST_FIRST if state in states)
