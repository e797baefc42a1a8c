"""What the data plane says by itself: whole answers, and the last event of a stream that broke.

Owns their statuses, codes and words, the same as the Envoy plane's local replies, so that a client cannot tell which
plane it met.  Refusals of the picker come from `hosts.picker` and are only framed here.
"""

from email.utils import formatdate
from http import HTTPStatus
from time import time

import msgspec

from shoal.hosts.direct.settings import DirectSettings
from shoal.pool import Api

INVALID, SERVER = "invalid_request_error", "server_error"
JSON_TYPE = (("content-type", "application/json"),)
_REASONS = {status.value: status.phrase for status in HTTPStatus}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

_CODES = {
    400: (INVALID, "bad_request"),
    404: (INVALID, "not_found"),
    408: (INVALID, "request_timeout"),
    413: (INVALID, "body_too_large"),
    417: (INVALID, "expectation_failed"),
    429: ("rate_limit_error", "rate_limited"),
    431: (INVALID, "headers_too_large"),
    500: (SERVER, "router_error"),
    502: (SERVER, "bad_gateway"),
    503: (SERVER, "engine_unavailable"),
    504: (SERVER, "gateway_timeout"),
    505: (INVALID, "http_version_not_supported"),
}
NOT_PUBLIC = (
    "This path is for the operators of an engine and not served on the public port. Send the request to the engine "
    "itself, or set `public_paths: all` in the pool's configuration."
)
UNREACHABLE = "No engine could be reached, or the router is overloaded. Try again shortly."
BAD_ANSWER = "The engine's answer is not valid HTTP."
CRAMMED = "The router holds too many unfinished requests. Try again shortly."
FAULT = "The router could not handle the request."
BROKEN = "The engine was lost in the middle of the answer; what came before is incomplete. Send the request again."


def too_slow(settings: DirectSettings) -> str:
    """The message of a 408."""
    clocks = settings.clocks
    in_time = f"{clocks.headers_s:g} s for its head, {clocks.upload_s:g} s for its body"
    return f"The request was not received in time: {in_time}."


def no_answer(settings: DirectSettings) -> str:
    """The message of a 504."""
    clocks = settings.clocks
    longest = f", or no end within {clocks.stream_s:g} s" if clocks.stream_s else ""
    return f"No answer within {clocks.stream_idle_s:g} s of silence{longest}."


def error_body(status: int, message: str, code: str = "") -> bytes:
    """Return an error that is one for OpenAI's and for Anthropic's clients."""
    kind, usual = _CODES.get(status, (SERVER, "router_error"))
    error = {"message": message, "type": kind, "param": None, "code": code or usual}
    return msgspec.json.encode({"type": "error", "error": error})


def local_answer(
    status: int,
    headers: tuple[tuple[str, str], ...],
    body: bytes,
    *,
    request_id: str = "",
    is_last: bool = False,
    is_head: bool = False,
    minor: int = 1,
) -> bytes:
    """Return a whole answer.  is_last: the connection ends with it.  is_head: the body is left out."""
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}", *(f"{name}: {value}" for name, value in headers)]
    lines += ["server: shoal", date_line()[:-2].decode(), f"content-length: {len(body)}"]
    if request_id:
        lines.append(f"x-request-id: {request_id}")
    if is_last:
        lines.append("connection: close")
    elif not minor:
        lines.append("connection: keep-alive")
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")
    return head if is_head else head + body


def last_event(api: Api, message: str, code: str = "engine_lost") -> bytes:
    """Return the event that tells a stream's reader that there is no end to come."""
    error: dict[str, str | None] = {"message": message, "type": SERVER, "param": None, "code": code}
    data: dict[str, object]
    if api is Api.MESSAGES:
        data = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: " + msgspec.json.encode(data) + b"\n\n"
    if api is Api.RESPONSES:
        data = {"type": "error", "code": code, "message": message, "param": None, "error": error}
        return b"event: error\ndata: " + msgspec.json.encode(data) + b"\n\n"
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


class _Clock:
    __slots__ = ("line", "second")

    def __init__(self) -> None:
        self.second = 0
        self.line = b""

    def look(self) -> None:
        second = int(time())
        if second != self.second:
            self.second = second
            self.line = f"date: {formatdate(second, usegmt=True)}\r\n".encode()


_clock = _Clock()


def date_line() -> bytes:
    """The time as a header line."""
    _clock.look()
    return _clock.line
