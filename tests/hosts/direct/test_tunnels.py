"""Upgraded connections: bytes both ways unread, and an ordinary request where there is nothing to upgrade."""

import asyncio

from shoal.hosts.direct.settings import DirectClocks
from shoal.pool import Api, Refusal, RefusalReason
from shoal.routing.commands import Cut
from tests.hosts.direct.direct_rig import Seen, Wire, plain, pool, request, says, until
from tests.hosts.direct.fuzz_rig import world

UPGRADE = "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\n"
SWITCHED = (
    b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-accept: a\r\n\r\n"
)


async def echo(wire: Wire, _: Seen) -> None:
    await wire.send(SWITCHED + b"hello")
    while data := await wire.reader.read(65536):
        await wire.send(data)
    wire.writer.close()


async def test_a_websocket_is_a_tunnel_and_is_recorded_at_its_end() -> None:
    async with pool() as it:
        it.engines[0].script = echo
        client = await it.client()
        await client.send(request(path="/v1/realtime", method="GET", headers=UPGRADE) + b"ahead")
        status, headers = await client.head()
        assert (status, dict(headers)["upgrade"], dict(headers)["connection"]) == (101, "websocket", "upgrade")
        assert dict(headers)["sec-websocket-accept"] == "a"
        assert await client.reader.readexactly(10) == b"helloahead"
        for text in (b"one", b"GET / HTTP/1.1\r\n\r\n", b"x" * 1_000_000):
            await client.send(text)
            assert await client.reader.readexactly(len(text)) == text
        assert it.inflight == 1
        assert it.accounts == []
        assert it.engines[0].seen[0].values("upgrade") == ["websocket"]
        assert it.engines[0].seen[0].values("connection") == ["upgrade"]
        client.close()
        outcome = await it.outcome()
        assert (outcome.status, outcome.is_cut, outcome.is_upstream_failure) == (101, False, False)
        await until(lambda: it.engines[0].closed == 1)


async def test_an_engine_that_ends_a_tunnel_ends_the_clients_connection() -> None:
    async def bye(wire: Wire, _: Seen) -> None:
        await wire.send(SWITCHED + b"bye")
        wire.writer.close()

    async with pool() as it:
        it.engines[0].script = bye
        client = await it.client()
        await client.send(request(path="/v1/realtime", method="GET", headers=UPGRADE))
        await client.head()
        assert await client.reader.read() == b"bye"
        assert (await it.outcome()).status == 101


async def test_an_engine_that_does_not_read_stops_the_client() -> None:
    gate = asyncio.Event()

    async def deaf(wire: Wire, _: Seen) -> None:
        wire.stop_reading()
        await wire.send(SWITCHED)
        await gate.wait()
        wire.read_again()
        await wire.lost()

    async with pool() as it:
        it.engines[0].script = deaf
        client = await it.client()
        await client.send(request(path="/v1/realtime", method="GET", headers=UPGRADE))
        await client.head()
        client.writer.write(b"x" * 20_000_000)
        before = -1
        transport = client.writer.transport
        while before != transport.get_write_buffer_size():
            before = transport.get_write_buffer_size()
            await asyncio.sleep(0.1)
        assert before > 1_000_000
        gate.set()
        await client.writer.drain()


async def test_an_engine_may_decline_an_upgrade() -> None:
    async with pool() as it:
        it.engines[0].script = says(plain(b"no", "426 Upgrade Required"))
        client = await it.client()
        answer = await client.ask(request(path="/v1/realtime", method="GET", headers=UPGRADE))
        assert (answer.status, answer.body) == (426, b"no")
        it.engines[0].script = says(plain())
        assert (await client.ask(request())).status == 200


async def test_an_upgrade_that_connection_does_not_name_or_to_another_protocol_is_ignored() -> None:
    async with pool() as it:
        for lines in ("Upgrade: websocket\r\n", "Connection: upgrade\r\nUpgrade: h2c\r\n"):
            assert (await it.ask(request(headers=lines))).status == 200
            assert it.engines[0].seen[-1].values("upgrade") == []
        await it.ask(request(headers=UPGRADE))
        assert it.engines[0].seen[-1].values("upgrade") == []


def test_a_tunnel_ends_when_it_is_silent_for_too_long_or_lasts_too_long() -> None:
    for clocks, flag in ((DirectClocks(), "SI"), (DirectClocks(stream_s=900.0), "DT")):
        with world(clocks=clocks) as it:
            it.answer = lambda engine, _: engine.peer_says(SWITCHED + b"hello")
            client = it.client()
            client.peer_says(request(path="/v1/realtime", method="GET", headers=UPGRADE))
            it.loop.run()
            assert bytes(client.heard).endswith(b"hello")
            it.pass_time(500.0)
            assert not client.is_lost
            it.pass_time(8000.0)
            assert client.is_lost
            (account,) = it.accounts
            assert (account.outcome.status, account.outcome.response_bytes) == (101, 5)
            assert account.outcome.flags == flag


def test_a_tunnel_is_cut_when_the_router_says_so() -> None:
    with world() as it:
        it.answer = lambda engine, _: engine.peer_says(SWITCHED)
        client = it.client()
        client.peer_says(request(path="/v1/realtime", method="GET", headers=UPGRADE))
        it.loop.run()
        (plane_client,) = it.plane._clients
        assert plane_client.relay is not None
        name = plane_client.relay.request_id
        refusal = Refusal(reason=RefusalReason.ABORTED, message="enough")
        assert it.plane.cut({name: Cut(name, refusal, Api.OTHER)}) == 1
        it.loop.run()
        assert client.is_lost
        assert all(each.transport.is_closing() for each in it.engines)
        assert [account.outcome.flags for account in it.accounts] == ["OA"]


def test_an_engine_that_begins_a_tunnel_with_more_than_its_client_reads_is_paused() -> None:
    with world() as it:
        it.answer = lambda engine, _: engine.peer_says(SWITCHED + b"x" * 200_000)
        client = it.client()
        client.peer_stops_reading()
        client.peer_says(request(path="/v1/realtime", method="GET", headers=UPGRADE))
        it.loop.run()
        assert not it.engines[0].transport._is_reading
