"""The wire between a supervisor and one worker: HTTP on the worker's admin unix socket.

Owns requests, timeouts and decoding.  What is sent, and when, is for the caller.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from shoal.hosts.admin import Snapshot
from shoal.hosts.sharing import Places
from shoal.hosts.supervisor.merging import Family
from shoal.kernel import UNREADABLE
from shoal.routing.events import Event, SessionAborted

T = TypeVar("T")

_ANSWER_S = 5.0
_events = msgspec.msgpack.Encoder()


class WorkerSilent(Exception):
    """The worker did not give a usable answer: it is down, stuck, or starting."""


class WorkerLink:
    """Talks to the worker whose admin socket is at `path`.  Every method raises WorkerSilent when it cannot."""

    def __init__(self, path: Path, answer_s: float = _ANSWER_S) -> None:
        self.path = path
        self._timeout = aiohttp.ClientTimeout(total=answer_s)
        self._session: aiohttp.ClientSession | None = None

    async def is_listening(self) -> bool:
        """Whether the worker answers at all, healthy or not."""
        try:
            await self._ask("GET", "/healthz")
        except WorkerSilent:
            return False
        return True

    async def is_healthy(self) -> bool:
        """Whether the worker says that it is in service."""
        try:
            status, _ = await self._ask("GET", "/healthz")
        except WorkerSilent:
            return False
        return status == 200

    async def snapshot(self) -> Snapshot:
        """Return the worker's picture of the fleet and of itself."""
        return _decode(await self._good("GET", "/snapshot"), Snapshot)

    async def families(self) -> list[Family]:
        """Return the worker's metrics."""
        return _decode(await self._good("GET", "/metrics?format=json"), list[Family])

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """Return why `request_id` went where it went, None when this worker does not know it."""
        status, body = await self._ask("GET", f"/explain/{quote(request_id, safe='')}")
        if status == 404:
            return None
        if status != 200:
            raise WorkerSilent(f"{self.path.name}: /explain answered {status}")
        return _decode(body, dict[str, Any])

    async def abort(self, session: SessionAborted) -> int:
        """Have the worker end the requests of a session; returns how many there were."""
        body = await self._good("POST", "/abort", msgspec.msgpack.encode(session))
        return int(_decode(body, dict[str, int])["requests"])

    async def send(self, events: Sequence[Event]) -> None:
        """Hand over router events, in order."""
        await self._good("POST", "/events", _events.encode(list(events)))

    async def share(self, places: Places) -> None:
        """Tell the worker where its siblings are heard, and where it is."""
        await self._good("POST", "/peers", msgspec.json.encode(places))

    async def begin(self, teachers: Sequence[str]) -> None:
        """Have the worker learn from those at work, and return when it has."""
        await self._good("POST", "/begin", msgspec.json.encode(tuple(teachers)))

    async def serve(self) -> None:
        """Have a worker of the direct plane accept clients."""
        await self._good("POST", "/serve")

    async def drain(self, linger_s: float, *, leaves: bool) -> None:
        """Ask the worker to finish its requests and end.

        linger_s: how long one with clients of its own keeps their unused connections.  leaves: whether it leaves what
        it knows of requests to those who ask later (`hosts.bequest`).
        """
        await self._good("POST", f"/drain?linger_s={linger_s:g}&leaves={leaves:d}")

    async def close(self) -> None:
        """Let go of the connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _good(self, method: str, target: str, body: bytes = b"") -> bytes:
        status, answer = await self._ask(method, target, body)
        if not 200 <= status < 300:
            raise WorkerSilent(f"{self.path.name}: {target} answered {status}")
        return answer

    async def _ask(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        if self._session is None:
            connector = aiohttp.UnixConnector(path=str(self.path))
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        try:
            async with self._session.request(method, f"http://worker{target}", data=body or None) as answer:
                return answer.status, await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise WorkerSilent(f"{self.path.name}: {error or type(error).__name__}") from error


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise WorkerSilent(f"unreadable answer: {error}") from error
