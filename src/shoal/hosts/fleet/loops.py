"""Loops that outlive their bugs: one endpoint's crash must not end the watch of the fleet."""

import asyncio
from collections.abc import Awaitable, Callable

from shoal.hosts.logs import Log

log = Log("fleet")

_CRASH_WAIT_S = 1.0


async def kept_up(loop: Callable[[], Awaitable[None]], name: str) -> None:
    """Run `loop` until it returns; when it raises, log that and run it again a second later."""
    while True:
        try:
            return await loop()
        except Exception:
            log.exception(f"watching {name} failed")
            await asyncio.sleep(_CRASH_WAIT_S)
