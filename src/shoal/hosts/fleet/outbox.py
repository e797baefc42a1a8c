"""The way of events from the keeper to its sink: in order, in batches, never growing without bound.

Readings of load that a slow sink has not taken yet are replaced by newer ones of the same endpoint; every
other event is kept.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable

from shoal.hosts.logs import Log
from shoal.routing import events

log = Log("fleet")

Sink = Callable[[list[events.Event]], Awaitable[None] | None]


class Outbox:
    """Collects events and hands them on, one batch at a time."""

    __slots__ = ("_linger_s", "_loads", "_pending", "_sink", "_waiters", "_wake")

    def __init__(self, sink: Sink, linger_s: float) -> None:
        self._sink = sink
        self._linger_s = linger_s
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
        """Deliver until cancelled.  A batch that the sink fails on is logged and lost."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            waiters, self._waiters = self._waiters, []
            if self._pending:
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
        batch, self._pending, self._loads = self._pending, [], {}
        try:
            answer = self._sink(batch)
            if inspect.isawaitable(answer):
                await answer
        except Exception:
            log.exception("fleet events were not taken", events=len(batch))
