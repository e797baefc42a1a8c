"""What is doubtful on the wire is refused and the connection closed: nobody behind may read it differently."""

import asyncio

import pytest

from tests.hosts.direct.direct_rig import Seen, Wire, plain, pool, request, says

BODY = b"0\r\n\r\nGET /hidden HTTP/1.1\r\nhost: a\r\n\r\n"
HEADS = {
    "two different lengths": b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
    "the same length twice": b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\nhello",
    "a list of lengths": b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 5, 5\r\n\r\nhello",
    "a signed length": b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: +5\r\n\r\nhello",
    "a hexadecimal length": b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 0x5\r\n\r\nhello",
    "a length with an underscore": b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 1_0\r\n\r\nhello",
    "an empty length": b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length:\r\n\r\n",
    "an enormous length": b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999\r\n\r\n",
    "digits of another script": "POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: ٥\r\n\r\n".encode(),
    "length and chunks": b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
    + BODY,
    "chunks and length": b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n"
    + BODY,
    "an unknown coding": b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n" + BODY,
    "two codings": b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n" + BODY,
    "chunks twice": b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
    "identity": b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: identity\r\n\r\n",
    "a coding with a vertical tab": b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: \x0bchunked\r\n\r\n" + BODY,
    "chunks in HTTP/1.0": b"POST /x HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + BODY,
    "a space before the colon": b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length : 5\r\n\r\nhello",
    "a tab before the colon": b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding\t: chunked\r\n\r\n",
    "a folded line": b"POST /x HTTP/1.1\r\nhost: a\r\nx-a: b\r\n continued\r\n\r\n",
    "a folded first line": b"POST /x HTTP/1.1\r\n host: a\r\n\r\n",
    "a line without colon": b"POST /x HTTP/1.1\r\nhost: a\r\nnothing\r\n\r\n",
    "a bare LF between lines": b"POST /x HTTP/1.1\r\nhost: a\ncontent-length: 5\r\n\r\nhello",
    "bare LFs all over": b"POST /x HTTP/1.1\nhost: a\n\n",
    "a bare LF at the start": b"\nPOST /x HTTP/1.1\r\nhost: a\r\n\r\n",
    "a bare CR in a value": b"POST /x HTTP/1.1\r\nhost: a\r\nx-a: b\rcontent-length: 5\r\n\r\n",
    "a NUL in a value": b"POST /x HTTP/1.1\r\nhost: a\r\nx-a: b\x00c\r\n\r\n",
    "a NUL in a name": b"POST /x HTTP/1.1\r\nhost: a\r\nx\x00a: b\r\n\r\n",
    "a control character": b"POST /x HTTP/1.1\r\nhost: a\r\nx-a: \x1b[31m\r\n\r\n",
    "a name with a letter of another script": "POST /x HTTP/1.1\r\nhost: a\r\ncontent-léngth: 5\r\n\r\n".encode(),
    "no name": b"POST /x HTTP/1.1\r\nhost: a\r\n: b\r\n\r\n",
    "no host": b"POST /x HTTP/1.1\r\n\r\n",
    "two hosts": b"POST /x HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n",
    "a host with a path": b"POST /x HTTP/1.1\r\nhost: a/b\r\n\r\n",
    "two spaces in the first line": b"POST  /x HTTP/1.1\r\nhost: a\r\n\r\n",
    "a tab in the first line": b"POST\t/x HTTP/1.1\r\nhost: a\r\n\r\n",
    "a space in the target": b"GET /x y HTTP/1.1\r\nhost: a\r\n\r\n",
    "HTTP/0.9": b"GET /x\r\n\r\n",
    "a fragment": b"GET /x#y HTTP/1.1\r\nhost: a\r\n\r\n",
    "nonsense": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a bad host in the target": b"GET http://a@b/x HTTP/1.1\r\nhost: a\r\n\r\n",
}


@pytest.mark.parametrize("name", HEADS)
async def test_a_doubtful_head_is_400_and_ends_the_connection(name: str) -> None:
    async with pool() as it:
        client = await it.client()
        answer = await client.ask(HEADS[name])
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["message"]
        assert answer.header("connection") == "close"
        assert await client.is_closed()
        assert it.engines[0].seen == []


CHUNKS = {
    "no size": b"\r\nhello\r\n0\r\n\r\n",
    "a sign": b"+5\r\nhello\r\n0\r\n\r\n",
    "a prefix": b"0x5\r\nhello\r\n0\r\n\r\n",
    "an underscore": b"0_5\r\nhello\r\n0\r\n\r\n",
    "a space before": b" 5\r\nhello\r\n0\r\n\r\n",
    "no hexadecimal": b"5g\r\nhello\r\n0\r\n\r\n",
    "too many digits": b"0000000000000005\r\nhello\r\n0\r\n\r\n",
    "data longer than said": b"5\r\nhello!\r\n0\r\n\r\n",
    "data shorter than said": b"7\r\nhello\r\n0\r\n\r\n",
    "LF for CRLF after the size": b"5\nhello\r\n0\r\n\r\n",
    "LF for CRLF after the data": b"5\r\nhello\n0\r\n\r\n",
    "CR alone after the data": b"5\r\nhello\rx0\r\n\r\n",
    "a NUL in an extension": b"5;a=\x00\r\nhello\r\n0\r\n\r\n",
    "an LF in an extension": b"5;a=\nb\r\nhello\r\n0\r\n\r\n",
    "an endless size": b"5" * 5000,
    "endless trailers": b"0\r\n" + b"x-a: b\r\n" * 5000,
}


@pytest.mark.parametrize("cut", [1, 100_000])
@pytest.mark.parametrize("name", CHUNKS)
async def test_a_body_that_is_not_chunked_as_it_says_is_400_and_ends_the_connection(name: str, cut: int) -> None:
    async with pool() as it:
        client = await it.client()
        await client.send(b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        sent = CHUNKS[name] + request()

        async def send() -> None:
            step = max(cut, len(sent) // 500)
            for start in range(0, len(sent), step):
                await client.send(sent[start : start + step])
                await asyncio.sleep(0)

        sending = asyncio.ensure_future(send())
        answer = await client.answer()
        await asyncio.gather(sending, return_exceptions=True)
        assert answer.status == 400
        assert answer.header("connection") == "close"
        assert it.engines[0].seen == []
        assert it.picker.buffered_bytes == 0


async def test_a_head_that_is_too_large_or_has_too_many_fields_is_431() -> None:
    async with pool() as it:
        for head in (
            b"GET /x HTTP/1.1\r\nhost: a\r\nx-a: " + b"b" * 100_000 + b"\r\n\r\n",
            b"GET /x HTTP/1.1\r\nhost: a\r\n" + b"x-a: b\r\n" * 100 + b"\r\n",
            b"GET /" + b"x" * 200_000,
        ):
            client = await it.client()
            answer = await client.ask(head)
            assert (answer.status, answer.error["code"]) == (431, "headers_too_large")
            assert answer.header("connection") == "close"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /x HTTP/2.0", 505),
        (b"PRI * HTTP/2.0", 505),
        (b"GET /x HTTP/1.2", 505),
        (b"OPTIONS * HTTP/1.1", 404),
        (b"CONNECT a:443 HTTP/1.1", 404),
        (b"GET x HTTP/1.1", 404),
        (b"GET ftp://a/x HTTP/1.1", 404),
    ],
)
async def test_versions_and_targets_that_are_not_served_say_so(line: bytes, status: int) -> None:
    async with pool() as it:
        answer = await it.ask(line + b"\r\nhost: a\r\n\r\n")
        assert answer.status == status
        assert answer.error["message"]


async def test_an_expectation_that_cannot_be_met_is_417() -> None:
    async with pool() as it:
        assert (await it.ask(request(headers="Expect: the-moon\r\n"))).status == 417


ANSWERS = {
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nabc",
    "length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nabc",
    "a bad length": b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nabc",
    "a bare LF": b"HTTP/1.1 200 OK\r\nx: y\ncontent-length: 3\r\n\r\nabc",
    "a space before the colon": b"HTTP/1.1 200 OK\r\ncontent-length : 3\r\n\r\nabc",
    "a folded line": b"HTTP/1.1 200 OK\r\nx: y\r\n z\r\ncontent-length: 3\r\n\r\nabc",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH\r\n\r\n",
    "another version": b"HTTP/2 200\r\n\r\n",
    "an upgrade that nobody asked for": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n\r\n",
    "an endless head": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000,
    "no chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_that_is_not_http_is_502_and_no_later_request_meets_its_rest(name: str) -> None:
    async with pool() as it:
        it.engines[0].script = says(ANSWERS[name])
        client = await it.client()
        answer = await client.ask(request())
        assert (answer.status, answer.error["code"]) == (502, "bad_gateway")
        assert (await it.outcome()).is_upstream_failure
        it.engines[0].script = says(plain())
        assert (await client.ask(request())).status == 200
        assert it.engines[0].connections == 2


async def test_bytes_behind_an_answer_are_no_later_requests_answer() -> None:
    async with pool() as it:
        it.engines[0].script = says(plain() + plain(b'"smuggled"'))
        client = await it.client()
        for _ in range(3):
            assert b"smuggled" not in (await client.ask(request())).body
        assert it.engines[0].connections == 3


async def test_what_an_engine_says_unasked_is_no_later_requests_answer() -> None:
    async def script(wire: Wire, _: Seen) -> None:
        await wire.send(plain())
        await asyncio.sleep(0.02)
        await wire.send(plain(b'"smuggled"'))

    async with pool() as it:
        it.engines[0].script = script
        client = await it.client()
        await client.ask(request())
        await asyncio.sleep(0.05)
        it.engines[0].script = says(plain())
        assert b"smuggled" not in (await client.ask(request())).body
        assert it.engines[0].connections == 2
