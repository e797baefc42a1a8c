"""The stream of fleet events to one worker that does not always take them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from shoal.hosts.supervisor.feed import MAX_PENDING, Feed
from shoal.hosts.supervisor.ledger import Ledger
from shoal.hosts.supervisor.link import WorkerLink, WorkerSilent
from shoal.pool import Endpoint, EndpointState
from shoal.routing import events

JOINED = events.EndpointJoined(Endpoint(id="a", address="10.0.0.1:8000"), EndpointState.READY)
CLEARED = events.BlocksCleared("a")


class Link(WorkerLink):
    """A worker that fails as often as it is told to."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.failures = 0
        self.taken: list[events.Event] = []

    async def send(self, events: Sequence[events.Event]) -> None:
        if self.failures:
            self.failures -= 1
            raise WorkerSilent("not now")
        self.taken += events


def told(failures: int, *batches: Sequence[events.Event]) -> list[events.Event]:
    """Return what a worker that knows the fleet was told after `batches`, the first of which fail."""

    async def run() -> list[events.Event]:
        link, ledger = Link(), Ledger()
        ledger.apply([JOINED], monotonic())
        feed = Feed("0", link, ledger)
        task = asyncio.create_task(feed.run())
        await feed.caught_up()
        link.taken.clear()
        link.failures = failures
        for batch in batches:
            ledger.apply(batch, monotonic())
            feed.put(batch)
        async with asyncio.timeout(30):
            await feed.caught_up()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return link.taken

    return asyncio.run(run())


def test_a_worker_that_missed_a_batch_is_told_of_caches_that_were_dropped() -> None:
    assert told(0, [CLEARED]) == [CLEARED]
    assert told(2, [CLEARED]) == [JOINED, events.EndpointChanged("a", EndpointState.READY), CLEARED]


def test_a_dropped_cache_is_not_forgotten_with_the_events_that_pile_up() -> None:
    loads = [events.EndpointChanged("a", EndpointState.READY)] * MAX_PENDING
    assert told(0, [CLEARED, *loads]) == [JOINED, events.EndpointChanged("a", EndpointState.READY), CLEARED]


def test_the_cache_of_an_endpoint_that_left_is_not_spoken_of() -> None:
    assert told(1, [CLEARED, events.EndpointLeft("a")]) == [events.EndpointLeft("a")]
