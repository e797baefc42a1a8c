"""One endpoint under watch: its readiness loop, its scrape loop, and the events that follow.

States here are LOADING, READY, PAUSED and DRAINING; ejection after failed requests is the router's.  Which endpoints
there are, and when a drained one may go, is the keeper's.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from shoal.hosts.fleet.door import EngineDoor, Lanes, Trust, Unreachable
from shoal.hosts.fleet.loops import kept_up
from shoal.hosts.fleet.outbox import Outbox
from shoal.hosts.fleet.pace import Tempo
from shoal.hosts.fleet.readiness import Readiness, detect_engine
from shoal.hosts.fleet.scraper import Scraper
from shoal.hosts.fleet.targets import Target
from shoal.hosts.fleet.weights import Weights
from shoal.hosts.logs import Log
from shoal.pool import Endpoint, EndpointState, ServedModel, Signals
from shoal.routing import events

log = Log("fleet")

_LONGEST_REPORT_WAIT_S = 60.0
_SERVING = (EndpointState.READY, EndpointState.PAUSED)


class Kit(NamedTuple):
    """What all members of one fleet share.  busy: whether the pool has requests on an endpoint."""

    tempo: Tempo
    lanes: Lanes
    trust: Trust
    outbox: Outbox
    busy: Callable[[str], bool]


class Member:
    """One endpoint.

    is_held: an operator drained it, so it does not return by itself.  is_engine_paused: the engine was told to begin no
    step.  reason: why it is not ready.  door: the way to the engine.
    """

    __slots__ = (
        "_failures",
        "_has_said_sources",
        "_is_identified",
        "_is_paused",
        "_kit",
        "_models_due",
        "_readiness",
        "_report_due",
        "_report_wait_s",
        "_retiring",
        "_scrape_task",
        "_scraper",
        "_watch_task",
        "_weights",
        "door",
        "endpoint",
        "is_engine_paused",
        "is_held",
        "is_leaving",
        "models",
        "reason",
        "state",
        "target",
    )

    def __init__(self, target: Target, endpoint: Endpoint, kit: Kit) -> None:
        self.target = target
        self.endpoint = endpoint
        self.state = EndpointState.LOADING
        self.models: tuple[ServedModel, ...] = ()
        self.reason = "not asked yet"
        self.is_held = False
        self.is_leaving = False
        self.is_engine_paused = False
        self._is_paused = False
        self._is_identified = False
        self._has_said_sources = False
        self._report_wait_s = self._report_due = 0.0
        self._kit = kit
        self._watch_task: asyncio.Task[None] | None = None
        self._scrape_task: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._open()
        self._begin_loading()

    @property
    def url(self) -> str:
        """The URL that is really called."""
        return f"{'https' if self.endpoint.is_tls else 'http'}://{self.endpoint.address}"

    @property
    def signals(self) -> Signals | None:
        """The last reading of its load, None before the first."""
        return self._scraper.last

    @property
    def load_problem(self) -> str:
        """Why its load is not known while it serves, and what to do about it; "" when it is known."""
        return self._scraper.problem if self.state in _SERVING else ""

    def join(self) -> None:
        """Announce the endpoint and begin to watch it."""
        self._kit.outbox.put(events.EndpointJoined(self.endpoint, self.state))
        self._watch_task = self._spawn(self._watch, "watch")

    def has_name(self, name: str) -> bool:
        """Whether `name` is its id, its address, or what its target is called."""
        return name in (self.endpoint.id, self.endpoint.address, self.url, self.target.name, self.target.url)

    def drain(self) -> None:
        """Have it offered to no new request; its load is still read."""
        _cancel(self._watch_task)
        self._set_state(EndpointState.DRAINING)

    def resume(self) -> None:
        """Take a draining endpoint back: it is offered once it is seen ready."""
        self.is_held = self._is_paused = False
        self._stop_scraping()
        self._begin_loading()
        self._set_state(EndpointState.LOADING)
        self._watch_task = self._spawn(self._watch, "watch")

    def pause(self) -> None:
        """Have it offered to no new request until `unpause`, also when it becomes ready meanwhile."""
        self._is_paused = True
        if self.state is EndpointState.READY:
            self._set_state(EndpointState.PAUSED)

    def unpause(self) -> None:
        """Have it offered again."""
        self._is_paused = False
        if self.state is EndpointState.PAUSED:
            self._set_state(EndpointState.READY)

    async def look_at_weights(self) -> None:
        """Read the version of its weights now."""
        self._note_weights(await self._weights.version(self.endpoint.engine))

    def retarget(self, target: Target, endpoint: Endpoint) -> None:
        """Take over changed labels, engine, key or certificate authority; the state stays."""
        self._retire()
        self._is_identified = self._is_identified or bool(target.known_engine)
        if not target.known_engine:
            endpoint = msgspec.structs.replace(endpoint, engine=self.endpoint.engine)
        if not endpoint.kv_sources and not _names_sources(self.target, self.endpoint):
            endpoint = msgspec.structs.replace(endpoint, kv_sources=self.endpoint.kv_sources)
        self._has_said_sources = True
        self.target, self.endpoint = target, endpoint
        self._open()
        self._kit.outbox.put(events.EndpointJoined(endpoint, self.state))
        if self.state is not EndpointState.DRAINING:
            self._watch_task = self._spawn(self._watch, "watch")
        if self.state is not EndpointState.LOADING:
            self._scrape_task = self._spawn(self._scraper.run, "scrape")

    async def close(self) -> None:
        """End its tasks and connections.  Tells nobody."""
        self._retire()
        # A caller that is cancelled while it waits must not leave a connection open: `wait` lets the closing go on.
        await asyncio.wait(self._retiring)

    def is_report_due(self, now: float) -> bool:
        """Whether it is time again to tell the operator why it is not ready."""
        if self.state is not EndpointState.LOADING or now < self._report_due:
            return False
        self._report_wait_s = min(self._report_wait_s * 2, _LONGEST_REPORT_WAIT_S)
        self._report_due = now + self._report_wait_s
        return True

    def wake_if_busy(self) -> None:
        """Have an idle endpoint that got work scraped at once."""
        self._scraper.wake_if_busy()

    def _open(self) -> None:
        """Make the door and what stands on it."""
        kit = self._kit
        self.door = EngineDoor(self.target, self.endpoint, kit.lanes, kit.trust)
        self._readiness = Readiness(self.door, kit.tempo.pace)
        self._weights = Weights(self.door, kit.tempo.pace.timeout_s)
        self._scraper = Scraper(
            self.url,
            self.door,
            kit.tempo,
            engine=self._identify,
            busy=lambda: kit.busy(self.endpoint.id),
            seen=lambda signals: kit.outbox.put(events.LoadSeen(self.endpoint.id, signals)),
        )
        self._models_due = 0.0
        self._failures = 0

    def _retire(self) -> None:
        """End the tasks and close the door behind them."""
        tasks = [task for task in (self._watch_task, self._scrape_task) if task is not None]
        self._watch_task = self._scrape_task = None
        for task in tasks:
            task.cancel()
        retiring = asyncio.create_task(_close_after(tasks, self.door), name=f"fleet-close {self.endpoint.id}")
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)

    def _begin_loading(self) -> None:
        """Forget what another process at this address may have changed."""
        self._readiness.forget()
        self._weights.forget()
        self.is_engine_paused = False
        self._is_identified = bool(self.target.known_engine)
        self._report_wait_s = self._kit.tempo.pace.report_s
        self._report_due = asyncio.get_running_loop().time() + self._report_wait_s

    def _spawn(self, loop: Callable[[], Awaitable[None]], kind: str) -> asyncio.Task[None]:
        return asyncio.create_task(kept_up(loop, self.url), name=f"fleet-{kind} {self.endpoint.id}")

    def _set_state(self, state: EndpointState) -> None:
        if state is not self.state:
            self.state = state
            self._kit.outbox.put(events.EndpointChanged(self.endpoint.id, state))

    async def _watch(self) -> None:
        """Check readiness until cancelled: fast while loading or doubtful, slowly while all is well."""
        tempo = self._kit.tempo
        while True:
            try:
                await self._check()
            except Unreachable as error:
                self._fail(str(error))
            else:
                self._pass()
            is_well = self.state is not EndpointState.LOADING and not self._failures
            await asyncio.sleep(tempo.probe_wait_s(tempo.pace.ready_s if is_well else tempo.pace.loading_s))

    async def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        is_loading = self.state is EndpointState.LOADING
        is_due = is_loading or now >= self._models_due
        if is_due:
            models = await self._readiness.models()
            self._models_due = now + self._kit.tempo.spread(self._kit.tempo.pace.models_s)
            if models != self.models:
                self.models = models
                self._kit.outbox.put(events.ModelsSeen(self.endpoint.id, models))
            self._note_weights(self._weights.models(models))
        if is_loading and not self._is_identified:
            self._set_engine(await self._readiness.engine())
            # A page without a known name does not stop an engine from serving; the scraper goes on looking.
        if is_due and (is_loading or self._has_said_sources):
            await self._ask_sources()
        await self._readiness.health(self.endpoint.engine)
        if is_due:
            await self.look_at_weights()

    def _note_weights(self, what: str) -> None:
        """Have what is believed of its cache forgotten when it serves other weights.  what: is new, "" for nothing."""
        if what:
            log.info(f"{self.url} has other weights: its cache counts as empty", new=what)
            self._kit.outbox.put(events.BlocksCleared(self.endpoint.id))

    async def _ask_sources(self) -> None:
        """Learn where it publishes KV events, unless the operator says so."""
        if _names_sources(self.target, self.endpoint):
            return
        host = self.endpoint.address.rpartition(":")[0].strip("[]")
        try:
            sources = await self._readiness.kv_sources(self.endpoint.engine, host)
        except Unreachable:
            # It is asked again; what it said before counts until then.
            self._has_said_sources = True
            return
        self._has_said_sources = bool(sources)
        if sources != self.endpoint.kv_sources:
            self.endpoint = msgspec.structs.replace(self.endpoint, kv_sources=sources)
            self._kit.outbox.put(events.EndpointJoined(self.endpoint, self.state))

    def _pass(self) -> None:
        self._failures = 0
        self.reason = ""
        if self.state is EndpointState.LOADING:
            self._models_due = 0.0
            self._set_state(EndpointState.PAUSED if self._is_paused else EndpointState.READY)
            self._scrape_task = self._spawn(self._scraper.run, "scrape")
            names = ", ".join(model.id for model in self.models[:5])
            log.info(f"{self.url} is ready", engine=self.endpoint.engine, models=names)

    def _fail(self, reason: str) -> None:
        self._failures += 1
        self.reason = reason
        if self.state is not EndpointState.LOADING and self._failures >= self._kit.tempo.pace.failure_limit:
            log.warning(f"{self.url} is not ready any more: {reason}")
            self._stop_scraping()
            self._begin_loading()
            self._set_state(EndpointState.LOADING)

    def _stop_scraping(self) -> None:
        _cancel(self._scrape_task)
        self._scrape_task = None
        self._scraper.last = None

    def _identify(self, page: bytes) -> str:
        """The kind of engine, learned from its page while it is not known."""
        if not self._is_identified:
            self._set_engine(detect_engine(page))
        return self.endpoint.engine

    def _set_engine(self, engine: str) -> None:
        if not engine:
            return
        self._is_identified = True
        if engine != self.endpoint.engine:
            self.endpoint = msgspec.structs.replace(self.endpoint, engine=engine)
            self._kit.outbox.put(events.EndpointJoined(self.endpoint, self.state))


async def _close_after(tasks: list[asyncio.Task[None]], door: EngineDoor) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
    await door.close()


def _names_sources(target: Target, endpoint: Endpoint) -> bool:
    """Whether the operator says where the endpoint publishes."""
    host = endpoint.address.rpartition(":")[0].strip("[]")
    return bool(target.endpoint(host).kv_sources)


def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
