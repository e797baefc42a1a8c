"""h11 as the reader of what a client sent and of what it got: the oracle of the fuzzing."""

from typing import NamedTuple, Protocol

import h11

MAX_HEAD_BYTES = 1 << 20


class Asked(NamedTuple):
    """A request as h11 read it."""

    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Answer(NamedTuple):
    """An answer as h11 read it.  is_whole: with its end."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes
    is_whole: bool


class Heard(Protocol):
    """A client's end of a connection.  heard: all that it got.  has_ended: in order; is_lost: somehow."""

    heard: bytearray
    is_lost: bool

    @property
    def has_ended(self) -> bool: ...


def read_requests(data: bytes) -> tuple[list[Asked], bool]:
    """Read what a client sent as h11 does; returns the whole requests and whether h11 refuses what follows them.

    h11 takes no empty line before a request and keeps no connection of HTTP/1.0; both are read here as the plane does.
    """
    found: list[Asked] = []
    while data := data.removeprefix(b"\r\n") if not data.startswith(b"\r\n\r\n") else data[2:]:
        if data.startswith(b"\r\n"):
            continue
        reader = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        reader.receive_data(data)
        request, body = None, b""
        try:
            while not isinstance(event := reader.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    return found, False
                if isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
        except h11.RemoteProtocolError:
            return found, True
        assert request is not None
        found.append(Asked(bytes(request.method), bytes(request.target), tuple(request.headers), body))
        if not _is_kept(request):
            return found, False
        data = reader.trailing_data[0]
    return found, False


def _is_kept(request: h11.Request) -> bool:
    said = b",".join(value for name, value in request.headers if name == b"connection").lower().split(b",")
    tokens = {token.strip() for token in said}
    return b"close" not in tokens and (request.http_version == b"1.1" or b"keep-alive" in tokens)


def read_answers(client: Heard, methods: list[bytes], *, may_break: bool = False) -> list[Answer]:
    """Read what a client got as h11 does, to requests with these methods; what is not HTTP fails the test.

    The last answer may be cut: then it is not whole.  may_break: the body of the last one may be no HTTP either, when
    the connection has ended there; an engine's bytes pass before it is known what they are.
    """
    found: list[Answer] = []
    data, has_ended = bytes(client.heard), client.has_ended
    for method in methods:
        if not data:
            break
        reader = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        reader.send(h11.Request(method=method, target="/", headers=[("host", "a"), ("content-length", "0")]))
        reader.send(h11.EndOfMessage())
        reader.receive_data(data)
        if has_ended:
            reader.receive_data(b"")
        response, body, is_told_to_go_on = None, b"", False
        try:
            while not isinstance(event := reader.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    response = event
                elif isinstance(event, h11.InformationalResponse):
                    is_told_to_go_on = True
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                    break
        except h11.RemoteProtocolError as error:
            is_early_end = "closed connection" in str(error) and has_ended
            if not is_early_end and not (may_break and client.is_lost and response is not None):
                raise
        if response is None:
            assert not found or has_ended or is_told_to_go_on, data
            break
        is_whole = isinstance(event, h11.EndOfMessage)
        found.append(Answer(response.status_code, dict(response.headers), body, is_whole))
        if not is_whole:
            break
        data = reader.trailing_data[0]
    else:
        assert not data, f"bytes behind the last answer: {data!r}"
    return found
