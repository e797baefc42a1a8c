"""The endpoints that cannot take requests yet, each with its reason: for status, health and log alike.

Owns the list and its wording.  Why one endpoint is not ready is known by `hosts.fleet`.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from shoal.hosts.admin import EndpointPicture
from shoal.hosts.fleet import FleetKeeper
from shoal.pool import EndpointState

PAUSED = "paused until `shoal endpoint resume`"

_NAMED = 5


class Waiting(NamedTuple):
    """One endpoint that is not ready.  url: as it is called, "" while it is not known."""

    id: str
    state: str
    reason: str
    url: str = ""


class Roll(NamedTuple):
    """How many endpoints are ready, and those that are waited for."""

    ready: int
    waiting: list[Waiting]

    @property
    def share(self) -> str:
        """As `1 of 2 endpoints`."""
        known = self.ready + len(self.waiting)
        return f"{self.ready} of {known} endpoint{'' if known == 1 else 's'}"

    @property
    def summary(self) -> str:
        """Why no request can be placed, in few words."""
        return f"no endpoint is ready ({self.share})" if self.waiting else "no endpoint is ready: none is named"

    @property
    def reasons(self) -> str:
        """Why no request can be placed, with the reasons of the first few."""
        named = [f"{each.url or each.id}: {each.reason or each.state}" for each in self.waiting[:_NAMED]]
        more = len(self.waiting) - len(named)
        return "no endpoint is ready: " + ("; ".join(named) or "none is named") + (f"; {more} more" if more else "")


def call_roll(keeper: FleetKeeper, starting: Sequence[str] = (), offered: Collection[str] | None = None) -> Roll:
    """Say who is ready and who is not.

    starting: names of embedded engines that have not said where they listen.  offered: ids that requests are placed on,
    None for all that are ready.
    """
    ready = 0
    waiting: list[Waiting] = []
    for report in keeper.reports():
        if report.state is EndpointState.LOADING:
            waiting.append(Waiting(report.id, str(report.state), report.reason, report.url))
        elif report.state is EndpointState.PAUSED:
            waiting.append(Waiting(report.id, str(report.state), PAUSED, report.url))
        elif report.state is EndpointState.READY and offered is not None and report.id not in offered:
            waiting.append(Waiting(report.id, str(EndpointState.LOADING), "the router is being told", report.url))
        else:
            ready += report.state is EndpointState.READY
    waiting += [Waiting(url, "unresolved", reason, url) for url, reason in keeper.unresolved().items()]
    waiting += [Waiting(name, "starting", "it has not said where it listens") for name in starting]
    return Roll(ready, waiting)


def with_waiting(endpoints: Sequence[EndpointPicture], waiting: Sequence[Waiting]) -> list[EndpointPicture]:
    """Return the endpoints with the reasons of those that are waited for; those that no worker knows come last."""
    by_id = {each.id: each for each in waiting}
    shown = [
        msgspec.structs.replace(each, reason=by_id.pop(each.id).reason) if each.id in by_id else each
        for each in endpoints
    ]
    return shown + [
        EndpointPicture(id=each.id, address=each.url.partition("://")[2], state=each.state, reason=each.reason)
        for each in by_id.values()
    ]
