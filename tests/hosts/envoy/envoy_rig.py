"""A real Envoy between tiny engines and a tiny picker, for the tests of this folder.

The picker names the engine that the request's `x-test-pick` header lists; engines do what the path says.
"""

import asyncio
import contextlib
import io
import json
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

import aiohttp
import grpc
import msgspec
from aiohttp import web
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_grpc
from google.protobuf import struct_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from shoal.hosts.envoy.endpoints import EndpointAddress, loaded, write_endpoints
from shoal.hosts.envoy.process import EnvoyProcess
from shoal.hosts.envoy.records import Record, decode_records
from shoal.hosts.envoy.settings import Clocks, EnvoySettings, Limits, Picker

OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_concurrent_streams", 1_000_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Above the default of 1,000 waiting calls the server refuses some by chance, whatever Envoy does.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
    ("grpc.server_max_unrequested_time_in_server", 600),
]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Logged(Record, frozen=True, kw_only=True):
    """A record and the path that it is of."""

    path: str


class TinyPicker(ext_grpc.ExternalProcessorServicer, als_pb2_grpc.AccessLogServiceServicer):  # type: ignore[misc]
    """Picks what `x-test-pick` says; keeps what it saw and the records it got."""

    def __init__(self, picker_id: str, path: str) -> None:
        self.id = picker_id
        self.path = path
        self.seen: list[dict[str, str]] = []
        self.bodies: list[int] = []
        self.records: list[Logged] = []
        self.raw: list[Any] = []
        self.open_streams = 0
        self.hold: asyncio.Event | None = None
        self.default_pick = ""
        self.minted = 0
        self.ended: list[str] = []
        self.server: grpc.aio.Server | None = None
        self.arrived = asyncio.Event()

    async def start(self) -> None:
        self.server = grpc.aio.server(options=OPTIONS)
        ext_grpc.add_ExternalProcessorServicer_to_server(self, self.server)
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(self, self.server)
        checks = health.aio.HealthServicer()  # type: ignore[attr-defined]
        await checks.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(checks, self.server)
        self.server.add_insecure_port(f"unix:{self.path}")
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)

    async def Process(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        self.open_streams += 1
        self.minted += 1
        minted = f"{self.id}-{self.minted}"
        headers: dict[str, str] = {}
        try:
            async for request in requests:
                kind = request.WhichOneof("request")
                if kind == "request_headers":
                    headers = {
                        one.key: (one.raw_value.decode() or one.value)
                        for one in request.request_headers.headers.headers
                    }
                    self.seen.append(headers)
                    self.arrived.set()
                    ends = request.request_headers.end_of_stream or "upgrade" in headers
                    if "x-test-refuse" in headers:
                        yield self.refusal(minted, headers)
                    elif ends:
                        yield await self.answer(minted, headers, "request_headers")
                    else:
                        yield ext.ProcessingResponse(request_headers=ext.HeadersResponse())
                elif kind == "request_body":
                    self.bodies.append(len(request.request_body.body))
                    yield await self.answer(minted, headers, "request_body")
        finally:
            self.open_streams -= 1
            self.ended.append(minted)

    def metadata(self, minted: str, pick: str, **more: object) -> struct_pb2.Struct:
        message = struct_pb2.Struct()
        message.update({"shoal": {"id": minted, "picker": self.id, **more}})
        if pick:
            message.update({"envoy.lb": {"x-gateway-destination-endpoint": pick}})
        return message

    def refusal(self, minted: str, headers: dict[str, str]) -> Any:
        reply = ext.ProcessingResponse(dynamic_metadata=self.metadata(minted, "", refused=True))
        reply.immediate_response.status.code = int(headers["x-test-refuse"])
        reply.immediate_response.body = b'{"error":{"message":"from the picker"}}'
        option = reply.immediate_response.headers.set_headers.add()
        option.header.key, option.header.raw_value = "retry-after", b"7"
        return reply

    async def answer(self, minted: str, headers: dict[str, str], kind: str) -> Any:
        if self.hold is not None:
            await self.hold.wait()
        if delay := headers.get("x-test-hold"):
            await asyncio.sleep(float(delay))
        pick = headers.get("x-test-pick", self.default_pick)
        more = {"x-session-token": headers["x-test-token"]} if "x-test-token" in headers else {}
        reply = ext.ProcessingResponse(dynamic_metadata=self.metadata(minted, pick, **more))
        common = getattr(reply, kind).response
        pairs = [("x-gateway-destination-endpoint", pick)] if pick else []
        if "x-test-no-retry" in headers:
            pairs.append(("x-envoy-max-retries", "0"))
        for key, value in pairs:
            option = common.header_mutation.set_headers.add()
            option.header.key, option.header.raw_value = key, value.encode()
        return reply

    async def StreamAccessLogs(self, requests: Any, context: Any) -> Any:
        async for message in requests:
            self.raw.append(message)
            for entry, record in zip(message.http_logs.log_entry, decode_records(message), strict=True):
                path = entry.request.path.partition("?")[0]
                self.records.append(Logged(**msgspec.structs.asdict(record), path=path))
        return als_pb2.StreamAccessLogsResponse()


async def serve_alone(picker_id: str, path: str) -> None:
    """Serve as a process of its own."""
    picker = TinyPicker(picker_id, path)
    await picker.start()
    print("ready", flush=True)
    await asyncio.Event().wait()


async def picker_process(picker_id: str, path: str) -> asyncio.subprocess.Process:
    """Start a picker that can be killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, picker_id, path, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


class TinyEngine:
    """An engine whose path says what it does."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.hits = 0
        self.aborted = 0
        self.runner: web.AppRunner | None = None
        self.answers: dict[str, Callable[[web.Request, bytes], Any]] = {}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, ssl: Any = None, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self.handle)
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port, ssl_context=ssl, backlog=4096)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.hits += 1
        try:
            if request.headers.get("upgrade", "").lower() == "websocket":
                return await self.echo_socket(request)
            body = await request.read()
            self.requests.append((request.path, dict(request.headers.items()), body))
            if act := self.answers.get(request.path):
                return await act(request, body)  # type: ignore[no-any-return]
            return web.json_response({"served": self.address, "bytes": len(body)})
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    async def echo_socket(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        async for message in ws:
            await ws.send_str(f"{self.address} {message.data}")
        return ws


async def sse(request: web.Request, events: list[Any], gap_s: float = 0.0, cut: bool = False) -> web.StreamResponse:
    """Stream events as an engine does; `cut` drops the connection instead of ending."""
    answer = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await answer.prepare(request)
    for event in events:
        text = event if isinstance(event, str) else json.dumps(event)
        await answer.write(f"data: {text}\n\n".encode())
        await asyncio.sleep(gap_s)
    if cut:
        assert request.transport is not None
        request.transport.abort()
        return answer
    await answer.write_eof()
    return answer


class Answer(NamedTuple):
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error of an OpenAI body."""
        assert self.headers["Content-Type"].startswith("application/json")
        return dict(json.loads(self.body)["error"])


class Rig:
    """Envoy, pickers, engines, and a client."""

    def __init__(self, directory: str, settings: EnvoySettings, pickers: list[TinyPicker]) -> None:
        self.directory = directory
        self.settings = settings
        self.pickers = pickers
        self.engines: list[TinyEngine] = []
        self.lines: list[str] = []
        self.envoy = EnvoyProcess(settings, log=self.lines.append)
        self.client: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    async def forget(self) -> None:
        """Start a test without what earlier ones left; their late records are told apart by path."""
        async with asyncio.timeout(10):
            while any(picker.open_streams for picker in self.pickers):
                await asyncio.sleep(0.01)
        for picker in self.pickers:
            picker.seen.clear()
            picker.bodies.clear()
            picker.records.clear()
            picker.ended.clear()
            picker.hold, picker.default_pick = None, ""
        for engine in self.engines:
            engine.requests.clear()
            engine.hits = engine.aborted = 0

    @property
    def records(self) -> list[Logged]:
        """What all pickers got."""
        return [record for picker in self.pickers for record in picker.records]

    async def record(self, path: str, count: int = 1) -> Logged:
        """Wait for the `count`-th record of `path`."""
        async with asyncio.timeout(10):
            while True:
                found = [record for record in self.records if record.path == path]
                if len(found) >= count:
                    return found[-1]
                await asyncio.sleep(0.02)

    async def record_unseen(self) -> Logged:
        """Wait for the record of a request that the picker had not answered."""
        async with asyncio.timeout(10):
            while not (found := [record for record in self.records if not record.request_id]):
                await asyncio.sleep(0.02)
            return found[0]

    async def send(
        self, path: str, pick: str = "", body: bytes = b"{}", headers: Mapping[str, str] | None = None, **more: str
    ) -> Answer:
        """Post one request; `more` are headers with `_` for `-`."""
        named = {key.replace("_", "-"): value for key, value in more.items()}
        headers = {"x-test-pick": pick, **(headers or {}), **named}
        data = io.BytesIO(body) if body else None
        async with self.client.post(self.url + path, data=data, headers=headers) as answer:
            return Answer(answer.status, dict(answer.headers), await answer.read())

    async def raw(self, text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection and send bytes as they are."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.settings.port)
        writer.write(text)
        await writer.drain()
        return reader, writer

    async def raw_answer(self, text: bytes) -> Answer:
        """Send bytes as they are and read one answer with a declared length."""
        reader, writer = await self.raw(text)
        async with asyncio.timeout(10):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.title(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers["Content-Length"]))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return Answer(int(head[0].split()[1]), headers, body)

    async def fleet(self, *addresses: str | EndpointAddress) -> None:
        members = [one if isinstance(one, EndpointAddress) else EndpointAddress(address=one) for one in addresses]
        version = write_endpoints(self.settings.run_dir, members)
        assert await loaded(self.envoy.admin, version)

    async def stat(self, name: str) -> int:
        return await self.envoy.admin.gauge(name) or 0


@contextlib.asynccontextmanager
async def rig(
    *, engines: int = 2, pickers: int = 2, clocks: Clocks | None = None, limits: Limits | None = None, **more: Any
) -> AsyncIterator[Rig]:
    """Start everything and end it, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as directory:
        workers = [TinyPicker(str(n), f"{directory}/p{n}.sock") for n in range(pickers)]
        settings = EnvoySettings(
            run_dir=directory,
            port=free_port(),
            pickers=tuple(Picker(id=one.id, socket=one.path) for one in workers),
            clocks=clocks or Clocks(),
            limits=limits or Limits(),
            **more,
        )
        made = Rig(directory, settings, workers)
        try:
            for worker in workers:
                await worker.start()
            for _ in range(engines):
                engine = TinyEngine()
                made.engines.append(engine)
                await engine.start()
            await made.envoy.start()
            await made.fleet(*(engine.address for engine in made.engines))
            timeout = aiohttp.ClientTimeout(total=20)
            async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as made.client:
                yield made
        finally:
            await made.envoy.stop()
            for worker in workers:
                await worker.stop()
            for engine in made.engines:
                await engine.stop()


if __name__ == "__main__":
    asyncio.run(serve_alone(sys.argv[1], sys.argv[2]))
