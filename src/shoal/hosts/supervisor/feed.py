"""The stream of fleet events to one worker: in order, whole, and caught up after a fault.

When a delivery fails the worker is told everything again from the ledger, and which caches were dropped meanwhile, so
nothing is ever missing and nothing waits without bound.
"""

import asyncio
from collections.abc import Sequence
from time import monotonic

from shoal.hosts import logs
from shoal.hosts.supervisor.ledger import Ledger
from shoal.hosts.supervisor.link import WorkerLink, WorkerSilent
from shoal.routing import events

MAX_PENDING = 20_000
"""Events that wait for a slow worker; past this it is told the present instead of the way there."""

_RETRY_S = 0.2


class Feed:
    """Sends events to the worker behind `link`, from `run` until it is cancelled.

    is_ending: whether the worker is expected to go, so that its silence is no news.
    """

    def __init__(self, name: str, link: WorkerLink, ledger: Ledger) -> None:
        self._name = name
        self._link = link
        self._ledger = ledger
        self._pending: list[events.Event] = []
        self._cleared: dict[events.BlocksCleared, None] = {}
        self._needs_all = True
        self._told_ids: set[str] = set()
        self._wake = asyncio.Event()
        self._wake.set()
        self._idle = asyncio.Event()
        self.is_ending = False
        self._log = logs.get("supervisor")

    def put(self, told: Sequence[events.Event]) -> None:
        """Add events; the ledger holds them already."""
        self._pending.extend(told)
        if len(self._pending) > MAX_PENDING:
            self._keep_cleared(self._pending)
            self._pending.clear()
            self._needs_all = True
        self._idle.clear()
        self._wake.set()

    async def caught_up(self) -> None:
        """Return when the worker has been told everything."""
        await self._idle.wait()

    async def run(self) -> None:
        """Deliver until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch = self._next_batch()
            if not batch:
                self._idle.set()
                continue
            try:
                await self._link.send(batch)
            except WorkerSilent as error:
                say = self._log.debug if self.is_ending else self._log.warning
                say("a worker did not take fleet events, telling all again", picker=self._name, why=error)
                self._needs_all = True
                self._keep_cleared(batch)
                await asyncio.sleep(_RETRY_S)
                self._wake.set()
                continue
            self._delivered(batch)
            if self._pending or self._needs_all:
                self._wake.set()
            else:
                self._idle.set()

    def _next_batch(self) -> list[events.Event]:
        batch, self._pending = self._pending, []
        if self._needs_all:
            self._needs_all = False
            self._keep_cleared(batch)
            cleared, self._cleared = [each for each in self._cleared if each.endpoint_id in self._ledger.ids()], {}
            left = [events.EndpointLeft(gone) for gone in sorted(self._told_ids - self._ledger.ids())]
            batch = [*left, *self._ledger.present(monotonic()), *cleared]
        # Told or not is unknown when the answer gets lost, so an id counts as told before the sending.
        self._told_ids |= {event.endpoint.id for event in batch if isinstance(event, events.EndpointJoined)}
        return batch

    def _keep_cleared(self, batch: Sequence[events.Event]) -> None:
        """Keep what no present state of the ledger tells again."""
        self._cleared.update(dict.fromkeys(each for each in batch if isinstance(each, events.BlocksCleared)))

    def _delivered(self, batch: list[events.Event]) -> None:
        for event in batch:
            if isinstance(event, events.EndpointLeft):
                self._told_ids.discard(event.endpoint_id)
            elif isinstance(event, events.EndpointJoined):
                self._told_ids.add(event.endpoint.id)
