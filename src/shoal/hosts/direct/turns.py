"""What the requests of one pass of the event loop do together, at its end.

Owns only when: requests leave for their engines one right after the other, which costs less than in between their
decisions, and the books of those that have ended are written when all bytes are on their way.
"""

import asyncio
from typing import Protocol

from shoal.hosts.logs import Log

log = Log("direct")

MOST_LEAVING = 8
"""So many do not wait for the end of the pass: the first has waited for the decisions of the others."""


class Passenger(Protocol):
    """A request that is decided, or over."""

    def depart(self) -> None:
        """Go to the engine."""

    def fault(self, error: Exception) -> None:
        """It could not depart: answer its client, or hang up.  Raises nothing, for others wait to depart."""

    def close_books(self) -> None:
        """Tell the router of the end."""


class Turn:
    """The pass under way; one per worker."""

    __slots__ = ("_ended", "_is_awaited", "_leaving", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._leaving: list[Passenger] = []
        self._ended: list[Passenger] = []
        self._is_awaited = False

    def leave(self, request: Passenger) -> None:
        """Have it `depart` soon."""
        leaving = self._leaving
        leaving.append(request)
        if len(leaving) >= MOST_LEAVING:
            self._depart()
        elif not self._is_awaited:
            self._is_awaited = True
            self._loop.call_soon(self._finish)

    def end(self, request: Passenger) -> None:
        """Have it `close_books` soon, and never from here: its bytes go first."""
        self._ended.append(request)
        if not self._is_awaited:
            self._is_awaited = True
            self._loop.call_soon(self._finish)

    def _finish(self) -> None:
        self._is_awaited = False
        self._depart()
        ended, self._ended = self._ended, []
        for request in ended:
            try:
                request.close_books()
            except Exception as error:
                log.exception("a request could not be recorded", error)

    def _depart(self) -> None:
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            try:
                request.depart()
            except Exception as error:
                request.fault(error)
