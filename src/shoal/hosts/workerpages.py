"""The admin pages of one picker worker, on a unix socket that only its owner can open.

Owns GET /healthz, /snapshot, /metrics, /explain/{id} and POST /events, /peers, /begin, /abort, /drain; a data plane may
add to them.  Several workers are merged by `hosts.admin`.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

from shoal.hosts.picker import Picker
from shoal.hosts.sharing import Places, Sharing
from shoal.hosts.signals import KvSubscriber
from shoal.kernel import UNREADABLE
from shoal.measures import Family, render
from shoal.routing import Event, Refuse
from shoal.routing.commands import Cut
from shoal.routing.events import SessionAborted

# A fleet of 1,000 endpoints with their models and signals is under 2 MB.
MAX_EVENTS_BYTES = 32 << 20

_events = msgspec.msgpack.Decoder(list[Event])
_aborted = msgspec.msgpack.Decoder(SessionAborted)
_json = msgspec.json.Encoder()


class WorkerAdmin:
    """The pages.

    on_event: told each event before the router.  on_drain: begins the drain, told whether what is known of requests is
    to be left for those who ask later.  cut: carries out commands, by minted ids, and says how many of the requests
    there were.
    """

    def __init__(
        self,
        picker: Picker,
        on_drain: Callable[[bool], Awaitable[None]],
        on_event: Callable[[Event], None],
        sharing: Sharing,
        cut: Callable[[Mapping[str, Cut]], int],
        kv: KvSubscriber,
    ) -> None:
        self._kv = kv
        self._sharing = sharing
        self._picker = picker
        self._on_drain = on_drain
        self._on_event = on_event
        self._cut = cut
        self._started_at = time.monotonic()

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=MAX_EVENTS_BYTES)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/snapshot", self._snapshot)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/explain/{request_id}", self._explain)
        app.router.add_post("/events", self._take_events)
        app.router.add_post("/peers", self._peers)
        app.router.add_post("/begin", self._begin)
        app.router.add_post("/abort", self._abort)
        app.router.add_post("/drain", self._drain)
        return app

    def families(self) -> list[Family]:
        """Every family of metrics now."""
        driver, tokens = self._picker.driver, self._picker.tokens
        families = [*driver.fold.families(driver.router.status()), *self._sharing.families(), *self._kv.families()]
        return [*families, *(tokens.families() if tokens is not None else ())]

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _snapshot(self, _: web.Request) -> web.Response:
        status = msgspec.to_builtins(self._picker.driver.router.status())
        body = {
            "picker": self._picker.picker_id,
            "pid": os.getpid(),
            "uptime_s": time.monotonic() - self._started_at,
            **status,
            "peers": msgspec.to_builtins(self._sharing.pictures()),
        }
        return web.Response(body=_json.encode(body), content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        families = self.families()
        if request.query.get("format") == "json":
            return web.Response(body=_json.encode(families), content_type="application/json")
        return web.Response(text=render(families), content_type="text/plain")

    async def _explain(self, request: web.Request) -> web.Response:
        driver = self._picker.driver
        found = driver.router.explanations.find(request.match_info["request_id"], driver.now())
        if found is None:
            return web.json_response({"error": "unknown or too old request id"}, status=404)
        return web.Response(body=_json.encode(found), content_type="application/json")

    async def _take_events(self, request: web.Request) -> web.Response:
        try:
            events = _events.decode(await request.read())
        except UNREADABLE as error:
            return web.json_response({"error": str(error)}, status=400)
        for event in events:
            self._on_event(event)
            self._picker.driver.feed(event)
        return web.json_response({"taken": len(events)})

    async def _peers(self, request: web.Request) -> web.Response:
        try:
            places = msgspec.json.decode(await request.read(), type=Places)
        except UNREADABLE as error:
            return web.json_response({"error": str(error)}, status=400)
        self._sharing.follow(places)
        return web.json_response({})

    async def _begin(self, request: web.Request) -> web.Response:
        try:
            teachers = msgspec.json.decode(await request.read(), type=tuple[str, ...])
        except UNREADABLE as error:
            return web.json_response({"error": str(error)}, status=400)
        await self._sharing.begin(teachers)
        return web.json_response({})

    async def _abort(self, request: web.Request) -> web.Response:
        try:
            event = _aborted.decode(await request.read())
        except UNREADABLE as error:
            return web.json_response({"error": str(error)}, status=400)
        commands = self._picker.driver.feed(event)
        refused = sum(type(command) is Refuse for command in commands)
        # What was just placed may be on its way to its connection.
        await asyncio.sleep(0)
        cut = self._cut({command.request_id: command for command in commands if type(command) is Cut})
        return web.json_response({"requests": refused + cut})

    async def _drain(self, request: web.Request) -> web.Response:
        await self._on_drain(request.query.get("leaves") == "1")
        return web.json_response({"inflight": self._picker.driver.router.status().inflight})
