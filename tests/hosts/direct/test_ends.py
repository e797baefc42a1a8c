"""How connections end: drain, slow senders, unused ones, and what they hold meanwhile."""

import asyncio
import gc
import resource
import socket
import tracemalloc

import pytest

from shoal.hosts.direct.clients import ENDING
from shoal.hosts.direct.settings import DirectClocks
from tests.hosts.direct.direct_rig import CHUNKED_HEAD, Client, Seen, Wire, chat, chunk, plain, pool, request, until

EVENT = b"data: x\n\n"


async def test_a_drain_lets_streams_end_tells_the_rest_to_leave_and_takes_no_more() -> None:
    gate = asyncio.Event()

    async def script(wire: Wire, seen: Seen) -> None:
        if b'stream": true' not in seen.body:
            await wire.send(plain())
            return
        await wire.send(CHUNKED_HEAD + chunk(EVENT))
        await gate.wait()
        await wire.send(chunk(EVENT) + b"0\r\n\r\n")

    async with pool() as it:
        it.engines[0].script = script
        streaming, idle, used = [await it.client() for _ in range(3)]
        await streaming.send(request(chat(stream=True)))
        await streaming.head()
        await idle.ask(request())
        await used.ask(request())
        it.plane.drain(0.5)
        answer = await used.ask(request())
        assert (answer.status, answer.header("connection")) == (200, "close")
        assert await used.is_closed()
        assert await idle.is_closed()
        with pytest.raises(OSError):
            await it.client()
        assert it.plane.clients == 1
        gate.set()
        assert (await streaming.reader.readuntil(b"0\r\n\r\n")).endswith(b"0\r\n\r\n")
        assert await streaming.is_closed()
        await it.plane.drained()


async def test_connections_that_wait_in_the_queue_of_a_shared_socket_are_served_by_the_successor() -> None:
    async with pool() as it:
        server = it.plane._servers[0]
        kept = server.sockets[0].dup()
        it.plane.drain(0.1)
        waiting = asyncio.ensure_future(it.ask(request()))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        it.plane.is_draining = False
        await it.plane.listen([kept])
        assert (await waiting).status == 200


@pytest.mark.parametrize("part", [b"POST /x HT", b"POST /x HTTP/1.1\r\nhost: a\r\n"])
async def test_a_head_that_does_not_come_in_time_is_408(part: bytes) -> None:
    async with pool(clocks=DirectClocks(headers_s=0.3)) as it:
        client = await it.client()
        answer = await client.ask(part)
        assert (answer.status, answer.error["code"], answer.header("connection")) == (408, "request_timeout", "close")
        assert await client.is_closed()


async def test_a_body_that_does_not_come_in_time_is_408_and_holds_nothing_more() -> None:
    async with pool(clocks=DirectClocks(upload_s=0.4)) as it:
        client = await it.client()
        sending = asyncio.ensure_future(_drip(client))
        answer = await client.answer()
        sending.cancel()
        assert answer.status == 408
        assert it.picker.buffered_bytes == 0


async def _drip(client: Client) -> None:
    await client.send(request(b"x" * 1000)[:-1000])
    while True:
        await client.send(b"x")
        await asyncio.sleep(0.02)


async def test_a_connection_without_use_is_closed_and_a_slow_answer_is_none() -> None:
    async def slow(wire: Wire, _: Seen) -> None:
        await asyncio.sleep(0.8)
        await wire.send(plain())

    async with pool(clocks=DirectClocks(connection_idle_s=0.3)) as it:
        it.engines[0].script = slow
        unused, client = await it.client(), await it.client()
        assert (await client.ask(request())).status == 200
        assert await unused.is_closed()
        assert await client.is_closed()


async def test_who_sends_on_after_a_refusal_is_read_for_a_while_and_then_closed() -> None:
    config = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nlimits: {max_body_bytes: 1000}\n"
    async with pool(config=config, clocks=DirectClocks(linger_s=0.5)) as it:
        client = await it.client()
        client.writer.write(request(b"x" * 30_000_000))
        answer = await client.answer()
        assert answer.status == 413
        endless = await it.client()
        await endless.send(request(b"x" * 2000)[:-1000])
        await endless.answer()
        await until(lambda: it.plane.clients <= 1)


async def test_half_sent_bodies_share_a_budget_and_small_ones_do_not_wait_for_it() -> None:
    config = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nlimits: {max_buffered_bytes: 10000000}\n"
    async with pool(config=config) as it:
        for _ in range(4):
            client = await it.client()
            await client.send(request(b"x" * 2_400_000)[:-2_000_000])
        await until(lambda: it.picker.buffered_bytes == 9_600_000)
        client = await it.client()
        await client.send(request(b"x" * 2_400_000)[:-2_000_000])
        answer = await client.answer()
        assert (answer.status, answer.header("retry-after")) == (429, "1")
        assert (await it.ask(request())).status == 200
        for client in it.clients:
            client.abort()
        await until(lambda: it.plane.clients == 0)
        assert it.picker.buffered_bytes == 0


async def test_partial_heads_small_bodies_and_what_is_sent_ahead_are_bounded_too() -> None:
    async def slow(wire: Wire, _: Seen) -> None:
        await wire.lost()

    async with pool(max_buffered_bytes=1_000_000) as it:
        it.engines[0].script = slow
        part = b"POST /x HTTP/1.1\r\nhost: a\r\nx-a: " + b"b" * 60_000
        for number in range(60):
            client = await it.client()
            if number % 3 == 0:
                await client.send(part)
            elif number % 3 == 1:
                await client.send(request() + part)
            else:
                await client.send(request(b"x" * 60_000, "/x")[:-30_000])
            await asyncio.sleep(0.002)
            assert it.picker.buffered_bytes <= 1_700_000
        assert (await it.clients[-3].answer()).status == 503
        assert (await it.clients[-1].answer()).status == 429
        for client in it.clients:
            client.abort()
        await until(lambda: it.plane.clients == 0)
        assert it.picker.buffered_bytes == 0


async def test_a_client_that_asks_on_and_on_and_reads_nothing_is_not_answered_on_and_on() -> None:
    async with pool() as it:
        client = await it.client()
        client.stop_reading()
        await until(lambda: it.plane.clients == 1)
        (connection,) = it.plane._clients
        # Else the kernel takes in megabytes of answers and nobody has to wait.
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        ask = request(path=f"/v1/models/{'GET%20/hidden' * 20}", method="GET")
        for _ in range(400):
            client.writer.write(ask * 20)
        # More was sent ahead than is kept: it is thrown away, and so nothing that follows may be read as a request.
        await until(lambda: connection._state == ENDING)
        assert it.picker.buffered_bytes < 1_000_000
        client.read_again()
        count = 0
        try:
            async with asyncio.timeout(20):
                while (await client.answer()).status == 404:
                    count += 1
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass
        assert 0 < count < 8000
        await until(lambda: it.plane.clients == 0)


async def test_a_body_in_tiny_pieces_holds_little_more_than_its_bytes() -> None:
    size = 100_000
    async with pool() as it:
        sized, chunked = await it.client(), await it.client()
        await sized.send(request(b"x" * size, "/any")[:-size])
        await chunked.send(b"POST /any HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        await until(lambda: it.plane.clients == 2 and it.picker.buffered_bytes > size)
        connections = list(it.plane._clients)
        tracemalloc.start()
        try:
            for _ in range(size - 1):
                connections[0].data_received(b"x")
                connections[1].data_received(b"1\r\nx\r\n")
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < 4 * size
        await sized.send(b"x")
        await chunked.send(b"0\r\n\r\n")
        assert (await sized.answer()).status == (await chunked.answer()).status == 200
        assert sorted(len(seen.body) for seen in it.engines[0].seen) == [size - 1, size]


async def test_a_large_body_is_charged_until_its_answer_begins() -> None:
    gate = asyncio.Event()

    async def waits(wire: Wire, _: Seen) -> None:
        await gate.wait()
        await wire.send(CHUNKED_HEAD + chunk(EVENT))
        await wire.lost()

    async with pool() as it:
        it.engines[0].script = waits
        client = await it.client()
        await client.send(request(b"x" * 3_000_000, "/any"))
        await until(lambda: len(it.engines[0].seen) == 1)
        assert it.picker.buffered_bytes == 3_000_000
        gate.set()
        await client.head()
        assert it.picker.buffered_bytes == 0


async def test_an_unused_connection_holds_under_15_kilobytes() -> None:
    count = 400
    async with pool() as it:
        first = await it.client()
        await first.ask(request())
        gc.collect()
        sockets = []
        before = _rss_bytes()
        for _ in range(count):
            made = socket.create_connection(("127.0.0.1", it.port))
            sockets.append(made)
            if len(sockets) % 50 == 0:
                await asyncio.sleep(0.01)
        await until(lambda: it.plane.clients == count + 1)
        gc.collect()
        assert (_rss_bytes() - before) / count < 15_000
        for made in sockets:
            made.close()


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def test_closed_connections_leave_nothing_behind() -> None:
    async with pool() as it:
        for _ in range(3):
            clients = [await it.client() for _ in range(20)]
            for client in clients:
                assert (await client.ask(request())).status == 200
                client.abort()
            await until(lambda: it.plane.clients == 0)
        await it.outcome(60)
        await until(lambda: sum(len(slot) for slot in it.plane.wheel._slots) <= 25 * 3 + 60)
        assert it.plane.active == it.plane.retrying == it.inflight == 0
        assert it.picker.driver.router.status().unclosed == 0


async def test_nothing_of_a_request_waits_for_the_collector() -> None:
    async def cuts(wire: Wire, seen: Seen) -> None:
        await wire.send(CHUNKED_HEAD + chunk(EVENT))
        if b"whole" in seen.body:
            await wire.send(b"0\r\n\r\n")
            return
        if b"left" in seen.body:
            await wire.lost()
        wire.abort()

    def alive() -> list[str]:
        names = {"Relay", "Splice", "ChunkWalk", "ChunkDecoder", "EngineConnection", "ClientConnection"}
        return [type(one).__name__ for one in gc.get_objects() if type(one).__name__ in names]

    async with pool(clocks=DirectClocks(engine_idle_s=0.2)) as it:
        it.engines[0].script = cuts
        gc.collect()
        gc.disable()
        try:
            for text in ("whole", "cut", "left") * 3:
                client = await it.client()
                await client.send(request(chat(stream=True, text=text)))
                await client.head()
                if text != "left":
                    await client.answer_body()
                client.abort()
            chunked = b"POST /any HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
            client = await it.client()
            await client.send(chunked + chunk(b"whole") + b"0\r\n\r\n")
            await client.head()
            client.abort()
            await it.outcome(10)
            await until(lambda: it.plane.clients == 0 and it.engines[0].closed == it.engines[0].connections)
            # What the wheel has still to look at is let go in its turn.
            await until(lambda: not alive())
        finally:
            gc.enable()
