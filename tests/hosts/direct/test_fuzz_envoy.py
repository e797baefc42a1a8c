"""Odd but legal messages through both data planes: a client gets the same answer and an engine the same request.

What differs on purpose stands in tables of its own, each with its reason.
"""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import NamedTuple

import h11
import httpx
import pytest

from tests.hosts.supervisor.planes import PLANES
from tests.scenarios.backends import MODELS
from tests.scenarios.pools import ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok"
END = b"\r\n\r\n"


class Case(NamedTuple):
    """A request, and what the engine answers.  ends: it closes the connection then."""

    ask: bytes
    answer: bytes = OK
    ends: bool = False


def get(target: bytes = b"/case", lines: bytes = b"", version: bytes = b"1.1", method: bytes = b"GET") -> bytes:
    """A request without a body."""
    return b"%b %b HTTP/%b\r\nhost: pool\r\n%b\r\n" % (method, target, version, lines)


def post(body: bytes, lines: bytes) -> bytes:
    """A request with one."""
    return b"POST /case HTTP/1.1\r\nhost: pool\r\ncontent-type: text/plain\r\n%b\r\n%b" % (lines, body)


def head(lines: bytes, status: bytes = b"200 OK") -> bytes:
    """The head of an answer."""
    return b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\n%b\r\n" % (status, lines)


CHUNKED = b"Transfer-Encoding: chunked\r\n"
CASES = {
    "an absolute target": Case(get(b"http://other:81/case?a=b")),
    "an absolute target without a path": Case(get(b"http://other")),
    "an empty chunked body": Case(post(b"0\r\n\r\n", CHUNKED)),
    "chunks with extensions": Case(post(b"2;a=b\r\nhe\r\n003;c\r\nllo\r\n0;d\r\n\r\n", CHUNKED)),
    "trailers": Case(post(b"5\r\nhello\r\n0\r\nx-trailer: 1\r\n\r\n", CHUNKED)),
    "a body of no bytes": Case(post(b"", b"content-length: 0\r\n")),
    "a POST that says nothing of a body": Case(get(method=b"POST")),
    "a GET with a body": Case(get(lines=b"content-length: 2\r\n") + b"hi"),
    "an expectation": Case(post(b"hello", b"Expect: 100-continue\r\ncontent-length: 5\r\n")),
    "HEAD": Case(get(method=b"HEAD"), head(b"content-length: 12345\r\n")),
    "HEAD of a chunked answer": Case(get(method=b"HEAD"), head(b"transfer-encoding: chunked\r\n")),
    "OPTIONS": Case(get(method=b"OPTIONS")),
    "DELETE": Case(get(method=b"DELETE")),
    "PATCH": Case(get(method=b"PATCH", lines=b"content-length: 2\r\n") + b"hi"),
    "upper-case names": Case(get(lines=b"X-ODD-NAME: Odd Value\r\nACCEPT: A\r\n")),
    "many headers": Case(get(lines=b"".join(b"x-h%d: %d\r\n" % (number, number) for number in range(80)))),
    "the same header twice": Case(get(lines=b"x-a: 1\r\nx-a: 2\r\nX-A: 3\r\n")),
    "an empty value": Case(get(lines=b"x-a:\r\nx-b: \t \r\n")),
    "white space around a value": Case(get(lines=b"x-a: \t  b c\t \r\n")),
    "bytes above ASCII in a value": Case(get(lines=b"x-a: gr\xc3\xbc\xdfe\r\n")),
    "a very long query": Case(get(b"/case?q=" + b"x" * 20_000)),
    "a path that could be made shorter": Case(get(b"/a/../case/./b")),
    "escapes in a path": Case(get(b"/c%61se/%2e%2E/x%20?a=%00")),
    "an escaped slash": Case(get(b"/case%2Fx")),
    "named in connection": Case(get(lines=b"Connection: keep-alive, X-Mine\r\nx-mine: 1\r\nx-other: 2\r\n")),
    "hop by hop": Case(get(lines=b"keep-alive: timeout=5\r\nte: trailers\r\nproxy-connection: keep-alive\r\n")),
    "HTTP/1.0": Case(get(version=b"1.0")),
    "HTTP/1.0 kept alive": Case(get(version=b"1.0", lines=b"Connection: keep-alive\r\n")),
    "cookies": Case(get(lines=b"cookie: a=b\r\ncookie: c=d\r\n")),
    "204": Case(get(), b"HTTP/1.1 204 No Content\r\nx-a: b" + END),
    "304": Case(get(), b'HTTP/1.1 304 Not Modified\r\netag: "x"' + END),
    "an answer that ends with its connection": Case(get(), head(b"") + b"to the end", ends=True),
    "an HTTP/1.0 answer": Case(get(), b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nold", ends=True),
    "an answer without reason": Case(get(), b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\nok"),
    "an odd status": Case(get(), b"HTTP/1.1 299 Odd\r\ncontent-length: 2\r\n\r\nok"),
    "100 before the answer": Case(get(), b"HTTP/1.1 100 Continue" + END + OK),
    "103 before the answer": Case(get(), b"HTTP/1.1 103 Early Hints\r\nlink: </a>" + END + OK),
    "headers of an answer twice": Case(
        get(), head(b"x-a: 1\r\nx-a: 2\r\nset-cookie: a=b\r\nset-cookie: c\r\ncontent-length: 0\r\n")
    ),
    "bytes above ASCII in an answer": Case(get(), head(b"x-a: gr\xc3\xbc\xdfe\r\ncontent-length: 0\r\n")),
    "a chunked answer": Case(get(), head(CHUNKED) + b"2;a=b\r\nhe\r\n3\r\nllo\r\n0\r\nx-trailer: 1\r\n\r\n"),
    "an empty chunked answer": Case(get(), head(CHUNKED) + b"0\r\n\r\n"),
    "an answer to HTTP/1.0 in chunks": Case(get(version=b"1.0"), head(CHUNKED) + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"),
    "an answer that names headers in connection": Case(
        get(), head(b"connection: x-mine\r\nx-mine: 1\r\ncontent-length: 0\r\n")
    ),
    "an error of the engine": Case(get(), b"HTTP/1.1 418 I am\r\ncontent-length: 3\r\n\r\nnot"),
}


class Engine:
    """A server in threads that answers every request with one case's bytes and keeps what it got."""

    def __init__(self) -> None:
        self.case = Case(b"")
        self.seen: list[tuple[h11.Request, bytes]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while (found := self._read(connection)) is not None:
                request, body = found
                if request.target in (b"/health", b"/metrics", b"/v1/models"):
                    said = httpx.Response(200, json=MODELS).content if request.target == b"/v1/models" else b""
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said))
                    continue
                self.seen.append((request, body))
                connection.sendall(self.case.answer)
                if self.case.ends:
                    return

    def _read(self, connection: socket.socket) -> tuple[h11.Request, bytes] | None:
        reader = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        request, body = None, b""
        while not isinstance(event := reader.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif event is h11.NEED_DATA:
                data = connection.recv(65536)
                if not data:
                    return None
                reader.receive_data(data)
            else:
                return None
        assert request is not None
        return request, body


class Planes:
    """A pool with each data plane, before the same engine."""

    def __init__(self, engine: Engine, pools: dict[str, ScenarioPool]) -> None:
        self.engine = engine
        self._pools = pools

    def ask(self, plane: str, case: Case) -> tuple[h11.Response, bytes, list[tuple[h11.Request, bytes]]]:
        """Send a case; returns the answer, and what the engine got."""
        self.engine.case = case
        self.engine.seen.clear()
        url = httpx.URL(self._pools[plane].url)
        reader = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        reader.send(h11.Request(method=case.ask.partition(b" ")[0], target="/", headers=[("host", "a")]))
        reader.send(h11.EndOfMessage())
        response, body = None, b""
        with socket.create_connection((url.host, url.port or 80), timeout=30.0) as connection:
            connection.sendall(case.ask)
            while not isinstance(event := reader.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    response = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif event is h11.NEED_DATA:
                    reader.receive_data(connection.recv(65536))
        assert response is not None
        return response, body, list(self.engine.seen)


@pytest.fixture(scope="module")
def planes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planes]:
    """Both."""
    engine = Engine()
    with ExitStack() as stack:
        stack.callback(engine.close)
        started = {
            name: stack.enter_context(pool(name, tmp_path_factory.mktemp(name), ["--backend", engine.url]))
            for name in PLANES
        }
        yield Planes(engine, started)


# What only one of the planes adds, and what differs from request to request.
OWN = {
    b"x-request-id",
    b"x-shoal-request-id",
    b"x-shoal-endpoint",
    b"x-forwarded-for",
    b"x-forwarded-proto",
    b"date",
    b"server",
    b"connection",
    b"x-envoy-expected-rq-timeout-ms",
    b"x-gateway-destination-endpoint",
}
FRAMING = {b"content-length", b"transfer-encoding", b"trailer"}
# Case -> what Envoy alone passes on: to the engine, and to the client.
ENVOY_ALONE: dict[str, tuple[set[bytes], set[bytes]]] = {
    # It says that the sender takes trailers, which we drop.
    "hop by hop": ({b"te"}, set()),
    # Such fields are for the next hop alone (RFC 9110, section 7.6.1).
    "an answer that names headers in connection": (set(), {b"x-mine"}),
}


def fields(headers: h11.Request | h11.Response, left_out: set[bytes]) -> list[tuple[bytes, bytes]]:
    """Headers in an order that does not depend on the plane."""
    return sorted((name, value) for name, value in headers.headers if name not in left_out)


@pytest.mark.parametrize("name", CASES)
def test_an_odd_message_passes_both_planes_alike(name: str, planes: Planes) -> None:
    case = CASES[name]
    (envoy, envoy_body, envoy_seen), (direct, direct_body, direct_seen) = (planes.ask(each, case) for each in PLANES)
    to_engine, to_client = ENVOY_ALONE.get(name, (set(), set()))
    assert direct.status_code == envoy.status_code
    assert fields(direct, OWN | FRAMING) == fields(envoy, OWN | FRAMING | to_client)
    assert len(direct_seen) == len(envoy_seen)
    if not envoy_seen:
        assert json.loads(direct_body) == json.loads(envoy_body)
        return
    assert direct_body == envoy_body
    assert all(value in dict(envoy.headers) for value in to_client)
    (ours, our_body), (theirs, their_body) = direct_seen[0], envoy_seen[0]
    assert (ours.method, ours.target, our_body) == (theirs.method, theirs.target, their_body)
    assert fields(ours, OWN | FRAMING) == fields(theirs, OWN | FRAMING | to_engine)
    assert all(value in dict(theirs.headers) for value in to_engine)
