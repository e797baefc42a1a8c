"""Runs one router live: stamps events with the clock, keeps its deadline, and hands every step on.

Owns the loop's timer, the order fold, journal, observers, and who waits for a command.  It holds no policy; carrying
out a command is for whoever fed the event, or for whoever waits for it: a router may answer a request in the commands
of any later event.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from shoal.hosts.journal import JournalWriter
from shoal.measures import Fold
from shoal.routing import Account, Arrived, Command, Ended, Event, Forward, Refuse, Router, Ticked
from shoal.routing.commands import Evict, Fetch
from shoal.routing.events import Fetched, FetchFailed, Kept, PeerLeft

log = logging.getLogger("shoal.driver")

# A timer that is due more often than this costs more than it tells, and so does asking for the deadline more often.
MIN_TICK_S = 0.05
# While a request waits, its deadline is kept more closely.
MIN_WAITED_TICK_S = 0.002

OfRequest = Fetch | Forward | Refuse
"""The commands that concern one request that is not forwarded yet."""
_OF_REQUEST = (Fetch, Forward, Refuse)
_PLACING = (Arrived, Fetched, FetchFailed)
"""The events upon which a request is placed at once."""


class Driver:
    """One router on the running event loop.

    clock: seconds that never go back (`time.monotonic`).  on_account: called for every closed request.  before: called
    before an event that places a request, and after: after each step, while somebody wants to know.  on_evict: called
    from the loop for each request that the router wants back from its engine.
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
        self._waiting: dict[str, Callable[[OfRequest], None]] = {}
        self.before: Callable[[], None] | None = None
        self.after: Callable[[], None] | None = None
        self.on_evict: Callable[[Evict], None] = self._keep

    def feed(self, event: Event) -> list[Command]:
        """Give the router one event now and return its commands."""
        if self.before is not None and isinstance(event, _PLACING):
            self.before()
        now = self._clock()
        commands = self.router.handle(event, now)
        try:
            self._note(event, commands, now)
        except Exception:
            # The books are written: what goes wrong in noting it down must not cost the request its answer.
            log.exception("a step could not be noted")
        if self._waiting or len(commands) > 1:  # more than an answer: another request may have to give way
            self._hand_out(commands, now)
        elif self._timer is None or type(event) is PeerLeft:  # whose deadline is sooner than that of records
            self._arm(now)
        if self.after is not None:
            self.after()
        return commands

    def now(self) -> float:
        """The time on the router's clock."""
        return self._clock()

    # ------------------------------------------------------------------ requests that wait

    @property
    def waiting(self) -> int:
        """Requests that the router has neither forwarded nor refused yet."""
        return len(self._waiting)

    def wait(self, request_id: str, take: Callable[[OfRequest], None]) -> None:
        """Have `take` called, from the loop, with each command for the request in the steps to come.

        It is called until the command is a Forward or a Refuse, or `give_up` is.
        """
        self._waiting[request_id] = take
        self._arm(self._clock())

    def give_up(self, request_id: str) -> None:
        """Nobody waits for the request any more; the router is told that it has ended."""
        self._waiting.pop(request_id, None)
        self.feed(Ended(request_id))

    def _hand_out(self, commands: list[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, _OF_REQUEST) and command.request_id in self._waiting:
                # Not from here: who fed the event is in the middle of something.
                asyncio.get_running_loop().call_soon(self._hand_over, command)
            elif type(command) is Evict:
                asyncio.get_running_loop().call_soon(self.on_evict, command)
        self._arm(now)

    def _hand_over(self, command: OfRequest) -> None:
        take = self._waiting.get(command.request_id)
        if take is None:
            return
        if type(command) is not Fetch:
            del self._waiting[command.request_id]
        take(command)

    def _keep(self, command: Evict) -> None:
        """Whoever cannot take a request back lets it run."""
        self.feed(Kept(command.request_id))

    # ------------------------------------------------------------------ noting down

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

    # ------------------------------------------------------------------ the timer

    def _arm(self, now: float) -> None:
        """Have the timer look at the router's deadline in time."""
        if self._timer is None and not self._waiting:
            self._timer = asyncio.get_running_loop().call_later(MIN_TICK_S, self._tick)
        else:
            self._set(now)

    def _set(self, now: float) -> None:
        """Set the timer to the router's deadline, unless it is set to an earlier time already."""
        deadline = self.router.deadline()
        if deadline is None:
            return
        due_s = max(MIN_WAITED_TICK_S if self._waiting else MIN_TICK_S, deadline - now)
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + due_s:
                return
            self._timer.cancel()
        self._timer = loop.call_later(due_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        deadline = self.router.deadline()
        try:
            if deadline is not None and deadline <= self._clock():
                self.feed(Ticked())
        finally:
            # A fault must not stop the clock of those who wait.
            self._set(self._clock())

    def close(self) -> None:
        """Stop the timer and flush the journal."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._journal is not None:
            self._journal.close()
