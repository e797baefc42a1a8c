"""Runs one router live: stamps events with the clock, keeps its deadline, and hands every step on.

Owns the loop's timer and the order fold, journal, observers.  It holds no policy; carrying out a command is for whoever
fed the event.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from shoal.hosts.journal import JournalWriter
from shoal.measures import Fold
from shoal.routing import Account, Arrived, Command, Event, Router, Ticked

log = logging.getLogger("shoal.driver")

# A timer that is due more often than this costs more than it tells.
MIN_TICK_S = 0.05


class Driver:
    """One router on the running event loop.

    clock: seconds that never go back (`time.monotonic`).  on_account: called for every closed request.
    """

    def __init__(
        self,
        router: Router,
        fold: Fold,
        journal: JournalWriter | None = None,
        on_account: Callable[[Account], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.router = router
        self.fold = fold
        self._journal = journal
        self._on_account = on_account
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, event: Event) -> list[Command]:
        """Give the router one event now and return its commands."""
        now = self._clock()
        commands = self.router.handle(event, now)
        try:
            self._note(event, commands, now)
        except Exception:
            # The books are written: what goes wrong in noting it down must not cost the request its answer.
            log.exception("a step could not be noted")
        if self._timer is None:
            self._arm(now)
        return commands

    def _note(self, event: Event, commands: list[Command], now: float) -> None:
        """Count, record and account for one step."""
        if type(event) is Arrived:
            self.fold.decision.observe(self._clock() - now)
        self.fold.observe(event, commands)
        if self._journal is not None:
            self._journal.append(now, event, commands)
        if self._on_account is not None:
            for command in commands:
                if type(command) is Account:
                    self._on_account(command)

    def _arm(self, now: float) -> None:
        deadline = self.router.deadline()
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(MIN_TICK_S, deadline - now), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed(Ticked())

    def close(self) -> None:
        """Stop the timer and flush the journal."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._journal is not None:
            self._journal.close()
