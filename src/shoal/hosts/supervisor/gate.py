"""The way of fleet events to the workers, past the data plane.

An endpoint is told ready only once the data plane knows it, and is forgotten there only once no worker names it any
more: else Envoy would balance by itself among what it has.  While the data plane cannot be told, what it does not know
is told as still loading, and everything else goes on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from time import monotonic

import msgspec

from shoal.hosts import logs
from shoal.hosts.supervisor.ledger import Ledger, is_about_readiness
from shoal.kernel import ShoalError
from shoal.pool import Endpoint, EndpointState
from shoal.routing import events

Marks = Callable[[], dict[str, Hashable]]
"""What the data plane shows of each endpoint besides the endpoint itself: its key and how it is trusted."""

Show = Callable[[dict[str, Endpoint], bool], Awaitable[bool]]
"""Writes the endpoints for the data plane; when asked to wait, returns whether it holds them."""


_Shown = tuple[Endpoint, Hashable]


class NotShown(ShoalError):
    """The data plane could not be told of the fleet; it is to be handed on again, whole."""


class FleetGate:
    """Sink of the fleet keeper.

    ledger: what the workers know.  show: gives the data plane its endpoints.  tell: hands events to every worker.
    settled: returns when every worker took what it was told.  marks: what else must be shown again when it changes.
    """

    def __init__(
        self,
        ledger: Ledger,
        show: Show,
        tell: Callable[[Sequence[events.Event]], None],
        settled: Callable[[], Awaitable[None]],
        marks: Marks = dict,
    ) -> None:
        self._ledger = ledger
        self._show = show
        self._tell = tell
        self._settled = settled
        self._marks = marks
        self._shown: dict[str, _Shown] = {}
        self._turn = asyncio.Lock()
        self._log = logs.get("supervisor")

    @property
    def ready(self) -> dict[str, Endpoint]:
        """The endpoints that workers may choose now, by id."""
        return self._ledger.ready()

    async def take(self, batch: Sequence[events.Event]) -> None:
        """Pass on events of the fleet, in order.

        Raises NotShown when the data plane could not be told; the whole fleet is to be given here again then.
        """
        async with self._turn:
            if not any(is_about_readiness(event) for event in batch):
                self.pass_on(batch)
                return
            after = self._ledger.copy()
            after.apply(batch, monotonic())
            marks = self._marks()
            wanted = {name: (endpoint, marks.get(name)) for name, endpoint in after.ready().items()}
            try:
                await self._show_first(wanted)
            except NotShown:
                self.pass_on([self._held_back(event, wanted) for event in batch])
                raise
            self.pass_on(batch)
            if self._shown != wanted:
                await self._settled()
                await self._tell_plane(wanted, waits=False)

    def pass_on(self, batch: Sequence[events.Event]) -> None:
        """Tell every worker, now and those to come."""
        self._ledger.apply(batch, monotonic())
        self._tell(batch)

    async def _show_first(self, wanted: dict[str, _Shown]) -> None:
        """Have the data plane hold what is new or changed, beside what it has."""
        if all(self._shown.get(name) == shown for name, shown in wanted.items()):
            return
        if not await self._tell_plane({**self._shown, **wanted}, waits=True):
            self._log.warning("the data plane has not confirmed new endpoints, offering them all the same")

    async def _tell_plane(self, fleet: dict[str, _Shown], *, waits: bool) -> bool:
        try:
            confirmed = await self._show({name: endpoint for name, (endpoint, _) in fleet.items()}, waits)
        except (OSError, ShoalError) as error:
            raise NotShown(f"the data plane could not be told of the fleet: {error}") from error
        self._shown = fleet
        return confirmed

    def _held_back(self, event: events.Event, wanted: dict[str, _Shown]) -> events.Event:
        """The event as workers may hear it while the data plane does not know the endpoint."""
        match event:
            case events.EndpointJoined(endpoint=Endpoint(id=name)) | events.EndpointChanged(endpoint_id=name):
                knows = name in self._shown and name in wanted and self._shown[name][0] == wanted[name][0]
                if event.state is EndpointState.READY and not knows:
                    return msgspec.structs.replace(event, state=EndpointState.LOADING)
        return event
