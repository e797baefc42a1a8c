"""The keeper's way to one engine: bounded calls, each endpoint with connections of its own.

Whatever an engine answers (nothing, garbage, too much, too slowly) becomes Unreachable with a reason that
an operator can act on.  What the answers mean is not read here.
"""

import asyncio
import errno
import os
import ssl

import aiohttp

from shoal.hosts.filewatch import Mark, mark_of, read_small
from shoal.hosts.fleet.pace import Pace
from shoal.hosts.fleet.targets import Target
from shoal.pool import Endpoint

_MAX_REASON_CHARS = 200
_HINTS = {
    401: "HTTP 401: the engine wants an API key",
    403: "HTTP 403: the engine does not accept this API key",
}
# What OpenSSL calls an answer that is no TLS record.
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE")
_CLOSED = "the engine closed the connection"
_GARBLED = "the answer is not HTTP"
_WHEN_TLS_IS_WANTED = (_CLOSED, _GARBLED, os.strerror(errno.ECONNRESET).lower())


class Unreachable(Exception):
    """A call to an engine failed.  status: its HTTP status, 0 when it gave none."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason[:_MAX_REASON_CHARS])
        self.status = status

    @property
    def may_want_tls(self) -> bool:
        """Whether servers that speak TLS alone fail plain calls like this."""
        return self.status == 400 or (not self.status and str(self) in _WHEN_TLS_IS_WANTED)


class Lanes:
    """Bounds on calls under way: endpoints that answer never wait behind those that hang."""

    __slots__ = ("steady", "suspect")

    def __init__(self, pace: Pace) -> None:
        self.steady = asyncio.Semaphore(pace.slots)
        self.suspect = asyncio.Semaphore(pace.slots)


class Trust:
    """TLS settings by certificate authority, made once per state of its file: each costs milliseconds and memory."""

    __slots__ = ("_contexts",)

    def __init__(self) -> None:
        self._contexts: dict[str, tuple[Mark | None, ssl.SSLContext]] = {}

    def context(self, ca_file: str) -> ssl.SSLContext:
        """Settings that trust `ca_file`, or the system's authorities for "".  Raises OSError or ssl.SSLError."""
        mark = mark_of(ca_file) if ca_file else None
        known = self._contexts.get(ca_file)
        if known is None or known[0] != mark:
            if ca_file:
                read_small(ca_file)
            known = self._contexts[ca_file] = (mark, ssl.create_default_context(cafile=ca_file or None))
        return known[1]


class EngineDoor:
    """Calls to one endpoint.  is_steady: whether the last call was answered in time."""

    __slots__ = ("_headers", "_lanes", "_origin", "_server_name", "_session", "_tls", "_tls_problem", "is_steady")

    def __init__(self, target: Target, endpoint: Endpoint, lanes: Lanes, trust: Trust) -> None:
        self._origin = f"{'https' if endpoint.is_tls else 'http'}://{endpoint.address}"
        # An uncompressed page costs the engine and us less CPU than the bytes are worth, and cannot blow up.
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "shoal"}
        if not target.is_literal:
            self._headers["Host"] = target.url.partition("://")[2]
        if target.api_key:
            self._headers["Authorization"] = f"Bearer {target.api_key}"
        self._server_name = target.host.rstrip(".") if target.is_tls and not target.is_literal else None
        self._tls: ssl.SSLContext | bool = True
        self._tls_problem = ""
        if target.is_tls:
            try:
                self._tls = trust.context(target.ca_file)
            except (OSError, ssl.SSLError) as error:
                self._tls_problem = f"CA file {target.ca_file} cannot be used: {error}"
        self._lanes = lanes
        self._session: aiohttp.ClientSession | None = None
        self.is_steady = False

    async def get(self, path: str, *, limit_bytes: int, timeout_s: float) -> bytes:
        """Return the body of a 200 answer.  Raises Unreachable."""
        async with self._lanes.steady if self.is_steady else self._lanes.suspect:
            try:
                async with asyncio.timeout(timeout_s):
                    body = await self._call("GET", path, limit_bytes)
            except Unreachable as error:
                self.is_steady = error.status != 0
                raise
            except TimeoutError:
                self.is_steady = False
                raise Unreachable(f"no answer in {timeout_s:g} s") from None
            except (aiohttp.ClientError, OSError, ValueError) as error:
                self.is_steady = False
                raise Unreachable(describe(error)) from None
        self.is_steady = True
        return body

    async def post(self, path: str, body: object = None, *, limit_bytes: int, timeout_s: float) -> bytes:
        """Send an order, with `body` as JSON unless it is None; return the body of a 200 answer.  Raises Unreachable.

        It takes no place among the readings: an engine may think about an order for minutes.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call("POST", path, limit_bytes, body)
        except TimeoutError:
            raise Unreachable(f"no answer in {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unreachable(describe(error)) from None

    async def speaks_tls(self, timeout_s: float) -> bool:
        """Whether a server that is called without TLS takes a handshake; its certificate is not looked at."""
        if self._origin.startswith("https:"):
            return False
        host, _, port = self._origin.partition("://")[2].rpartition(":")
        anything = ssl.create_default_context()
        anything.check_hostname, anything.verify_mode = False, ssl.CERT_NONE
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=anything)
        except (OSError, TimeoutError):
            return False
        writer.transport.abort()
        return True

    async def close(self) -> None:
        """Close the connections to the engine."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(self, method: str, path: str, limit_bytes: int, body: object = None) -> bytes:
        if self._tls_problem:
            raise Unreachable(self._tls_problem)
        if self._session is None:
            self._session = _session(self._headers)
        response = await self._session.request(
            method,
            self._origin + path,
            json=body,
            ssl=self._tls,
            server_hostname=self._server_name,
            allow_redirects=False,
        )
        async with response:
            if response.status != 200:
                reason = _HINTS.get(response.status, f"HTTP {response.status}")
                if location := response.headers.get("Location", ""):
                    reason = f"{reason}, which points to {location}"
                raise Unreachable(reason, response.status)
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise Unreachable("answered compressed though asked not to", response.status)
            return await _body(response, limit_bytes)


async def _body(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while chunk := await response.content.readany():
        size += len(chunk)
        if size > limit_bytes:
            response.close()
            raise Unreachable(f"the answer is larger than {limit_bytes} bytes", response.status)
        chunks.append(chunk)
    return b"".join(chunks)


def _session(headers: dict[str, str]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        # A health check, a scrape and an order at once.
        connector=aiohttp.TCPConnector(limit=3, keepalive_timeout=30.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        trust_env=False,
        read_bufsize=1 << 18,
    )


def describe(error: Exception) -> str:
    """Say in few words why a call failed."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"the TLS certificate is not trusted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorSSLError | ssl.SSLError):
        reason = str(getattr(getattr(error, "os_error", error), "reason", None) or error)
        if reason in _NOT_TLS:
            return "the server does not speak TLS here: write http:// if it serves plain HTTP"
        return f"TLS failed: {reason.replace('_', ' ').lower()}"
    number = getattr(getattr(error, "os_error", error), "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number).lower()
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return _CLOSED
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer broke off"
    if isinstance(error, aiohttp.ClientResponseError):  # its text repeats the bytes, with carets below them
        return _GARBLED
    return f"{type(error).__name__}: {error}".replace("\n", " ")
