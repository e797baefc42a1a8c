"""The way of fleet events to the workers, past the data plane.

An endpoint is told ready only once Envoy knows it, and Envoy forgets it only once no worker names it any more:
else Envoy would balance by itself among what it has.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic

from shoal.hosts import logs
from shoal.hosts.supervisor.ledger import Ledger, is_about_readiness
from shoal.pool import Endpoint
from shoal.routing import events

Show = Callable[[dict[str, Endpoint], bool], Awaitable[bool]]
"""Writes the endpoints for the data plane; when asked to wait, returns whether it holds them."""


class FleetGate:
    """Sink of the fleet keeper.

    ledger: what the workers know.  show: gives the data plane its endpoints.  tell: hands events to every worker.
    settled: returns when every worker took what it was told.
    """

    def __init__(
        self,
        ledger: Ledger,
        show: Show,
        tell: Callable[[Sequence[events.Event]], None],
        settled: Callable[[], Awaitable[None]],
    ) -> None:
        self._ledger = ledger
        self._show = show
        self._tell = tell
        self._settled = settled
        self._shown: dict[str, Endpoint] = {}
        self._turn = asyncio.Lock()
        self._log = logs.get("supervisor")

    @property
    def ready(self) -> dict[str, Endpoint]:
        """The endpoints that workers may choose now, by id."""
        return self._ledger.ready()

    async def take(self, batch: Sequence[events.Event]) -> None:
        """Pass on events of the fleet, in order."""
        async with self._turn:
            if not any(is_about_readiness(event) for event in batch):
                self.pass_on(batch)
                return
            after = self._ledger.copy()
            after.apply(batch, monotonic())
            wanted = after.ready()
            if any(self._shown.get(endpoint_id) != endpoint for endpoint_id, endpoint in wanted.items()):
                both = {**self._shown, **wanted}
                if not await self._show(both, True):
                    self._log.warning("Envoy has not confirmed new endpoints, offering them all the same")
                self._shown = both
            self.pass_on(batch)
            if self._shown != wanted:
                await self._settled()
                await self._show(wanted, False)
                self._shown = wanted

    def pass_on(self, batch: Sequence[events.Event]) -> None:
        """Tell every worker, now and those to come."""
        self._ledger.apply(batch, monotonic())
        self._tell(batch)

    async def show_again(self) -> None:
        """Write the present endpoints once more, after their TLS groups or keys changed."""
        async with self._turn:
            await self._show(self._shown, False)
