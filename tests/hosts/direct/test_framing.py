"""How requests and answers are framed on the wire: lengths, chunks, keep-alive, versions, and what is refused."""

import asyncio

import pytest

from tests.hosts.direct.direct_rig import (
    CHUNKED_HEAD,
    OK_BODY,
    Seen,
    Wire,
    chat,
    chunk,
    plain,
    pool,
    request,
    says,
    until,
)


async def test_a_request_reaches_an_engine_and_its_answer_the_client_byte_for_byte() -> None:
    async with pool() as it:
        answer = await it.ask(request(b'{"model" : "m","messages":[]}'))
        assert (answer.status, answer.body) == (200, OK_BODY)
        assert it.engines[0].seen[0].body == b'{"model" : "m","messages":[]}'
        assert it.engines[0].seen[0].head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert answer.header("x-shoal-endpoint") == it.engines[0].address
        assert answer.header("x-shoal-request-id") == "run-1"
        assert answer.header("server") == "shoal"


async def test_a_connection_serves_many_requests_and_so_does_the_engines() -> None:
    async with pool() as it:
        client = await it.client()
        for count in range(1, 6):
            assert (await client.ask(request())).status == 200
            assert len(it.engines[0].seen) == count
        assert it.engines[0].connections == 1


async def test_requests_sent_ahead_are_answered_in_order() -> None:
    async def echo(wire: Wire, seen: Seen) -> None:
        await asyncio.sleep(0.01 if b"first" in seen.body else 0)
        await wire.send(plain(seen.body))

    async with pool() as it:
        it.engines[0].script = echo
        client = await it.client()
        bodies = [chat(text=text) for text in ("first", "second", "third")]
        await client.send(b"".join(request(body) for body in bodies) + request(path="/v1/models", method="GET"))
        for body in bodies:
            assert body["messages"][0]["content"].encode() in (await client.answer()).body
        assert b'"list"' in (await client.answer()).body


async def test_more_than_may_be_sent_ahead_ends_the_connection_after_the_answer() -> None:
    async def slow(wire: Wire, _: Seen) -> None:
        await asyncio.sleep(0.2)
        await wire.send(plain())

    async with pool() as it:
        it.engines[0].script = slow
        client = await it.client()
        await client.send(request() + request(b"x" * 400_000))
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (200, "close")
        assert await client.is_closed()
        assert len(it.engines[0].seen) == 1


@pytest.mark.parametrize("size", [0, 1, 1000, 70_000, 3_000_000])
async def test_a_body_with_a_length_arrives_whole_however_it_is_cut(size: int) -> None:
    async with pool() as it:
        client = await it.client()
        sent = request(b"x" * size, "/any")
        for start in range(0, len(sent), 50_001):
            await client.send(sent[start : start + 50_001])
            await asyncio.sleep(0)
        assert (await client.answer()).status == 200
        assert it.engines[0].seen[0].body == b"x" * size
        assert it.engines[0].seen[0].values("content-length") == [str(size)]


async def test_a_head_that_comes_byte_by_byte_is_read() -> None:
    async with pool() as it:
        client = await it.client()
        sent = request(chat())
        for at in range(len(sent)):
            await client.send(sent[at : at + 1])
            await asyncio.sleep(0)
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
async def test_a_chunked_body_arrives_with_a_length_and_without_trailers(cut: int) -> None:
    async with pool() as it:
        client = await it.client()
        head = b"POST /any HTTP/1.1\r\nhost: a\r\ntransfer-encoding: Chunked\r\n\r\n"
        body = b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\nx-trailer: 1\r\nx-other: 2\r\n\r\n"
        sent = head + body + request()
        for start in range(0, len(sent), cut):
            await client.send(sent[start : start + cut])
            await asyncio.sleep(0)
        assert (await client.answer()).status == 200
        assert (await client.answer()).status == 200
        seen = it.engines[0].seen[0]
        assert seen.body == b"hello world"
        assert (seen.values("transfer-encoding"), seen.values("x-trailer")) == ([], [])


async def test_expect_100_continue_is_met_before_the_body_comes() -> None:
    async with pool() as it:
        client = await it.client()
        sent = request(chat(), headers="Expect: 100-continue\r\n")
        head, body = sent.split(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        assert await client.head() == (100, [])
        assert (await client.ask(body)).status == 200
        assert it.engines[0].seen[0].values("expect") == []
        # With the body already there nothing needs to be said.
        assert (await client.ask(sent)).status == 200


async def test_a_body_over_the_limit_is_refused_on_its_head_and_the_client_reads_it() -> None:
    async with pool(config="apiVersion: shoal.dev/v1alpha1\nkind: Pool\nlimits: {max_body_bytes: 1000}\n") as it:
        client = await it.client()
        await client.send(request(b"x" * 1001)[:-500])
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (413, "close")
        assert "1000" in answer.error["message"]
        assert await client.is_closed()
        chunked = b"POST /any HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        client = await it.client()
        assert (await client.ask(chunked + chunk(b"x" * 900) + chunk(b"x" * 900))).status == 413
        # Whole with its head it costs the connection nothing.
        client = await it.client()
        assert (await client.ask(request(b"x" * 1001))).status == 413
        assert (await client.ask(request(b"x" * 900, "/any"))).status == 200
        assert it.picker.buffered_bytes == 0


async def test_head_answers_have_no_body_and_leave_the_connection_usable() -> None:
    async with pool() as it:
        it.engines[0].script = says(b"HTTP/1.1 200 OK\r\ncontent-length: 12345\r\n\r\n")
        client = await it.client()
        await client.send(request(method="HEAD", path="/x"))
        answer = await client.answer(is_head=True)
        assert answer.header("content-length") == "12345"
        await client.send(request(method="HEAD", path="/v1/sleep"))
        assert (await client.answer(is_head=True)).status == 404
        it.engines[0].script = says(plain())
        assert (await client.ask(request())).status == 200
        assert it.engines[0].connections == 1


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_answers_that_never_have_a_body_end_with_their_head(status: str) -> None:
    async with pool() as it:
        it.engines[0].script = says(f"HTTP/1.1 {status}\r\nx-a: b\r\n\r\n".encode())
        client = await it.client()
        for _ in range(2):
            answer = await client.ask(request())
            assert (answer.status, answer.header("x-a")) == (int(status[:3]), "b")
        assert it.engines[0].connections == 1


async def test_interim_answers_are_passed_over() -> None:
    async with pool() as it:
        early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
        it.engines[0].script = says(early * 50 + plain())
        assert (await it.ask(request())).body == OK_BODY


async def test_chunks_of_an_answer_keep_their_boundaries_and_trailers_are_dropped() -> None:
    raw = chunk(b"data: 1\n\n") + b"A;x=y\r\n0123456789\r\n" + chunk(b"z" * 5000)

    async def script(wire: Wire, _: Seen) -> None:
        await wire.send(CHUNKED_HEAD)
        for at in range(len(raw)):
            await wire.send(raw[at : at + 1])
        await wire.send(b"0\r\nx-t")
        await asyncio.sleep(0.01)
        await wire.send(b"railer: 1\r\n\r\n")

    async with pool() as it:
        it.engines[0].script = script
        client = await it.client()
        await client.send(request())
        await client.head()
        assert await client.reader.readexactly(len(raw) + 5) == raw + b"0\r\n\r\n"
        it.engines[0].script = says(plain())
        assert (await client.ask(request())).status == 200
        assert it.engines[0].connections == 1
        assert (await it.outcome()).response_bytes == 9 + 10 + 5000


async def test_an_answer_without_length_ends_with_its_connection() -> None:
    async def script(wire: Wire, _: Seen) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nsome")
        await asyncio.sleep(0.02)
        await wire.send(b" text")
        wire.writer.close()

    async with pool() as it:
        it.engines[0].script = script
        client = await it.client()
        answer = await client.ask(request())
        assert (answer.body, answer.header("connection")) == (b"some text", "close")
        assert not (await it.outcome()).is_cut


async def test_a_client_of_http_1_0_gets_whole_answers_without_chunks() -> None:
    async with pool() as it:
        client = await it.client()
        answer = await client.ask(request(version="1.0"))
        assert (answer.status, answer.header("connection"), answer.body) == (200, "close", OK_BODY)
        assert await client.is_closed()
        client = await it.client()
        for _ in range(2):
            answer = await client.ask(request(version="1.0", headers="Connection: keep-alive\r\n"))
            assert (answer.header("connection"), answer.body) == ("keep-alive", OK_BODY)
        it.engines[0].script = says(CHUNKED_HEAD + chunk(b"one") + chunk(b"two") + b"0\r\n\r\n")
        answer = await client.ask(request(version="1.0", headers="Connection: keep-alive\r\n"))
        assert (answer.body, answer.header("transfer-encoding")) == (b"onetwo", None)
        assert answer.header("connection") == "close"
        await until(lambda: len(it.accounts) == 4)
        # Without a Host of its own it is given one.
        it.engines[0].script = says(plain())
        assert (await it.ask(b"GET /x HTTP/1.0\r\n\r\n")).status == 200


async def test_connection_close_is_kept_to() -> None:
    async with pool() as it:
        client = await it.client()
        answer = await client.ask(request(headers="Connection: Close\r\n"))
        assert answer.header("connection") == "close"
        assert await client.is_closed()


async def test_an_engine_that_closes_after_its_answer_is_dialled_anew() -> None:
    async def script(wire: Wire, _: Seen) -> None:
        await wire.send(plain(headers=b"connection: close\r\n"))
        wire.writer.close()

    async with pool() as it:
        it.engines[0].script = script
        client = await it.client()
        for _ in range(3):
            answer = await client.ask(request())
            assert (answer.status, answer.header("connection")) == (200, None)
        assert it.engines[0].connections == 3


async def test_an_absolute_target_names_path_and_host() -> None:
    async with pool() as it:
        sent = b"GET http://other:81/a?b=1 HTTP/1.1\r\nhost: pool\r\n\r\n"
        assert (await it.ask(sent)).status == 200
        seen = it.engines[0].seen[0]
        assert seen.head.startswith(b"GET /a?b=1 HTTP/1.1\r\n")
        assert seen.values("host") == ["other:81"]
        # And gets around no list.
        assert (await it.ask(b"GET http://other/metrics HTTP/1.1\r\nhost: pool\r\n\r\n")).status == 404


async def test_empty_lines_before_a_request_are_passed_over() -> None:
    async with pool() as it:
        client = await it.client()
        assert (await client.ask(b"\r\n\r\n" + request())).status == 200
        assert (await client.ask(b"\r\n" + request())).status == 200
