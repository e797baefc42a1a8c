"""HTTP of the merged admin API: everything on a unix socket, only reading of metrics on TCP.

The unix socket lies in the run directory that only its owner can enter; whoever reaches it may change the fleet.
The TCP port is bound to the loopback and answers `/metrics` and `/healthz` alone.
"""

from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web

from shoal.hosts.supervisor.answers import PoolAnswers
from shoal.hosts.supervisor.merging import CONTENT_TYPE
from shoal.hosts.supervisor.orders import EndpointOrder, NotFound, Orders, carry_out
from shoal.kernel import UNREADABLE, ConfigError, ShoalError
from shoal.routing.events import SessionAborted
from shoal.wire.headers import MAX_ID_CHARS


class AbortOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /abort`.  session: its id.  tenant: whose, None for everybody's."""

    session: str
    tenant: str | None = None


class Operations(Protocol):
    """What an operator may do to the whole; returns what was done, or raises ConfigError."""

    async def reload(self) -> str: ...

    async def upgrade(self) -> str: ...

    def why_not_ready(self) -> str: ...


class AdminServer:
    """Serves `answers`, `operations` and `orders` until `stop`."""

    def __init__(self, answers: PoolAnswers, operations: Operations, orders: Orders) -> None:
        self._answers = answers
        self._operations = operations
        self._orders = orders
        self._runners: list[web.AppRunner] = []

    async def listen_unix(self, path: Path) -> None:
        """Open the full API on a unix socket."""
        app = self._app_of_readers()
        app.router.add_get("/snapshot", self._snapshot)
        app.router.add_get("/explain/{request_id}", self._explain)
        app.router.add_post("/endpoints", self._endpoints)
        app.router.add_post("/abort", self._abort)
        app.router.add_post("/reload", self._reload)
        app.router.add_post("/upgrade", self._upgrade)
        runner = await self._runner(app)
        await web.UnixSite(runner, str(path)).start()
        path.chmod(0o600)

    async def listen_tcp(self, host: str, port: int) -> None:
        """Open `/metrics` and `/healthz` on a port of the loopback."""
        runner = await self._runner(self._app_of_readers())
        await web.TCPSite(runner, host, port).start()

    async def stop(self) -> None:
        """Close every door."""
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()

    async def _runner(self, app: web.Application) -> web.AppRunner:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        self._runners.append(runner)
        return runner

    def _app_of_readers(self) -> web.Application:
        app = web.Application(middlewares=[_errors])
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthz)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        page = await self._answers.metrics()
        return web.Response(body=page.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _healthz(self, request: web.Request) -> web.Response:
        why_not = self._operations.why_not_ready()
        return web.Response(text=why_not or "ok", status=503 if why_not else 200)

    async def _snapshot(self, request: web.Request) -> web.Response:
        return _json(await self._answers.picture())

    async def _explain(self, request: web.Request) -> web.Response:
        explained = await self._answers.explain(request.match_info["request_id"])
        return _json(explained, status=200 if explained.found else 404)

    async def _endpoints(self, request: web.Request) -> web.Response:
        try:
            order = msgspec.json.decode(await request.read(), type=EndpointOrder)
        except UNREADABLE as error:
            raise ConfigError(f"unreadable order: {error}") from error
        carried = await carry_out(self._orders, order)
        return _json({"op": order.op, **msgspec.structs.asdict(carried)})

    async def _abort(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read(), type=AbortOrder)
        except UNREADABLE as error:
            raise ConfigError(f"unreadable order: {error}") from error
        if not asked.session:
            raise ConfigError("name the session")
        return _json(await self._answers.abort(SessionAborted(asked.session[:MAX_ID_CHARS], asked.tenant)))

    async def _reload(self, request: web.Request) -> web.Response:
        return _json({"done": await self._operations.reload()})

    async def _upgrade(self, request: web.Request) -> web.Response:
        return _json({"done": await self._operations.upgrade()})


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        answer: web.StreamResponse = await handler(request)
    except NotFound as error:
        return _json({"error": str(error)}, status=404)
    except ShoalError as error:
        return _json({"error": str(error)}, status=400)
    return answer


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
