"""What an operator may order about endpoints and their engines; alike for a pool and for a picker alone.

Owns the order and its answer.  How an endpoint joins, leaves, and is paused is `hosts.fleet`.
"""

from typing import Protocol

import msgspec

from shoal.hosts import logs
from shoal.hosts.fleet import Done, FleetKeeper, PauseMode, Selection, UnknownEndpoint, parse_url
from shoal.kernel import ConfigError, ShoalError

MAX_WAIT_S = 3600.0


class NotFound(ShoalError):
    """The endpoint that was named is not in the pool."""


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """An order that was carried out.

    endpoints: ids that it touched, the URL while its name has no address.  is_known: it was added before, and nothing
    changed.  problems: what was not done, by id.
    """

    endpoints: list[str]
    is_known: bool = False
    problems: dict[str, str] = {}


class EndpointOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /endpoints`.

    op: add, drain, remove, pause, resume or reset.  url or id: which endpoint; the last three also take `labels` that
    all must be there, or `all`.  mode: of a pause, abort, wait or keep, "" to leave the engine alone.  running,
    external: of a reset, see `hosts.fleet.calls`.  timeout_s: how long an engine may take.
    """

    op: str
    url: str = ""
    id: str = ""
    labels: dict[str, str] = {}
    all: bool = False
    mode: str = ""
    running: bool = False
    external: bool = False
    timeout_s: float = 30.0


class Orders(Protocol):
    """Carries out orders; raises ConfigError (one that cannot be carried out) or NotFound."""

    async def add(self, url: str) -> Carried: ...

    async def drain(self, name: str) -> Carried: ...

    async def remove(self, name: str) -> Carried: ...

    async def control(self, order: EndpointOrder) -> Carried: ...


async def carry_out(orders: Orders, order: EndpointOrder) -> Carried:
    """Have an order carried out.  Raises as `Orders` does."""
    name = order.url or order.id
    if order.op in ("pause", "resume", "reset"):
        if (bool(name), bool(order.labels), order.all).count(True) != 1:
            raise ConfigError("name one endpoint with url or id, or give labels, or all")
        if not 0 < order.timeout_s <= MAX_WAIT_S:
            raise ConfigError(f"timeout_s must be above 0 and at most {MAX_WAIT_S:g}")
        return await orders.control(order)
    if not name:
        raise ConfigError("name the endpoint with url or id")
    match order.op:
        case "add":
            return await orders.add(name)
        case "drain":
            return await orders.drain(name)
        case "remove":
            return await orders.remove(name)
    raise ConfigError(f"unknown op {order.op!r}; one of add, drain, remove, pause, resume, reset")


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

    async def control(self, order: EndpointOrder) -> Carried:
        """Pause, resume or reset engines.  Raises NotFound, or ConfigError for a mode that is none."""
        control = self._keeper.control
        which = Selection(name=order.url or order.id, labels=order.labels, is_all=order.all)
        try:
            if order.op == "pause":
                done = await control.pause(which, _mode(order.mode), order.timeout_s)
            elif order.op == "resume":
                done = await control.resume(which, order.timeout_s)
            else:
                flags = {"running": order.running, "external": order.external}
                done = await control.reset(which, **flags, timeout_s=order.timeout_s)
        except UnknownEndpoint as error:
            raise NotFound(str(error)) from error
        return self._told(order.op, done)

    def _told(self, op: str, done: list[Done]) -> Carried:
        problems = {each.id: each.problem for each in done if each.problem}
        ids = [each.id for each in done]
        self._log.info(f"endpoints: {op}", ids=",".join(ids), problems=len(problems))
        return Carried(endpoints=ids, problems=problems)


def _mode(text: str) -> PauseMode | None:
    if not text:
        return None
    try:
        return PauseMode(text)
    except ValueError:
        raise ConfigError(f"unknown mode {text!r}; one of {', '.join(PauseMode)}") from None
