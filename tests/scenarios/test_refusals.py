"""What is wrong with a request gets the same answer under both data planes; where they differ stands in one table."""

import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.scenarios.backends import backend
from tests.scenarios.pools import ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BAD = (400, "bad_request")
LARGE = (431, "headers_too_large")
SAME = {
    "no HTTP": (b"\x00\x01garbage\r\n\r\n", BAD),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", BAD),
    "no host": (b"GET /x HTTP/1.1\r\n\r\n", BAD),
    "a length that is none": (b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: abc\r\n\r\n", BAD),
    "two lengths": (b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 3\r\n\r\nabc", BAD),
    "a length beside chunks": (
        b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        BAD,
    ),
    "a bad chunk": (b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", BAD),
    "a NUL": (b"GET /x HTTP/1.1\r\nhost: x\r\na: b\x00c\r\n\r\n", BAD),
    "a space before a colon": (b"GET /x HTTP/1.1\r\nhost: x\r\na : b\r\n\r\n", BAD),
    "a huge header": (b"GET /x HTTP/1.1\r\nhost: x\r\na: " + b"x" * 200_000 + b"\r\n\r\n", LARGE),
    "too many headers": (
        b"GET /x HTTP/1.1\r\nhost: x\r\n" + b"".join(b"a%d: 1\r\n" % number for number in range(300)) + b"\r\n",
        LARGE,
    ),
    "a path of the operators": (b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n", (404, "path_not_public")),
}
PASSED = (200, "")
DIFFERENT = {
    # The direct plane repairs nothing; Envoy reads such lines as what they were meant to be.
    "lines without CR": (b"GET /v1/models HTTP/1.1\nhost: x\n\n", PASSED, BAD),
    "a folded line": (b"GET /v1/models HTTP/1.1\r\nhost: x\r\na: b\r\n c\r\n\r\n", PASSED, BAD),
    "an unknown coding": (
        b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n",
        (501, "unknown_transfer_coding"),
        BAD,
    ),
    # A server may ignore an upgrade that it does not know.
    "an unknown upgrade": (
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: foo\r\n\r\n",
        (403, "upgrade_not_served"),
        PASSED,
    ),
    "HTTP of the future": (
        b"GET /v1/models HTTP/3.1\r\nhost: x\r\n\r\n",
        PASSED,
        (505, "http_version_not_supported"),
    ),
}


@pytest.fixture(scope="module")
def front(plane: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScenarioPool]:
    """A pool."""
    with backend() as echo, pool(plane, tmp_path_factory.mktemp("front"), ["--backend", echo.url]) as running:
        yield running


def answer_to(front: ScenarioPool, request: bytes) -> tuple[int, str]:
    """Send bytes; return the status and the error's code, which is "" when there is no error."""
    url = httpx.URL(front.url)
    with socket.create_connection((url.host, url.port or 80), timeout=30.0) as connection:
        connection.sendall(request)
        heard = b""
        while b"\r\n\r\n" not in heard:
            more = connection.recv(65536)
            assert more, heard
            heard += more
        head, _, body = heard.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += connection.recv(65536)
    error = json.loads(body).get("error")
    if error is not None:
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    return int(head.split()[1]), error["code"] if error else ""


@pytest.mark.parametrize("case", SAME)
def test_a_bad_request_gets_the_same_openai_error_from_both(case: str, front: ScenarioPool) -> None:
    request, expected = SAME[case]
    assert answer_to(front, request) == expected


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_the_planes_answer_differently_is_known(case: str, front: ScenarioPool) -> None:
    request, envoy, direct = DIFFERENT[case]
    assert answer_to(front, request) == {"envoy": envoy, "direct": direct}[front.plane]


def test_a_client_of_http_1_0_is_served(front: ScenarioPool) -> None:
    assert answer_to(front, b"GET /v1/models HTTP/1.0\r\n\r\n") == PASSED
    assert answer_to(front, b"GET /v1/models HTTP/1.0\r\nhost: pool\r\n\r\n") == PASSED
