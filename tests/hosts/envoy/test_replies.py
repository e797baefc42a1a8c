"""What Envoy answers by itself has the shape of an OpenAI error, and a status and code that say what was wrong."""

import asyncio

import msgspec
import pytest

from tests.hosts.envoy.envoy_rig import Rig

pytestmark = pytest.mark.e2e

SETUP = {"pickers": 1}


async def answered(live: Rig, request: bytes) -> tuple[int, bytes]:
    """Send bytes, and return the status and body of the answer."""
    reader, writer = await live.raw(request)
    try:
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            return int(head.split()[1]), await reader.readexactly(length)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "bad_request"),
        (b"GET /x HTTP/1.1\r\n\r\n", 400, "bad_request"),
        (b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: many\r\n\r\n", 400, "bad_request"),
        (b"GET /x HTTP/1.1\r\nhost: x\r\na: " + b"x" * 200_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 501, "unknown_transfer_coding"),
        (b"GET /x HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: foo\r\n\r\n", 403, "upgrade_not_served"),
        (b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n", 404, "path_not_public"),
    ],
    ids=["tls", "no host", "bad length", "huge header", "unknown coding", "unknown upgrade", "operators' path"],
)
async def test_a_request_that_envoy_refuses_gets_an_openai_error(
    live: Rig, request_bytes: bytes, status: int, code: str
) -> None:
    got, body = await answered(live, request_bytes)
    error = msgspec.json.decode(body)["error"]
    assert (got, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert error["message"]


async def test_a_client_of_http_1_0_is_served_with_and_without_a_host(live: Rig) -> None:
    for head in (b"GET /x HTTP/1.0\r\n", b"GET /x HTTP/1.0\r\nhost: pool\r\n"):
        status, body = await answered(live, head + f"x-test-pick: {live.engines[0].address}\r\n\r\n".encode())
        assert (status, msgspec.json.decode(body)["served"]) == (200, live.engines[0].address)
