"""Orders to engines while they run: pause, resume, reset the prefix cache; of one endpoint or of many at once.

Owns the order of the steps, so that a paused endpoint is offered to nobody before its engine stops, and that what an
engine dropped is forgotten here without waiting for it to say so.  The calls themselves are `calls`'.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from shoal.hosts.fleet import calls
from shoal.hosts.fleet.calls import CallFailed, PauseMode
from shoal.hosts.fleet.member import Member
from shoal.hosts.fleet.outbox import Outbox
from shoal.hosts.logs import Log
from shoal.kernel import ShoalError
from shoal.pool import EndpointState
from shoal.routing import events

log = Log("fleet")

ORDER_TIMEOUT_S = 30.0
"""For an engine to do what takes no waiting for requests."""
_TOLD_S = 5.0
# A request that was placed before its worker heard of the pause may be on the way.
_ON_THE_WAY_S = 0.1


class UnknownEndpoint(ShoalError):
    """An operator named an endpoint that is not in the fleet."""


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which endpoints are meant: one by name (id, `ip:port` or URL), those with all of these labels, or every one."""

    name: str = ""
    labels: dict[str, str] = {}
    is_all: bool = False


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an order at one endpoint.  problem: what was not done and why, "" when all was."""

    id: str
    problem: str = ""


class FleetControl:
    """Carries out orders on members.

    members: the present ones.  drained: returns once an endpoint has none of the pool's requests left.
    """

    def __init__(
        self, members: Callable[[], Iterable[Member]], outbox: Outbox, drained: Callable[[str], Awaitable[None]]
    ) -> None:
        self._members = members
        self._outbox = outbox
        self._drained = drained

    def select(self, which: Selection) -> list[Member]:
        """Return the endpoints that are meant, by id.  Raises UnknownEndpoint when there are none."""
        name = which.name.rstrip("/")
        members = sorted(self._members(), key=lambda member: member.endpoint.id)
        wanted = which.labels.items()

        def is_meant(member: Member) -> bool:
            if name:
                return member.has_name(name)
            return which.is_all or (bool(wanted) and wanted <= member.endpoint.labels.items())

        found = [member for member in members if is_meant(member)]
        if found:
            return found
        known = ", ".join(member.endpoint.id for member in members[:10]) or "none"
        what = f"no endpoint {name!r}" if name else "no endpoint with these labels" if wanted else "no endpoint"
        raise UnknownEndpoint(f"{what}; known: {known}")

    async def pause(self, which: Selection, mode: PauseMode | None, timeout_s: float) -> list[Done]:
        """Offer them to no new request; with a mode, have their engines stop as well.  Raises UnknownEndpoint.

        timeout_s: for each engine, and with `wait` for the requests that run there.
        """
        return await self._each(which, lambda member: self._pause(member, mode, timeout_s))

    async def resume(self, which: Selection, timeout_s: float = ORDER_TIMEOUT_S) -> list[Done]:
        """Have their engines go on and offer them again.  As `pause`."""
        return await self._each(which, lambda member: self._resume(member, timeout_s))

    async def reset(
        self, which: Selection, *, running: bool = False, external: bool = False, timeout_s: float = ORDER_TIMEOUT_S
    ) -> list[Done]:
        """Have their engines drop the prefix cache, see `calls.reset`.  As `pause`."""
        return await self._each(which, lambda member: self._reset(member, running, external, timeout_s))

    async def _each(self, which: Selection, order: Callable[[Member], Awaitable[str]]) -> list[Done]:
        """Give the order to all at once, so that one that is slow holds up no other."""
        members = self.select(which)
        problems = await asyncio.gather(*(order(member) for member in members))
        for member, problem in zip(members, problems, strict=True):
            if problem:
                log.warning("an order was not carried out", id=member.endpoint.id, why=problem)
        return [Done(id=member.endpoint.id, problem=problem) for member, problem in zip(members, problems, strict=True)]

    async def _pause(self, member: Member, mode: PauseMode | None, timeout_s: float) -> str:
        endpoint = member.endpoint
        if member.state is EndpointState.DRAINING:
            return "it is draining; `shoal endpoint add` takes it back"
        member.pause()
        if mode is None:
            return ""
        await self._told()
        await asyncio.sleep(_ON_THE_WAY_S)
        try:
            if mode is PauseMode.WAIT and not calls.waits_by_itself(endpoint.engine):
                await self._until_drained(endpoint.id, timeout_s)
            await calls.pause(member.door, endpoint.engine, mode, timeout_s)
        except CallFailed as error:
            if error.is_unknown:
                self._paused(member)
            return f"{error}; it gets no new requests all the same"
        self._paused(member)
        return ""

    def _paused(self, member: Member) -> None:
        member.is_engine_paused = True
        self._forget(member)

    async def _resume(self, member: Member, timeout_s: float) -> str:
        was_paused = member.is_engine_paused
        try:
            # Also where nothing is known of a pause: somebody else may have asked for it, or this pool before it was
            # started anew.
            await calls.resume(member.door, member.endpoint.engine, timeout_s)
        except CallFailed as error:
            if was_paused:
                return f"{error}; it stays paused"
        member.is_engine_paused = False
        if was_paused:
            # What it was paused for may have been new weights: its first request must not find the old ones' blocks.
            await member.look_at_weights()
            self._forget(member)
        member.unpause()
        return ""

    async def _reset(self, member: Member, running: bool, external: bool, timeout_s: float) -> str:
        try:
            await calls.reset(
                member.door, member.endpoint.engine, running=running, external=external, timeout_s=timeout_s
            )
        except CallFailed as error:
            if error.is_unknown:
                self._forget(member)
            return str(error)
        self._forget(member)
        await self._told()
        return ""

    def _forget(self, member: Member) -> None:
        """Have the routers drop what they believe of its cache: an idle engine tells at its next step only."""
        self._outbox.put(events.BlocksCleared(member.endpoint.id))

    async def _until_drained(self, endpoint_id: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained(endpoint_id)
        except TimeoutError:
            raise CallFailed(f"its requests did not end in {timeout_s:g} s, the engine goes on") from None

    async def _told(self) -> None:
        """Wait until the routers have heard, for as long as that usually takes at the most."""
        try:
            async with asyncio.timeout(_TOLD_S):
                await self._outbox.settled()
        except TimeoutError:
            log.warning("the workers have not confirmed an order yet")
