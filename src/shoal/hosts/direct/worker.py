"""The worker of the direct data plane: the router of `hosts.worker` with clients' sockets of its own."""

import argparse
import asyncio
import socket
import sys

from aiohttp import web

from shoal.hosts.direct.certificates import Certificate
from shoal.hosts.direct.plane import LINGER_S, Plane, listening
from shoal.hosts.direct.settings import settings_of
from shoal.hosts.worker import Worker as AnyWorker
from shoal.hosts.worker import run_worker, warm_up, worker_parser
from shoal.hosts.workerpages import WorkerAdmin
from shoal.kernel import ConfigError
from shoal.measures import Family, Gauge
from shoal.routing import Configured, Event
from shoal.routing.config import RouterConfig
from shoal.routing.events import EndpointLeft

__all__ = ["Worker", "main", "parser", "warm_up"]


class Pages(WorkerAdmin):
    """The admin pages of every worker, and those of the data plane."""

    def __init__(self, worker: "Worker") -> None:
        super().__init__(worker.picker, worker.drain, worker.on_event, worker.sharing, worker.plane.cut, worker.kv)
        self._worker = worker
        self._clients = Gauge("shoal_client_connections", "Open client connections of the direct data plane.")
        self._buffered = Gauge(
            "shoal_buffered_bytes", "Unfinished requests and unread answers that the direct data plane holds."
        )

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = super().app()
        app.router.add_get("/connections", self._connections)
        app.router.add_post("/serve", self._serve)
        return app

    def families(self) -> list[Family]:
        """Every family of metrics, and what the data plane holds."""
        plane = self._worker.plane
        self._clients.set(plane.clients)
        self._buffered.set(plane.picker.buffered_bytes)
        return [*super().families(), self._clients.family(), self._buffered.family()]

    async def _connections(self, _: web.Request) -> web.Response:
        plane = self._worker.plane
        return web.json_response({"clients": plane.clients, "active": plane.active, "retrying": plane.retrying})

    async def _serve(self, _: web.Request) -> web.Response:
        try:
            await self._worker.serve()
        except ConfigError as error:
            return web.json_response({"error": str(error)}, status=500)
        return web.json_response({})

    async def _drain(self, request: web.Request) -> web.Response:
        try:
            self._worker.linger_s = max(0.0, float(request.query.get("linger_s", LINGER_S)))
        except ValueError:
            return web.json_response({"error": "linger_s must be a number of seconds"}, status=400)
        return await super()._drain(request)


class Worker(AnyWorker):
    """Everything one worker process holds.  linger_s: see `plane.drain`."""

    def __init__(self, options: argparse.Namespace, config: RouterConfig, config_text: str) -> None:
        super().__init__(options, config, config_text)
        pool = config.pool
        self._certificate = Certificate(pool.tls) if pool.tls is not None else None
        self.plane = Plane(self.picker, settings_of(pool, options.workers), self._backends)
        self.linger_s = LINGER_S
        self._follows: list[asyncio.Task[None]] = []
        self._is_serving = False

    async def _open(self) -> None:
        self._follows.append(asyncio.create_task(self._backends.follow()))
        if self._certificate is not None:
            self._follows.append(asyncio.create_task(self._certificate.follow()))
        if not self._options.held:
            await self.serve()

    async def serve(self) -> None:
        """Begin to accept clients."""
        if self._is_serving:
            return
        self._is_serving = True
        tls = self._certificate.context if self._certificate is not None else None
        await self.plane.listen([open_socket(self._options.listen)], tls)

    async def _close(self) -> None:
        for follow in self._follows:
            follow.cancel()
        await self.plane.close()

    async def _finish(self) -> None:
        self.plane.drain(self.linger_s)
        await self.plane.drained()

    def _pages(self) -> WorkerAdmin:
        return Pages(self)

    async def drain(self, leaves: bool) -> None:
        """Leave new requests to whoever takes over; end when those under way have ended.

        leaves: whether what is known of requests stays for those who ask later.
        """
        await self._drain(leaves)

    def on_event(self, event: Event) -> None:
        """Take what an event says to the data plane; the router is told by the caller."""
        self._on_event(event)
        if isinstance(event, Configured):
            pool = self._config.pool
            self.plane.configure(settings_of(pool, self._options.workers))
            if self._certificate is not None and pool.tls is not None:
                self._certificate.look(pool.tls)
        elif isinstance(event, EndpointLeft):
            self.plane.pools.forget_unused()


def open_socket(where: str) -> socket.socket:
    """Return the listening socket for `HOST:PORT` or `fd:N`.  Raises ConfigError."""
    host, _, port = where.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"{where!r} is not HOST:PORT or fd:N", source="--listen")
    try:
        return socket.socket(fileno=int(port)) if host == "fd" else listening(host.strip("[]"), int(port))
    except OSError as error:
        raise ConfigError(f"{where} cannot be listened on: {error.strerror}", source="--listen") from None


def parser() -> argparse.ArgumentParser:
    """The worker's own flags; people use `shoal up --data-plane direct`."""
    flags = worker_parser("python -m shoal.hosts.direct", __doc__)
    flags.add_argument("--listen", required=True, help="HOST:PORT, shared between workers, or fd:N, inherited")
    flags.add_argument("--held", action="store_true", help="accept nothing before POST /serve on the admin socket")
    return flags


def main(argv: list[str] | None = None) -> int:
    """Run one worker; returns the exit status."""
    return run_worker(parser().parse_args(argv), Worker)


if __name__ == "__main__":
    sys.exit(main())
