"""A data plane between scripted engines and raw clients, all on one loop.

Engines and clients speak bytes, so that a test can say exactly what is on the wire.
"""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, NamedTuple

import msgspec

from shoal.hosts.backends import BackendsFile
from shoal.hosts.direct.plane import Plane
from shoal.hosts.direct.settings import DirectClocks, settings_of
from shoal.hosts.driver import Driver
from shoal.hosts.picker import Answered, Picker, Placed
from shoal.kernel import Chance
from shoal.measures import Fold
from shoal.pool import Endpoint, EndpointState, Outcome, ServedModel
from shoal.prefix import BlockHasher
from shoal.routing import Account, Router
from shoal.routing.config import load
from shoal.routing.events import EndpointChanged, EndpointJoined, ModelsSeen

OK_BODY = b'{"ok":true,"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}'
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Seen(NamedTuple):
    """A request as an engine got it.  head: without the empty line."""

    head: bytes
    body: bytes

    def values(self, name: str) -> list[str]:
        """Every value of a header."""
        pairs = [line.partition(b":") for line in self.head.split(b"\r\n")[1:]]
        return [value.strip().decode("latin-1") for key, _, value in pairs if key.decode().lower() == name]


class Wire:
    """One connection of an engine, as its script sees it."""

    def __init__(self, engine: "Engine", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.engine = engine
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Write and wait until it is on its way."""
        self.writer.write(data)
        await self.writer.drain()

    def abort(self) -> None:
        """Break the connection."""
        transport: Any = self.writer.transport
        transport.abort()

    def stop_reading(self) -> None:
        """Read no more, so that what is sent piles up."""
        transport: Any = self.writer.transport
        transport.pause_reading()

    def read_again(self) -> None:
        """Undo `stop_reading`."""
        transport: Any = self.writer.transport
        transport.resume_reading()

    async def lost(self) -> None:
        """Wait until the plane closes the connection."""
        with suppress(OSError):
            while await self.reader.read(65536):
                pass


Script = Callable[[Wire, Seen], Awaitable[None]]


def plain(body: bytes = OK_BODY, status: str = "200 OK", headers: bytes = b"") -> bytes:
    """A whole answer with a length."""
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b" % (
        status.encode(),
        len(body),
        headers,
        body,
    )


def chunk(data: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def says(answer: bytes) -> Script:
    """A script that sends `answer` to every request."""

    async def script(wire: Wire, _: Seen) -> None:
        await wire.send(answer)

    return script


class Engine:
    """A server that reads requests and lets its script answer.

    connections: ever opened.  closed: those that ended.  lost: times that a script found its connection closed.
    """

    def __init__(self) -> None:
        self.address = ""
        self.seen: list[Seen] = []
        self.connections = self.closed = 0
        self.script: Script = says(plain())
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=tls, limit=1 << 26)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        wire = Wire(self, reader, writer)
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
                lengths = Seen(head, b"").values("content-length")
                body = await reader.readexactly(int(lengths[0])) if lengths else b""
                self.seen.append(Seen(head, body))
                await self.script(wire, self.seen[-1])
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass
        finally:
            self.closed += 1
            self._tasks.discard(task)
            writer.close()


class Answer(NamedTuple):
    """An answer as a client got it.  raw_body: with its framing.  is_whole: it ended as it should."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    raw_body: bytes
    is_whole: bool

    def header(self, name: str) -> str | None:
        """The value of a header, None when it is not there."""
        values = [value for key, value in self.headers if key == name]
        assert len(values) < 2, f"{name} came {len(values)} times"
        return values[0] if values else None

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the body."""
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


class Client:
    """One raw connection to the plane."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Write."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, list[tuple[str, str]]]:
        """Read the head of an answer."""
        lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1").split("\r\n")
        pairs = [line.split(":", 1) for line in lines[1:]]
        return int(lines[0].split(" ")[1]), [(name.lower(), value.strip()) for name, value in pairs]

    async def answer(self, is_head: bool = False) -> Answer:
        """Read one answer, whole or cut."""
        status, headers = await self.head()
        raw, body, is_whole = bytearray(), bytearray(), True
        fields = dict(headers)
        try:
            if is_head or status in (204, 304) or status < 200:
                pass
            elif fields.get("transfer-encoding") == "chunked":
                size = 1
                while size:
                    line = await self.reader.readuntil(b"\r\n")
                    raw += line
                    size = int(line, 16)
                    data = await self.reader.readexactly(size + 2)
                    raw += data
                    assert data.endswith(b"\r\n")
                    body += data[:-2]
            elif "content-length" in fields:
                raw += await self.reader.readexactly(int(fields["content-length"]))
                body = raw
            else:
                raw += await self.reader.read()
                body = raw
        except asyncio.IncompleteReadError as error:
            raw += error.partial
            is_whole = False
        except ConnectionResetError:
            is_whole = False
        return Answer(status, headers, bytes(body), bytes(raw), is_whole)

    async def answer_body(self) -> bytes:
        """Read what follows a head of a chunked answer, to its end or to the end of the connection."""
        try:
            return await self.reader.readuntil(b"0\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            return error.partial

    async def ask(self, data: bytes) -> Answer:
        """Send and read the answer."""
        await self.send(data)
        return await self.answer()

    async def is_closed(self) -> bool:
        """Whether the plane closes the connection, having sent nothing more."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionResetError:
            return True

    def stop_reading(self) -> None:
        """Read no more, so that what is for it piles up."""
        transport: Any = self.writer.transport
        transport.pause_reading()

    def read_again(self) -> None:
        """Undo `stop_reading`."""
        transport: Any = self.writer.transport
        transport.resume_reading()

    def close(self) -> None:
        """Leave."""
        self.writer.close()

    def abort(self) -> None:
        """Leave without a goodbye."""
        transport: Any = self.writer.transport
        transport.abort()


class Pool:
    """The plane, its engines, and what the router was told."""

    def __init__(self, picker: Picker, plane: Plane, engines: list[Engine], accounts: list[Account]) -> None:
        self.picker = picker
        self.plane = plane
        self.engines = engines
        self.accounts = accounts
        self.port = 0
        self.clients: list[Client] = []

    async def client(self, tls: ssl.SSLContext | None = None, name: str | None = None) -> Client:
        """Connect."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=tls, server_hostname=name, limit=1 << 26
        )
        self.clients.append(Client(reader, writer))
        return self.clients[-1]

    async def ask(self, data: bytes) -> Answer:
        """Send one request on a connection of its own."""
        client = await self.client()
        answer = await client.ask(data)
        client.close()
        return answer

    async def outcome(self, count: int = 1) -> Outcome:
        """Wait until `count` requests are accounted for; returns the last one's outcome."""
        await until(lambda: len(self.accounts) >= count)
        return self.accounts[count - 1].outcome

    def join(self, address: str) -> None:
        """Add an endpoint."""
        feed = self.picker.driver.feed
        feed(EndpointJoined(Endpoint(id=address, address=address)))
        feed(ModelsSeen(address, (ServedModel(id="m"),)))
        feed(EndpointChanged(address, EndpointState.READY))

    def prefer(self, *addresses: str) -> None:
        """Have the router name these endpoints, in this order."""
        real = type(self.picker).ask

        def ask(picker: Picker, *args: Any, **named: Any) -> Placed | Answered:
            placed = real(picker, *args, **named)
            if isinstance(placed, Answered):
                return placed
            kept = addresses if placed.forward.retry_allowed else addresses[:1]
            return placed._replace(forward=msgspec.structs.replace(placed.forward, endpoints=kept))

        self.picker.ask = ask.__get__(self.picker)  # type: ignore[method-assign]

    @property
    def inflight(self) -> int:
        """Requests on the router's books."""
        return self.picker.driver.router.status().inflight


@contextmanager
def deaf_address() -> Iterator[str]:
    """An address where no connection is ever accepted or refused."""
    with ExitStack() as open_sockets:
        full = open_sockets.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            blocker = open_sockets.enter_context(socket.socket())
            blocker.setblocking(False)
            blocker.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"


async def until(is_true: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    while not is_true():
        await asyncio.sleep(0.005)


@asynccontextmanager
async def pool(
    engines: int = 1,
    config: str = "",
    *,
    backends: BackendsFile | None = None,
    tls: ssl.SSLContext | None = None,
    check_key: Any = None,
    clocks: DirectClocks | None = None,
    router: Router | None = None,
    **settings: Any,
) -> AsyncIterator[Pool]:
    """Run a plane in front of so many engines.  config: of the pool; settings: of the plane, over the configured."""
    loaded = load(config, "test")
    accounts: list[Account] = []
    driver = Driver(router or Router(loaded, Chance(1)), Fold(), on_account=accounts.append)
    picker = Picker(driver, loaded, BlockHasher(7), "0", "run", check_key)
    chosen = msgspec.structs.replace(settings_of(loaded.pool), **settings)
    if clocks is not None:
        chosen = msgspec.structs.replace(chosen, clocks=clocks)
    plane = Plane(picker, chosen, backends or BackendsFile(None))
    made = Pool(picker, plane, [Engine() for _ in range(engines)], accounts)
    for engine in made.engines:
        await engine.start()
        made.join(engine.address)
    await plane.listen_at("127.0.0.1", 0, tls)
    made.port = plane.ports[0]
    try:
        yield made
    finally:
        for client in made.clients:
            client.abort()
        await plane.close()
        for engine in made.engines:
            await engine.stop()
        driver.close()


def request(
    body: Any = None,
    path: str = "/v1/chat/completions",
    *,
    method: str = "POST",
    headers: str = "",
    version: str = "1.1",
) -> bytes:
    """A request; a body that is no bytes is sent as JSON.  headers: lines, each with its CRLF."""
    if body is None and method == "POST":
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    sent = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    length = f"content-length: {len(sent)}\r\n" if body is not None else ""
    return f"{method} {path} HTTP/{version}\r\nhost: pool\r\n{headers}{length}\r\n".encode("latin-1") + sent


def chat(stream: bool = False, text: str = "hello", **more: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": "m", "stream": stream, "messages": [{"role": "user", "content": text}], **more}
