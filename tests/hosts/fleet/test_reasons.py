"""What an operator is told when an engine's URL is wrong: what to write instead."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from shoal.hosts.fleet import StaticSource, Target, parse_url
from tests.hosts.fleet.fleet_engines import Kept, ScriptedEngine, run, target, until
from tests.hosts.fleet.test_keeper import self_signed


async def reason_of(named: Target, holds: Callable[[str], bool]) -> None:
    """Wait for a reason that holds."""
    async with Kept(StaticSource([named])) as (keeper, _):
        await until(lambda: holds(keeper.reports()[0].reason))


def test_https_to_a_server_of_plain_http_says_so() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            await reason_of(
                parse_url(f"https://{engine.address}"),
                lambda said: said.endswith("write http:// if it serves plain HTTP"),
            )

    run(test)


def test_plain_http_to_a_server_of_tls_says_so(tmp_path: Path) -> None:
    async def test() -> None:
        key_file, ca_file = self_signed(tmp_path)
        async with ScriptedEngine() as engine:
            await engine.stop()
            engine.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            engine.tls.load_cert_chain(ca_file, key_file)
            await engine.start()
            await reason_of(
                parse_url(f"http://{engine.address}"), lambda said: said == "the server speaks TLS: write https://"
            )

    run(test)


def test_a_server_that_breaks_off_and_speaks_no_tls_gets_no_hint() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.close()

    async def test() -> None:
        async with raw_server(hang_up) as port:
            await reason_of(
                parse_url(f"http://127.0.0.1:{port}"), lambda said: said == "the engine closed the connection"
            )

    run(test)


def test_an_answer_that_is_not_http_is_said_on_one_line() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await writer.drain()
        writer.close()

    async def test() -> None:
        async with raw_server(greet) as port:
            await reason_of(parse_url(f"http://127.0.0.1:{port}"), lambda said: said == "the answer is not HTTP")

    run(test)


def test_a_web_server_that_is_no_engine_is_called_so() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            engine.status["/v1/models"] = 404
            expected = "/v1/models answered HTTP 404: no OpenAI API is at this URL; is it an engine?"
            await reason_of(target(engine), lambda said: said == expected)

    run(test)


def test_a_redirect_is_not_followed_and_names_its_goal() -> None:
    async def away(_: web.Request) -> web.Response:
        return web.Response(status=301, headers={"Location": "https://engine.example/v1/models"})

    async def test() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", away)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        expected = "/v1/models answered HTTP 301, which points to https://engine.example/v1/models"
        await reason_of(parse_url(f"http://127.0.0.1:{runner.addresses[0][1]}"), lambda said: said == expected)
        await runner.cleanup()

    run(test)


@asynccontextmanager
async def raw_server(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """A TCP server on a free port, which it gives."""
    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()
