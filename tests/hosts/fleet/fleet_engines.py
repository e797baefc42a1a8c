"""A scripted engine on a free port, and a sink that remembers: what the fleet tests share."""

import asyncio
import json
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web

from shoal.hosts.fleet import FleetKeeper, Pace, Target, parse_url
from shoal.routing import events

FAST = Pace(
    loading_s=0.01,
    ready_s=0.02,
    models_s=0.05,
    busy_scrape_s=0.01,
    idle_scrape_s=0.08,
    failed_scrape_s=0.08,
    dns_s=0.02,
    report_s=0.02,
    timeout_s=1.0,
    scrape_timeout_s=1.0,
    linger_s=0.001,
    probes_per_s=1e6,
    scrapes_per_s=1e6,
)


PAGES = {
    "vllm": """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 0.0
""",
    "sglang": """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{tp_rank="0"}} {running}
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{{tp_rank="0"}} 0.0
""",
}


class ScriptedEngine:
    """An engine whose answers a test sets.

    status: path -> HTTP status; pages: path -> body of a 200; gates: path -> what its answers wait for; calls: how
    often each path was asked; orders: what was posted, as (path with query, body).
    """

    def __init__(self, kind: str = "vllm", port: int = 0) -> None:
        self.models = ["m"]
        self.status: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self.pages: dict[str, bytes] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.orders: list[tuple[str, bytes]] = []
        self.headers: dict[str, str] = {}
        self.running = 0
        self.kind = kind
        self.port = port
        self.page: bytes | None = None
        self.models_body: bytes | None = None
        self.delay_s = 0.0
        self.tls: ssl.SSLContext | None = None
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        # An answer whose client is gone is cancelled by nobody, and would wait for ever.
        for gate in self.gates.values():
            gate.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.path
        self.calls[path] = self.calls.get(path, 0) + 1
        self.headers = dict(request.headers)
        if request.method == "POST":
            self.orders.append((request.path_qs, await request.read()))
        if path in self.gates:
            await self.gates[path].wait()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if path in self.status:
            return web.Response(status=self.status[path])
        if path in self.pages:
            return web.Response(body=self.pages[path])
        if path == "/v1/models":
            body = json.dumps({"data": [{"id": name} for name in self.models]}).encode()
            return web.Response(body=self.models_body if self.models_body is not None else body)
        if path == "/metrics":
            page = PAGES[self.kind].format(running=self.running).encode()
            return web.Response(body=self.page if self.page is not None else page)
        if path in ("/health", "/model_info"):
            return web.Response()
        return web.Response(status=404)


class Recorder:
    """A sink that keeps every event."""

    def __init__(self) -> None:
        self.told: list[events.Event] = []

    def __call__(self, batch: list[events.Event]) -> None:
        self.told.extend(batch)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]

    def states(self, endpoint_id: str) -> list[str]:
        """The endpoint's story in words: joined, the states, left."""
        story = []
        for event in self.told:
            match event:
                case events.EndpointJoined(endpoint=endpoint) if endpoint.id == endpoint_id:
                    story.append("joined")
                case events.EndpointChanged(endpoint_id=known, state=state) if known == endpoint_id:
                    story.append(str(state))
                case events.EndpointLeft(endpoint_id=known) if known == endpoint_id:
                    story.append("left")
        return story


async def until(holds: Callable[[], object], limit_s: float = 20.0) -> None:
    """Wait for a condition; the limit only ends a test that would never pass."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "the condition never held"
        await asyncio.sleep(0.005)


def target(engine: ScriptedEngine, **more: Any) -> Target:
    return parse_url(engine.url, **more)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run an async test to its end; no task may be left."""

    async def checked() -> None:
        before = asyncio.all_tasks()
        await test()
        for _ in range(3):
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - before
        assert not left, left

    asyncio.run(checked())


class Kept:
    """A started keeper with a Recorder, closed at the end."""

    def __init__(self, *sources: Any, **settings: Any) -> None:
        self.sink = Recorder()
        self._sources = sources
        self._settings = {"pace": FAST, **settings}

    async def __aenter__(self) -> tuple[FleetKeeper, Recorder]:
        self._keeper = FleetKeeper(self._sources, self._settings.pop("sink", self.sink), **self._settings)
        await self._keeper.start()
        return self._keeper, self.sink

    async def __aexit__(self, *_: object) -> None:
        await self._keeper.close()
