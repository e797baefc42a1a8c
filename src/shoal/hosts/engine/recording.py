"""A short memory of requests, so a test can ask what really arrived at an engine."""

import hashlib
from collections import deque

import msgspec
from aiohttp import web


class Arrival(msgspec.Struct, kw_only=True):
    """A request as it came in.

    headers: in order, as sent.  body_sha256: hex.  outcome: the status of the answer, "open" while it is being
    answered, "left" when the client went first.
    """

    method: str
    path: str
    headers: list[tuple[str, str]]
    body_bytes: int
    body_sha256: str
    outcome: str = "open"


class Recorder:
    """The last requests of a server; keeps none when `size` is 0."""

    __slots__ = ("_arrivals",)

    def __init__(self, size: int) -> None:
        self._arrivals: deque[Arrival] | None = deque(maxlen=size) if size else None

    def add(self, request: web.BaseRequest, body: bytes) -> Arrival | None:
        """Remember a request; returns its record, for the outcome."""
        if self._arrivals is None:
            return None
        arrival = Arrival(
            method=request.method,
            path=request.path_qs,
            headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.raw_headers],
            body_bytes=len(body),
            body_sha256=hashlib.sha256(body).hexdigest(),
        )
        self._arrivals.append(arrival)
        return arrival

    def listing(self) -> bytes:
        """Return the records as JSON, oldest first."""
        return msgspec.json.encode(list(self._arrivals or ()))
