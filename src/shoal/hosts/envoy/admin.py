"""Envoy's admin API over its unix socket: readiness, figures, draining.

Asks and tells; what to do about an answer is the caller's.
"""

import asyncio
import re

import aiohttp
import msgspec

from shoal.kernel import UNREADABLE

_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
# What a closed, absent or dying socket raises.
_UNREACHABLE = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


class _Stat(msgspec.Struct, frozen=True):
    name: str = ""
    value: int = 0


class _Stats(msgspec.Struct, frozen=True):
    stats: list[_Stat] = []


class EnvoyAdmin:
    """A client of one Envoy's admin socket; makes a connection per call, so a restarted Envoy needs no care."""

    __slots__ = ("_socket",)

    def __init__(self, socket: str) -> None:
        self._socket = socket

    async def is_live(self) -> bool:
        """Whether Envoy has loaded its configuration and serves."""
        try:
            status, _ = await self._call("GET", "/ready")
        except _UNREACHABLE:
            return False
        return status == 200

    async def gauge(self, name: str) -> int | None:
        """Return one counter or gauge by its full name, None when Envoy does not know it or is not there."""
        return (await self.gauges(f"^{re.escape(name)}$")).get(name)

    async def gauges(self, pattern: str) -> dict[str, int]:
        """Return the counters and gauges whose names match `pattern`, empty when Envoy is not there."""
        try:
            _, body = await self._call("GET", "/stats", {"filter": pattern, "format": "json"})
            found = msgspec.json.decode(body, type=_Stats)
        except (*_UNREACHABLE, *UNREADABLE):
            return {}
        return {stat.name: stat.value for stat in found.stats if stat.name}

    async def stop_listening(self) -> bool:
        """Accept no more connections, and end each open one after its requests; returns whether Envoy agreed."""
        try:
            await self._call("POST", "/drain_listeners", {"graceful": "", "skip_exit": ""})
            status, _ = await self._call("POST", "/drain_listeners")
        except _UNREACHABLE:
            return False
        return status == 200

    async def _call(self, method: str, path: str, query: dict[str, str] | None = None) -> tuple[int, bytes]:
        connector = aiohttp.UnixConnector(path=self._socket, force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session,
            session.request(method, f"http://envoy{path}", params=query) as answer,
        ):
            return answer.status, await answer.read()
