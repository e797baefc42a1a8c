"""A backend that shows what reached it and answers by script: a tiny server in a thread."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "me"}]}


class Seen:
    """One request as it arrived.  headers: in order, lower case, repeats kept."""

    def __init__(self, request: web.Request, body: bytes) -> None:
        self.path = request.path
        self.headers = [(name.decode().lower(), value.decode()) for name, value in request.raw_headers]
        self.body = body

    def values(self, name: str) -> list[str]:
        """All values of a header."""
        return [value for key, value in self.headers if key == name]


class Backend:
    """Serves `/health` and `/v1/models`; keeps every other request in `seen` and answers `{"bytes": N}`.

    scripts: path -> pieces of an event stream, sent with a pause between them.  answers: path -> status and body.
    delay_s: how long each answer waits.  gate: while closed, answers wait for it.
    """

    def __init__(self) -> None:
        self.port = 0
        self.seen: list[Seen] = []
        self.scripts: dict[str, list[bytes]] = {}
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.delay_s = 0.0
        self._gate = asyncio.Event()
        self._gate.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._up = threading.Event()

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Serve until `stop`."""
        self._thread.start()
        assert self._up.wait(30.0)

    def stop(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def close_gate(self) -> None:
        """Hold answers back from now on."""
        self._loop.call_soon_threadsafe(self._gate.clear)

    def open_gate(self) -> None:
        """Let the answers go."""
        self._loop.call_soon_threadsafe(self._gate.set)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, auto_decompress=False)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.port = int(runner.addresses[0][1])
        self._up.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        if request.path == "/v1/models":
            return web.json_response(MODELS)
        if request.path == "/metrics":
            return web.Response(status=404)
        if request.headers.get("upgrade", "").lower() == "websocket":
            return await _echo(request)
        self.seen.append(Seen(request, await request.read()))
        await asyncio.sleep(self.delay_s)
        await self._gate.wait()
        if request.path in self.scripts:
            return await _stream(request, self.scripts[request.path])
        if request.path in self.answers:
            status, body = self.answers[request.path]
            return web.Response(status=status, body=body, content_type="application/json")
        return web.json_response({"bytes": len(self.seen[-1].body)})


async def _stream(request: web.Request, pieces: list[bytes]) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    for piece in pieces:
        await answer.write(piece)
        await asyncio.sleep(0.005)
    await answer.write_eof()
    return answer


async def _echo(request: web.Request) -> web.WebSocketResponse:
    connection = web.WebSocketResponse()
    await connection.prepare(request)
    async for message in connection:
        await connection.send_str(f"echo {message.data}")
    return connection


@contextmanager
def backend() -> Iterator[Backend]:
    """A running backend."""
    running = Backend()
    running.start()
    try:
        yield running
    finally:
        running.stop()
