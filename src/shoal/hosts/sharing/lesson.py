"""What a picker that begins takes over from one at work: endpoints' speeds and memories, then the rows of the index.

Owns the order of the questions and their bound in time.  One part is asked for after the other, so the giver does
little per turn of its loop.
"""

import asyncio

from shoal.hosts import logs
from shoal.hosts.sharing.ear import Ear
from shoal.hosts.sharing.messages import Answer

LESSON_S = 3.0
"""Longest time a picker that begins spends on it; it is ready then with what it has."""

_log = logs.get("sharing")


async def learn(ear: Ear, timeout_s: float = LESSON_S) -> int:
    """Take over what the peer at `ear` knows; returns how many parts came."""
    parts = 0
    try:
        async with asyncio.timeout(timeout_s):
            clock = 0
            for what in ("endpoints", "rows"):
                at: int | None = 0
                while at is not None:
                    answer = await _ask(ear, what, at, clock)
                    if answer is None or answer.taught is None:
                        _log.warning("a peer did not teach all it knows", peer=ear.name, parts=parts)
                        return parts
                    parts += 1
                    clock = clock or answer.taught.clock
                    ear.teach(answer.taught)
                    at = answer.more if answer.more is None or answer.more > at else None
    except TimeoutError:
        _log.warning("a peer took too long to teach all it knows", peer=ear.name, parts=parts)
    return parts


async def _ask(ear: Ear, what: str, at: int, clock: int) -> Answer | None:
    asked: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()

    def take(answer: Answer | None) -> None:
        if not asked.done():
            asked.set_result(answer)

    ear.ask(what, at, clock, take)
    return await asked
