"""The worker as a process: fed over its admin socket, replaced under load, ended in order."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from shoal.hosts.direct.plane import listening
from shoal.hosts.direct.worker import open_socket
from shoal.kernel import ConfigError
from shoal.pool import Endpoint, EndpointState, ServedModel
from shoal.routing import Event
from shoal.routing.events import EndpointChanged, EndpointJoined, EndpointLeft, ModelsSeen
from shoal.routing.journal import MAGIC
from tests.hosts.direct.direct_rig import CHUNKED_HEAD, Client, Engine, Seen, Wire, chat, chunk, plain, request, until

pytestmark = pytest.mark.e2e


class Process:
    """One worker process and its admin socket."""

    def __init__(self, child: asyncio.subprocess.Process, admin: Path) -> None:
        self.child = child
        self.session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(admin)))

    async def post(self, target: str, body: bytes = b"") -> Any:
        async with self.session.post(f"http://worker{target}", data=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def answers(self) -> bool:
        try:
            return "ok" in await self.get("/healthz")
        except aiohttp.ClientError:
            return False

    async def get(self, target: str) -> str:
        async with self.session.get(f"http://worker{target}") as answer:
            return await answer.text()

    async def know(self, *engines: Engine) -> None:
        events: list[Event] = []
        for engine in engines:
            name = engine.address
            events += [
                EndpointJoined(Endpoint(id=name, address=name)),
                ModelsSeen(name, (ServedModel(id="m"),)),
                EndpointChanged(name, EndpointState.READY),
            ]
        await self.post("/events", msgspec.msgpack.encode(events))


@asynccontextmanager
async def worker(tmp_path: Path, name: str, *flags: str, fds: tuple[int, ...] = ()) -> AsyncIterator[Process]:
    admin = tmp_path / f"{name}.sock"
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shoal.hosts.direct", "--admin", str(admin), "--picker-id", "0", *flags), pass_fds=fds
    )
    process = Process(child, admin)
    try:
        while child.returncode is None and not await process.answers():
            await asyncio.sleep(0.01)
        yield process
    finally:
        await process.session.close()
        if child.returncode is None:
            child.kill()
        await child.wait()


@asynccontextmanager
async def clients(port: int) -> AsyncIterator[Callable[[], Awaitable[Client]]]:
    """Yields what makes connections, which end with the context."""
    made: list[Client] = []

    async def connect() -> Client:
        made.append(Client(*await asyncio.open_connection("127.0.0.1", port)))
        return made[-1]

    try:
        yield connect
    finally:
        for client in made:
            client.abort()


@asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def test_a_held_worker_serves_when_it_is_told_and_says_what_it_carries(tmp_path: Path) -> None:
    with listening("127.0.0.1", 0) as shared:
        port = shared.getsockname()[1]
        async with (
            engine() as one,
            clients(port) as connect,
            worker(tmp_path, "w", "--held", "--listen", f"fd:{shared.fileno()}", fds=(shared.fileno(),)) as process,
        ):
            await process.know(one)
            client = await connect()
            asking = asyncio.ensure_future(client.ask(request()))
            await asyncio.sleep(0.2)
            assert not asking.done()
            await process.post("/serve")
            assert (await asking).status == 200
            assert '"clients": 1' in await process.get("/connections")
            page = await process.get("/metrics")
            assert "\nshoal_client_connections 1" in page
            assert "\nshoal_buffered_bytes 0" in page
            explained = await process.get(f"/explain/{(await client.ask(request())).header('x-shoal-request-id')}")
            assert one.address in explained
            await process.post("/events", msgspec.msgpack.encode([EndpointLeft(one.address)]))
            assert (await client.ask(request())).status in (404, 503)
            process.child.send_signal(signal.SIGTERM)
            assert await process.child.wait() == 0


async def test_a_worker_is_replaced_under_load_without_a_lost_request(tmp_path: Path) -> None:
    async def script(wire: Wire, seen: Seen) -> None:
        if b'"stream": true' in seen.body:
            await wire.send(CHUNKED_HEAD)
            for _ in range(40):
                await wire.send(chunk(b"data: x\n\n"))
                await asyncio.sleep(0.05)
            await wire.send(b"0\r\n\r\n")
        else:
            await asyncio.sleep(0.002)
            await wire.send(plain())

    with listening("127.0.0.1", 0) as shared:
        port = shared.getsockname()[1]
        flags = ("--held", "--listen", f"fd:{shared.fileno()}")
        async with (
            engine() as one,
            clients(port) as connect,
            worker(tmp_path, "a", *flags, fds=(shared.fileno(),)) as old,
        ):
            one.script = script
            await old.know(one)
            await old.post("/serve")
            stop = asyncio.Event()
            counts = {"ok": 0}

            async def load(is_lasting: bool) -> None:
                """Closed loop of a client that reconnects where it is told to."""
                client = await connect()
                while not stop.is_set():
                    answer = await client.ask(request(headers="" if is_lasting else "connection: close\r\n"))
                    assert answer.status == 200
                    counts["ok"] += 1
                    if answer.header("connection") == "close":
                        client.close()
                        client = await connect()
                client.close()

            async def stream() -> None:
                client = await connect()
                answer = await client.ask(request(chat(stream=True)))
                assert answer.is_whole
                assert len(answer.body) == 40 * 9

            loads = [asyncio.ensure_future(load(number % 2 == 0)) for number in range(8)]
            streams = [asyncio.ensure_future(stream()) for _ in range(4)]
            await asyncio.sleep(0.5)
            async with worker(tmp_path, "b", *flags, fds=(shared.fileno(),)) as new:
                await new.know(one)
                await new.post("/serve")
                before = counts["ok"]
                await old.post("/drain?linger_s=1")
                await asyncio.gather(*streams)
                assert await old.child.wait() == 0
                done = counts["ok"]
                await until(lambda: counts["ok"] > done + 50)
                stop.set()
                await asyncio.gather(*loads)
                assert done > before


async def test_a_worker_that_cannot_listen_says_so_and_ends(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        async with worker(tmp_path, "w", "--listen", where) as process:
            assert await process.child.wait() == 2
    for wrong in ("nowhere", "127.0.0.1:x", "fd:9999"):
        with pytest.raises(ConfigError):
            open_socket(wrong)


async def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    admin = tmp_path / "w.sock"
    code = (
        "import subprocess, sys, time; "
        f"print(subprocess.Popen([sys.executable, '-m', 'shoal.hosts.direct', '--listen', '127.0.0.1:0', '--admin', "
        f"{str(admin)!r}]).pid, flush=True); time.sleep(60)"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    await until(admin.exists)
    await asyncio.sleep(0.3)
    parent.kill()
    await parent.wait()
    await until(lambda: not Path(f"/proc/{pid}").exists())


async def test_a_worker_that_starts_removes_journals_beyond_what_the_configuration_allows(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    old = [folder / f"picker-0-{number:08x}.journal" for number in range(9)]
    for age, path in enumerate(reversed(old)):
        path.write_bytes(MAGIC)
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    config = tmp_path / "pool.yaml"
    config.write_text(f"apiVersion: shoal.dev/v1alpha1\nkind: Pool\njournal: {{path: {folder}, runs: 3}}\n")
    async with worker(tmp_path, "w", "--listen", "127.0.0.1:0", "--config", str(config)):
        await until(lambda: len({*folder.iterdir()} - {*old}) == 1)
        assert {*folder.iterdir()} & {*old} == {*old[-3:]}
