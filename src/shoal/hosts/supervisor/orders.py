"""What an operator may order about endpoints: add, drain, remove; alike for a pool and for a picker alone.

Owns reading the order and its answer.  How an endpoint joins and leaves is `hosts.fleet`.
"""

import msgspec

from shoal.hosts import logs
from shoal.hosts.fleet import FleetKeeper, UnknownEndpoint, parse_url
from shoal.kernel import ShoalError


class NotFound(ShoalError):
    """The endpoint that was named is not in the pool."""


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """An order that was carried out.

    endpoints: ids that it touched, the URL while its name has no address.  is_known: it was added before, and nothing
    changed.
    """

    endpoints: list[str]
    is_known: bool = False


class FleetOrders:
    """Carries out orders on the fleet of `keeper`."""

    def __init__(self, keeper: FleetKeeper) -> None:
        self._keeper = keeper
        self._log = logs.get("supervisor")

    async def add(self, url: str) -> Carried:
        """Add an engine, or take a drained one back.  Raises ConfigError for a URL that is none."""
        target = parse_url(url if "://" in url else f"http://{url}", source="endpoint")
        known = self._keeper.known_as(target)
        if known is not None:
            return Carried(endpoints=known or [target.url], is_known=True)
        ids = self._keeper.add(target)
        self._log.info("endpoint added", url=target.url)
        return Carried(endpoints=ids or [target.url])

    async def drain(self, name: str) -> Carried:
        """Offer it to no new request; it leaves when its requests are done.  Raises NotFound."""
        try:
            ids = self._keeper.drain(name)
        except UnknownEndpoint as error:
            raise NotFound(str(error)) from error
        self._log.info("endpoint drains", ids=",".join(ids))
        return Carried(endpoints=ids)

    async def remove(self, name: str) -> Carried:
        """Take it out now.  Raises NotFound."""
        try:
            ids = self._keeper.remove(name)
        except UnknownEndpoint as error:
            raise NotFound(str(error)) from error
        self._log.info("endpoint removed", ids=",".join(ids))
        return Carried(endpoints=ids)
