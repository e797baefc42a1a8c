"""Asking an engine for messages again: one request, many replies, bounded in time, few at once.

Owns the DEALER side of the replay protocol and its clocks.  What is missing, and what follows from a replay that
fails, is `publisher`'s.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

import zmq

from shoal.hosts.signals.pump import Pump
from shoal.hosts.signals.settings import KvSettings
from shoal.hosts.signals.sockets import Sockets
from shoal.kernel import InvalidInput
from shoal.wire.kvevents import END_OF_REPLAY, read_frames


class Listener(Protocol):
    """Who wants a replay."""

    def replied(self, sequence: int, payload: bytes) -> None:
        """One message of the replay."""
        ...

    def ended(self) -> None:
        """All has come."""
        ...

    def failed(self, reason: str) -> None:
        """It stopped before its end.  reason: a word for metrics."""
        ...

    def rest(self) -> None:
        """No more comes in this turn of the loop."""
        ...


class Slots:
    """How many replays run at once.  Waiting ones get their turn in order."""

    __slots__ = ("_free", "_waiting")

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self, begin: Callable[[], None]) -> None:
        """Call `begin` when there is room, at once if there is."""
        if self._free:
            self._free -= 1
            begin()
        else:
            self._waiting.append(begin)

    def forget(self, begin: Callable[[], None]) -> bool:
        """Take back a wish that waits.  Returns whether it did."""
        try:
            self._waiting.remove(begin)
        except ValueError:
            return False
        return True

    def give(self) -> None:
        """Make room for the next."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._free += 1


class Replay:
    """One request to one engine, from its making until `stop` or the listener is told an end.

    start: first sequence number wanted.
    """

    __slots__ = (
        *("_address", "_began", "_idle", "_is_over", "_listener", "_loop", "_pump", "_settings", "_slots", "_socket"),
        *("_replies", "_sockets", "_start"),
    )

    def __init__(
        self,
        address: str,
        start: int,
        listener: Listener,
        *,
        sockets: Sockets,
        pump: Pump,
        slots: Slots,
        settings: KvSettings,
    ) -> None:
        self._address = address
        self._start = start
        self._listener = listener
        self._sockets = sockets
        self._pump = pump
        self._slots = slots
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._began = 0.0
        self._replies = 0
        self._is_over = False
        slots.take(self._begin)

    def stop(self) -> None:
        """End it without a word."""
        if self._is_over:
            return
        self._is_over = True
        if self._idle is not None:
            self._idle.cancel()
        if self._socket is not None:
            self._pump.close(self._socket)
            self._socket = None
        elif self._slots.forget(self._begin):
            return
        self._slots.give()

    def _begin(self) -> None:
        self._began = self._loop.time()
        self._idle = self._loop.call_later(self._settings.replay_idle_s, self._tick, 0)
        try:
            self._socket = self._sockets.asker()
            self._socket.connect(self._address)
            self._socket.send_multipart([b"", self._start.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._loop.call_soon(self._fail, "zmq-error")
            return
        self._pump.add(self._socket, self._received, self._listener.rest)

    def _received(self, frames: list[bytes]) -> None:
        try:
            _, sequence, payload = read_frames(frames)
        except InvalidInput:
            self._fail("unreadable")
            return
        if sequence == END_OF_REPLAY:
            self.stop()
            self._listener.ended()
            return
        self._replies += 1
        self._listener.replied(sequence, payload)

    def _tick(self, replies_before: int) -> None:
        if self._replies == replies_before:
            self._fail("idle")
        elif self._loop.time() - self._began > self._settings.replay_total_s:
            self._fail("too-long")
        else:
            self._idle = self._loop.call_later(self._settings.replay_idle_s, self._tick, self._replies)

    def _fail(self, reason: str) -> None:
        if not self._is_over:
            self.stop()
            self._listener.failed(reason)
