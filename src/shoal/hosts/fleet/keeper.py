"""The fleet keeper: which endpoints there are, from all sources as one, and the events that tell the router.

Owns joining, draining and leaving.  How one endpoint is watched is `member`; what becomes of the events is the
sink's; which endpoint gets a request is never decided here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from shoal.hosts.fleet.control import FleetControl, UnknownEndpoint
from shoal.hosts.fleet.door import Lanes, Trust
from shoal.hosts.fleet.loops import kept_up
from shoal.hosts.fleet.member import Kit, Member
from shoal.hosts.fleet.merge import Desired, endpoints_of, merge
from shoal.hosts.fleet.outbox import Outbox, Sink
from shoal.hosts.fleet.pace import Pace, Tempo
from shoal.hosts.fleet.resolver import Lookup, Resolver
from shoal.hosts.fleet.sources import AddedSource, Source
from shoal.hosts.fleet.targets import Target
from shoal.hosts.logs import Log
from shoal.pool import Endpoint, EndpointState, ServedModel, Signals
from shoal.routing import events

log = Log("fleet")

_LINES_PER_REPORT = 10
_DRAIN_POLL_S = 0.1

Drained = Callable[[str], Awaitable[None]]


class EndpointReport(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint as the keeper sees it.

    reason: why it is not ready, "" when it is.  load_problem: why its load is not known, "" when it is.
    """

    id: str
    url: str
    state: EndpointState
    engine: str
    reason: str = ""
    models: tuple[ServedModel, ...] = ()
    signals: Signals | None = None
    load_problem: str = ""


class FleetKeeper:
    """Keeps the fleet and tells `sink` what changes, in order.

    busy: whether the pool has requests on an endpoint; sets the pace of scraping.  drained: returns once a draining
    endpoint has no request left; without it `busy` is polled.  Make it inside a running loop.  control: orders to the
    engines themselves.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        sink: Sink,
        *,
        busy: Callable[[str], bool] = lambda _: False,
        drained: Drained | None = None,
        pace: Pace | None = None,
        seed: int = 0,
        lookup: Lookup | None = None,
    ) -> None:
        self._pace = pace or Pace()
        self._tempo = Tempo(self._pace, seed)
        self._added = AddedSource()
        self._sources: tuple[Source, ...] = (*sources, self._added)
        self._outbox = Outbox(sink, self._pace.linger_s, self.snapshot)
        self._kit = Kit(self._tempo, Lanes(self._pace), Trust(), self._outbox, busy)
        self._resolver = Resolver(self._reconcile, self._tempo, lookup)
        self._drained = drained or self._until_not_busy
        self._members: dict[str, Member] = {}
        self.control = FleetControl(lambda: self._members.values(), self._outbox, self._drained)
        self._removed: set[str] = set()
        self._told_clashes: set[tuple[str, str]] = set()
        self._goodbyes: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to watch; endpoints become ready later, by events."""
        loops = [partial(source.watch, self._reconcile) for source in self._sources]
        named = {"outbox": self._outbox.run, "report": self._report, "wake": self._wake_busy}
        named |= {f"source {position}": loop for position, loop in enumerate(loops)}
        self._tasks = [asyncio.create_task(kept_up(loop, name), name=f"fleet-{name}") for name, loop in named.items()]
        self._reconcile()

    async def close(self) -> None:
        """End all tasks and connections.  Nobody is told that endpoints left: they did not."""
        tasks = [*self._tasks, *self._goodbyes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks, self._goodbyes = [], {}
        await self._resolver.close()
        await asyncio.gather(*(member.close() for member in self._members.values()))
        self._members.clear()

    def add(self, target: Target) -> list[str]:
        """Add a target, or take back one that was drained or removed.  Returns the ids known of it so far."""
        self._added.add(target)
        addresses = {endpoint.address for endpoint in endpoints_of(target, self._resolver.addresses)}
        ids = sorted(key for key, (_, endpoint) in self._desired().items() if endpoint.address in addresses)
        for endpoint_id in ids:
            self._removed.discard(endpoint_id)
            if endpoint_id in self._members:
                self._members[endpoint_id].is_held = False
        self._reconcile()
        return ids

    def known_as(self, target: Target) -> list[str] | None:
        """Return the ids of a target that is in the fleet and not on its way out, None when it would change something.

        The list is empty for a name that was given before and has no address yet.
        """
        addresses = {endpoint.address for endpoint in endpoints_of(target, self._resolver.addresses)}
        if not addresses:
            return [] if any(target.url == named.url for named in self._all_targets()) else None
        known = [
            member
            for member in self._members.values()
            if member.endpoint.address in addresses and member.state is not EndpointState.DRAINING
        ]
        ids = [member.endpoint.id for member in known]
        return sorted(ids) if len(ids) == len(addresses) else None

    def drain(self, name: str) -> list[str]:
        """Offer the named endpoints to no new request, and remove each when its requests are done.

        name: an id, `ip:port`, a target's name or URL.  Returns the ids.  Raises UnknownEndpoint.
        """
        members = self._take(name)
        for member in members:
            self._say_goodbye(member)
        return [member.endpoint.id for member in members]

    def remove(self, name: str) -> list[str]:
        """Remove the named endpoints now, whatever they are doing.  As `drain` otherwise."""
        members = self._take(name)
        for member in members:
            self._say_goodbye(member, is_patient=False)
        return [member.endpoint.id for member in members]

    def snapshot(self) -> list[events.Event]:
        """The events that bring a router that knows nothing to the present state of the fleet."""
        told: list[events.Event] = []
        for endpoint_id, member in sorted(self._members.items()):
            told.append(events.EndpointJoined(member.endpoint, member.state))
            if member.models:
                told.append(events.ModelsSeen(endpoint_id, member.models))
            if member.signals is not None:
                told.append(events.LoadSeen(endpoint_id, member.signals))
        return told

    def reports(self) -> list[EndpointReport]:
        """Every endpoint with its state and why it is not ready, by id."""
        return [
            EndpointReport(
                id=endpoint_id,
                url=member.url,
                state=member.state,
                engine=member.endpoint.engine,
                reason=member.reason,
                models=member.models,
                signals=member.signals,
                load_problem=member.load_problem,
            )
            for endpoint_id, member in sorted(self._members.items())
        ]

    def targets(self) -> dict[str, Target]:
        """The target behind each endpoint id: its key, certificate authority and host name are for the data plane."""
        return {endpoint_id: member.target for endpoint_id, member in sorted(self._members.items())}

    def unresolved(self) -> dict[str, str]:
        """URLs whose host name has no address yet, with the reason."""
        return {
            target.url: self._resolver.reason(target.host) or "the name is being looked up"
            for target in self._all_targets()
            if not target.is_literal and not self._resolver.addresses(target.host)
        }

    def _all_targets(self) -> list[Target]:
        return [target for source in self._sources for target in source.targets()]

    def _wanted_names(self) -> list[str]:
        return [target.host for target in self._all_targets() if not target.is_literal]

    def _desired(self) -> Desired:
        """What the sources name together.  What clashes is told once."""
        desired, clashing = merge(self._all_targets(), self._resolver.addresses)
        self._told_clashes &= {(endpoint.id, endpoint.address) for endpoint in clashing}
        for endpoint in clashing:
            clash = (endpoint.id, endpoint.address)
            if clash not in self._told_clashes:
                self._told_clashes.add(clash)
                log.warning("an endpoint is named twice, the first counts", id=endpoint.id, address=endpoint.address)
        return desired

    def _reconcile(self) -> None:
        """Bring the members to what the sources name."""
        self._resolver.want(self._wanted_names())
        desired = self._desired()
        self._removed.intersection_update(desired)
        ids_by_address = {endpoint.address: endpoint_id for endpoint_id, (_, endpoint) in desired.items()}
        for endpoint_id, member in list(self._members.items()):
            target, endpoint = desired.get(endpoint_id, (None, None))
            if target is None or endpoint is None or endpoint.address != member.endpoint.address:
                # Under a new name the engine stays where it is, so there is nothing to wait for.
                is_renamed = ids_by_address.get(member.endpoint.address, endpoint_id) != endpoint_id
                self._say_goodbye(member, is_patient=not is_renamed)
            elif not member.is_held and not member.is_leaving:
                self._keep(member, target, endpoint)
        taken = {member.endpoint.address for member in self._members.values()}
        for endpoint_id, (target, endpoint) in desired.items():
            is_free = endpoint_id not in self._members and endpoint.address not in taken
            if is_free and endpoint_id not in self._removed:
                member = self._members[endpoint_id] = Member(target, endpoint, self._kit)
                member.join()
        self._tempo.members = len(self._members)

    def _keep(self, member: Member, target: Target, endpoint: Endpoint) -> None:
        """Have a named member watched, with what is said of it now."""
        goodbye = self._goodbyes.pop(member.endpoint.id, None)
        if goodbye is not None:
            goodbye.cancel()
        if target != member.target:
            member.retarget(target, endpoint)
        if member.state is EndpointState.DRAINING:
            member.resume()

    def _take(self, name: str) -> list[Member]:
        """Find the members of that name and keep them from coming back by themselves."""
        name = name.rstrip("/")
        found = [member for member in self._members.values() if member.has_name(name)]
        for member in found:
            member.is_held = True
            self._removed.add(member.endpoint.id)
        was_added = self._added.discard(name)
        for member in found:
            if member.target.is_literal:
                self._added.discard(member.target.url)
        if not found and not was_added:
            known = ", ".join(sorted(self._members)[:10]) or "none"
            raise UnknownEndpoint(f"no endpoint {name!r}; known: {known}")
        return found

    def _say_goodbye(self, member: Member, *, is_patient: bool = True) -> None:
        """Drain a member, then let it go; at once when not patient."""
        endpoint_id = member.endpoint.id
        if member.is_leaving or (endpoint_id in self._goodbyes and is_patient):
            return
        running = self._goodbyes.pop(endpoint_id, None)
        if running is not None:
            running.cancel()
        member.drain()
        task = asyncio.create_task(self._let_go(member, is_patient), name=f"fleet-goodbye {endpoint_id}")
        self._goodbyes[endpoint_id] = task

    async def _let_go(self, member: Member, is_patient: bool) -> None:
        endpoint_id = member.endpoint.id
        if is_patient:
            await self._outbox.settled()
            await self._wait_drained(endpoint_id)
        member.is_leaving = True
        await member.close()
        del self._members[endpoint_id]
        self._goodbyes.pop(endpoint_id, None)
        self._outbox.put(events.EndpointLeft(endpoint_id))
        log.info(f"{member.url} left", id=endpoint_id)
        self._reconcile()

    async def _wait_drained(self, endpoint_id: str) -> None:
        """Wait for the end of its requests; a caller that cannot tell now is asked again."""
        try:
            async with asyncio.timeout(self._pace.drain_timeout_s):
                await kept_up(lambda: self._drained(endpoint_id), f"the drain of {endpoint_id}")
        except TimeoutError:
            log.warning(f"{endpoint_id} still has requests and is removed", after_s=self._pace.drain_timeout_s)

    async def _until_not_busy(self, endpoint_id: str) -> None:
        """Wait until `busy` says no twice in a row: a request may be on its way to the books."""
        quiet = 0
        while quiet < 2:
            quiet = 0 if self._kit.busy(endpoint_id) else quiet + 1
            await asyncio.sleep(min(_DRAIN_POLL_S, self._pace.busy_scrape_s))

    async def _report(self) -> None:
        """Tell which endpoints are not ready and why, now and then, until cancelled."""
        loop = asyncio.get_running_loop()
        names_due = loop.time() + self._pace.report_s
        while True:
            await asyncio.sleep(self._pace.report_s / 2)
            now = loop.time()
            waiting = {member.url: member.reason for member in self._members.values() if member.is_report_due(now)}
            if now >= names_due:
                waiting |= self.unresolved()
                names_due = now + 2 * self._pace.report_s
            for url, reason in list(waiting.items())[:_LINES_PER_REPORT]:
                log.warning(f"waiting for {url}: {reason}")
            if len(waiting) > _LINES_PER_REPORT:
                log.warning(f"waiting for {len(waiting) - _LINES_PER_REPORT} more endpoints")

    async def _wake_busy(self) -> None:
        while True:
            await asyncio.sleep(self._pace.busy_scrape_s)
            for member in self._members.values():
                member.wake_if_busy()
