"""The way of events from the keeper to its sink: in order, in batches, never growing without bound.

Readings of load that a slow sink has not taken yet are replaced by newer ones of the same endpoint; every
other event is kept.  A sink that failed is told the present state of everything until it takes it, and which caches
were dropped meanwhile, so nothing is lost and nothing piles up.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable

from shoal.hosts.logs import Log
from shoal.kernel import ShoalError
from shoal.routing import events

log = Log("fleet")

_RETRY_S = 1.0

Present = Callable[[], list[events.Event]]
"""The events that bring a sink that knows nothing to the present."""

Sink = Callable[[list[events.Event]], Awaitable[None] | None]


class Outbox:
    """Collects events and hands them on, one batch at a time.

    present: what to tell after a failure.  retry_s: between two tries.
    """

    __slots__ = (
        *("_cleared", "_failure", "_linger_s", "_loads", "_pending", "_present", "_retry_s", "_sink", "_told_ids"),
        *("_waiters", "_wake"),
    )

    def __init__(self, sink: Sink, linger_s: float, present: Present, retry_s: float = _RETRY_S) -> None:
        self._sink = sink
        self._linger_s = linger_s
        self._present = present
        self._retry_s = retry_s
        self._failure = ""
        self._cleared: dict[events.BlocksCleared, None] = {}
        self._told_ids: set[str] = set()
        self._pending: list[events.Event] = []
        self._loads: dict[str, int] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()

    def put(self, *added: events.Event) -> None:
        """Add events after those that wait."""
        for event in added:
            if isinstance(event, events.LoadSeen):
                place = self._loads.setdefault(event.endpoint_id, len(self._pending))
                if place < len(self._pending):
                    self._pending[place] = event
                    continue
            elif isinstance(event, events.EndpointLeft):
                # A reading after a return of the same id must not slip in before the leave.
                self._loads.pop(event.endpoint_id, None)
            self._pending.append(event)
        self._wake.set()

    async def run(self) -> None:
        """Deliver until cancelled."""
        while True:
            await self._wait()
            self._wake.clear()
            waiters, self._waiters = self._waiters, []
            if self._pending or self._failure:
                await self._deliver()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
            await asyncio.sleep(self._linger_s)

    async def settled(self) -> None:
        """Return when the sink has had everything that was put so far."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake.set()
        await waiter

    async def _deliver(self) -> None:
        batch = self._take()
        try:
            answer = self._sink(batch)
            if inspect.isawaitable(answer):
                await answer
        except Exception as error:
            failure = str(error) or repr(error)
            if failure != self._failure:
                say = log.error if isinstance(error, ShoalError) else log.exception
                say("fleet events were not taken, telling all again", events=len(batch), why=failure)
            self._failure = failure
            self._keep_cleared(batch)
        else:
            if self._failure:
                log.info("fleet events are taken again")
            self._failure = ""
            self._cleared.clear()
            self._told_ids.difference_update(self._left(batch))

    def _take(self) -> list[events.Event]:
        """What to tell now: what waits, or everything after a failure."""
        batch, self._pending, self._loads = self._pending, [], {}
        if self._failure:
            self._keep_cleared(batch)
            present = self._present()
            ids = {event.endpoint.id for event in present if isinstance(event, events.EndpointJoined)}
            batch = [events.EndpointLeft(gone) for gone in sorted(self._told_ids - ids)]
            for event in present:
                batch.append(event)
                if isinstance(event, events.EndpointJoined):
                    # A sink that knew the endpoint takes its state from the change only.
                    batch.append(events.EndpointChanged(event.endpoint.id, event.state))
            batch += [each for each in self._cleared if each.endpoint_id in ids]
        for event in batch:
            if isinstance(event, events.EndpointJoined):
                self._told_ids.add(event.endpoint.id)
        return batch

    def _keep_cleared(self, batch: list[events.Event]) -> None:
        """Keep what no present state tells again."""
        self._cleared.update(dict.fromkeys(each for each in batch if isinstance(each, events.BlocksCleared)))

    @staticmethod
    def _left(batch: list[events.Event]) -> set[str]:
        """The ids that are gone at the end of a batch."""
        gone: set[str] = set()
        for event in batch:
            if isinstance(event, events.EndpointLeft):
                gone.add(event.endpoint_id)
            elif isinstance(event, events.EndpointJoined):
                gone.discard(event.endpoint.id)
        return gone

    async def _wait(self) -> None:
        """Return when there is something to tell, or to tell again."""
        await (asyncio.sleep(self._retry_s) if self._failure else self._wake.wait())
