"""What is known of one publisher of KV events: which message comes next, and whether anything was missed.

Owns the sequence of one data-parallel rank: gaps, restarts, duplicates, when a replay is needed, and how far the view
can be trusted.  Sockets and time-outs are `connection` and `replay`; what a message says is its applier's.
"""

from collections.abc import Callable
from typing import Protocol

from shoal.hosts.signals.settings import KvSettings
from shoal.pool.kvevents import KvState
from shoal.wire.kvevents import END_OF_REPLAY

_NOTHING = -1


class Applier(Protocol):
    """Where the messages of one publisher go."""

    def apply(self, payload: bytes) -> bool:
        """Take one message.  Returns whether it says that the cache is empty at one point of it."""
        ...

    def clear(self) -> None:
        """Forget everything that was applied."""
        ...


class Notes(Protocol):
    """Who counts what happens.  cause: a word for metrics."""

    def gap(self, cause: str) -> None:
        """Something was missed for good."""
        ...

    def restarted(self) -> None:
        """Another process publishes at the address."""
        ...

    def dropped(self, cause: str) -> None:
        """A message was not applied."""
        ...


class Publisher:
    """One publisher.

    ask: called with the first sequence number wanted; answered by `replied`, `replay_ended` or `replay_failed`.  stop:
    ends a replay without any of them.  pause: called with True when live messages have to wait for the end of a replay,
    with False when they may come.  changed: called when `state` is another.  warm: called with True to have `trust`
    called once nothing more was missed for a while, with False when that is not wanted any more.
    """

    __slots__ = (
        *("_applier", "_ask", "_changed", "_has_replay", "_has_replied", "_is_checking", "_is_connected"),
        *("_is_rebuilding",),
        *("_is_replaying", "_is_unsure", "_last", "_last_live", "_last_payload", "_may_replay", "_missed", "_notes"),
        *("_pause", "_progress", "_settings", "_stop", "_tries", "_waiting", "_warm", "state"),
    )

    def __init__(
        self,
        applier: Applier,
        notes: Notes,
        settings: KvSettings,
        *,
        ask: Callable[[int], None],
        stop: Callable[[], None],
        pause: Callable[[bool], None],
        changed: Callable[[], None],
        warm: Callable[[bool], None],
        has_replay: bool,
    ) -> None:
        self._applier = applier
        self._notes = notes
        self._settings = settings
        self._ask = ask
        self._stop = stop
        self._pause = pause
        self._changed = changed
        self._warm = warm
        self._has_replay = self._may_replay = has_replay
        self.state = KvState.STALE
        self._is_connected = False
        self._last = self._last_live = _NOTHING
        self._last_payload = b""
        # missed: the view lacks events for good.  unsure: it may, since the stream was cut.
        self._missed, self._is_unsure = True, False
        self._is_replaying = self._is_rebuilding = self._is_checking = self._has_replied = self._progress = False
        self._tries = 0
        # The live message that showed that some are missing.
        self._waiting: tuple[int, bytes] | None = None

    # ------------------------------------------------------------------ the live stream

    def connected(self) -> None:
        """The live stream stands; what was published before now may have been missed."""
        self._is_connected = True
        if self._is_replaying:
            return
        if self._may_replay and (self._missed or self._is_unsure):
            self._replay()
            return
        if self._missed and self._last >= 0:
            self._warm(True)
        self._settle()

    def disconnected(self) -> None:
        """The live stream is cut."""
        self._is_connected, self._is_unsure = False, True
        self._abandon()
        self._warm(False)
        self._settle()

    def received(self, sequence: int, payload: bytes) -> None:
        """One live message."""
        if sequence == self._last + 1 and sequence > self._last_live:
            self._last_live = sequence
            self._take(sequence, payload)
            if self.state is not KvState.FRESH:
                self._in_order(sequence)
        elif sequence != END_OF_REPLAY:
            self._out_of_order(sequence, payload)

    def _in_order(self, sequence: int) -> None:
        if sequence == 0:
            self._missed = False
        if not self._may_replay:
            self._is_unsure = False
        self._settle()

    def _out_of_order(self, sequence: int, payload: bytes) -> None:
        if sequence <= self._last_live:
            # Within one stream numbers only rise: another process has begun to count anew.
            self._restart()
            self.received(sequence, payload)
            return
        self._last_live = sequence
        if sequence <= self._last:
            # A replay was faster than the live stream.
            self._notes.dropped("duplicate")
        elif not self._may_replay:
            self._lose("unreplayed")
            self._take(sequence, payload)
            self._settle()
        elif self._is_connected:
            self._waiting = sequence, payload
            self._replay()
        else:
            # What is left of a stream that is cut; the replay after the next connection brings it.
            self._notes.dropped("cut")

    # ------------------------------------------------------------------ replays

    @property
    def last(self) -> int:
        """Sequence number of the last message that was applied, -1 for none."""
        return self._last

    def check(self) -> None:
        """Find out whether the last messages were lost, which nothing shows until another one comes."""
        if self.state is KvState.FRESH and self._may_replay:
            self._is_checking = True
            self._replay()

    def _replay(self) -> None:
        self._is_replaying, self._has_replied, self._progress = True, False, False
        self._pause(True)
        self._settle()
        # From the last message on, not the one after it: if it is another one now, another process publishes here.
        self._ask(0 if self._is_rebuilding else max(self._last, 0))

    def replied(self, sequence: int, payload: bytes) -> None:
        """One message of the replay, its end excepted."""
        if not self._is_replaying:
            return
        is_first, self._has_replied = not self._has_replied, True
        if is_first and self._is_rebuilding:
            self._is_rebuilding = False
            self._forget()
        elif is_first and sequence == self._last and payload != self._last_payload:
            self._restart()
            self._replay()
            return
        if sequence <= self._last:
            return
        self._progress = True
        if self._is_checking:
            self._is_checking = False
            self._settle()
        # Without the last message once more nothing says that this is the process of before.
        if sequence > self._last + 1 or (is_first and self._last >= 0):
            # The engine keeps no more than this.  What it still holds of before is seldom asked for.
            self._notes.gap("not-kept" if self._last >= 0 else "began-later")
            if self._last >= 0:
                self._forget()
        self._missed = False
        self._take(sequence, payload)

    def replay_ended(self) -> None:
        """The engine has sent all that it keeps."""
        if not self._is_replaying:
            return
        if self._last >= 0 and not self._has_replied:
            # It does not know the last message that came from here.
            self._restart()
            self._replay()
            return
        if self._last < 0:
            # It has published nothing yet.
            self._missed = False
        self._is_unsure = False
        self._tries = 0 if self._progress else self._tries + 1
        self._go_on()

    def replay_failed(self) -> bool:
        """The replay did not come to its end.  Returns whether to call `retry` in a while; else it is given up."""
        self._tries = 0 if self._progress else self._tries + 1
        if self._tries < self._settings.replay_tries:
            return True
        self._may_replay = False
        self._is_unsure = True
        self._go_on()
        return False

    def retry(self) -> None:
        """Ask again after a replay that failed."""
        if self._is_replaying:
            self._replay()

    def allow_replay(self) -> None:
        """The cool-down after giving up is over."""
        self._may_replay = self._has_replay
        if self._is_connected and self._may_replay and not self._is_replaying and (self._missed or self._is_unsure):
            self._is_rebuilding = self._missed
            self._replay()

    def broken(self) -> None:
        """What was taken could not be applied: forget it all, and ask for no replay, which may bring the same."""
        self._abandon()
        self._may_replay = False
        self._lose("fault")
        self._settle()

    def _go_on(self) -> None:
        """Return to the live stream, first to the message that waits."""
        waiting = self._waiting
        if waiting is not None and waiting[0] > self._last + 1:
            if self._may_replay and self._tries < self._settings.replay_tries:
                self._replay()
                return
            self._lose("unreplayed")
        self._waiting = None
        self._is_replaying = self._is_rebuilding = self._is_checking = False
        self._tries = 0
        if waiting is not None and waiting[0] > self._last:
            self._take(*waiting)
        self._pause(False)
        self._settle()

    # ------------------------------------------------------------------ what is known

    def _take(self, sequence: int, payload: bytes) -> None:
        self._last, self._last_payload = sequence, payload
        if self._applier.apply(payload):
            # Whatever was missed before is gone from the engine too.
            self._missed = False

    def _lose(self, cause: str) -> None:
        """Go on from here without what was missed."""
        self._notes.gap(cause)
        self._forget()
        self._missed, self._is_unsure = True, False
        self._warm(True)

    def _restart(self) -> None:
        """Another process publishes here, and its cache is another one."""
        self._notes.restarted()
        self._abandon()
        self._forget()
        self._last_live = _NOTHING
        self._missed, self._is_unsure = True, False
        self._may_replay = self._has_replay

    def _forget(self) -> None:
        self._applier.clear()
        self._last, self._last_payload = _NOTHING, b""

    def _abandon(self) -> None:
        """End a replay that is under way."""
        if self._is_replaying:
            self._is_replaying = self._is_rebuilding = self._is_checking = False
            self._stop()
            self._pause(False)
        self._waiting = None
        self._tries = 0

    def trust(self) -> None:
        """Events have come without a gap for so long that what was missed before does not matter any more."""
        self._missed = False
        self._settle()

    def _settle(self) -> None:
        """Set the state that follows from all that is known."""
        if not self._missed:
            self._warm(False)
        if not self._is_connected:
            state = KvState.STALE
        elif self._is_replaying and not self._is_checking:
            state = KvState.CATCHING_UP
        else:
            state = KvState.STALE if self._missed or self._is_unsure else KvState.FRESH
        if state is not self.state:
            self.state = state
            self._changed()
