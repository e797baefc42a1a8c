"""Receiving from many ZMQ sockets on the event loop without ever holding it up.

Owns the turn-taking: each socket that has messages is served in its turn, and after a slice of time the loop goes on
with other work.  What messages mean is their receivers'.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

import zmq

from shoal.hosts.logs import Log

log = Log("kvevents")

Receive = Callable[[list[bytes]], None]
# A socket gives way to the next one after so many messages, so a flood from one engine delays no other's events.
_TURN_MESSAGES = 128
_MAX_FRAMES = 8


class _Inlet:
    """One socket in service.  is_queued: whether it waits for its turn.  is_open: whether it may be served."""

    __slots__ = ("is_open", "is_queued", "receive", "rest", "socket")

    def __init__(self, socket: "zmq.Socket[bytes]", receive: Receive, rest: Callable[[], None] | None) -> None:
        self.socket = socket
        self.receive = receive
        self.rest = rest
        self.is_queued = False
        self.is_open = True


class Pump:
    """Serves sockets in turns.  slice_s: longest time before other work of the loop gets its turn."""

    __slots__ = ("_handle", "_inlets", "_loop", "_ready", "_slice_s")

    def __init__(self, slice_s: float) -> None:
        self._slice_s = slice_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inlets: dict[zmq.Socket[bytes], _Inlet] = {}
        self._ready: deque[_Inlet] = deque()
        self._handle: asyncio.Handle | None = None

    def add(self, socket: "zmq.Socket[bytes]", receive: Receive, rest: Callable[[], None] | None = None) -> None:
        """Call `receive` with each message of `socket`, until it is closed; `rest` after each turn that it had."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        inlet = self._inlets[socket] = _Inlet(socket, receive, rest)
        self._loop.add_reader(socket.FD, self._queue, inlet)
        # The descriptor tells of changes only, and one may have come before the reader did.
        self._queue(inlet)

    def pause(self, socket: "zmq.Socket[bytes]", is_paused: bool) -> None:
        """Leave messages where they are, in `socket` and with its peer, until it is called again with False."""
        inlet = self._inlets.get(socket)
        if inlet is None or self._loop is None or inlet.is_open is not is_paused:
            return
        inlet.is_open = not is_paused
        if is_paused:
            self._loop.remove_reader(socket.FD)
        else:
            self._loop.add_reader(socket.FD, self._queue, inlet)
            self._queue(inlet)

    def close(self, socket: "zmq.Socket[bytes]") -> None:
        """Close `socket` and everything that waits in it."""
        inlet = self._inlets.pop(socket, None)
        if inlet is not None and self._loop is not None:
            inlet.is_open = False
            inlet.rest = None
            self._loop.remove_reader(socket.FD)
        socket.close(linger=0)

    def _queue(self, inlet: _Inlet) -> None:
        if not inlet.is_queued:
            inlet.is_queued = True
            self._ready.append(inlet)
            self._schedule()

    def _schedule(self) -> None:
        if self._handle is None and self._loop is not None:
            self._handle = self._loop.call_soon(self._run)

    def _run(self) -> None:
        """Serve for one slice."""
        self._handle = None
        until = time.perf_counter() + self._slice_s
        ready = self._ready
        while ready:
            inlet = ready.popleft()
            inlet.is_queued = False
            if inlet.is_open and not self._serve(inlet, until) and inlet.is_open:
                inlet.is_queued = True
                ready.append(inlet)
            if inlet.rest is not None:
                try:
                    inlet.rest()
                except Exception:
                    # Nor may it stop the turns of the others.
                    log.exception("messages could not be dealt with")
            if time.perf_counter() >= until:
                break
        if ready:
            self._schedule()

    def _serve(self, inlet: _Inlet, until: float) -> bool:
        """Serve one socket for its turn.  Returns whether nothing is left in it."""
        receive, socket = inlet.receive, inlet.socket
        for _ in range(_TURN_MESSAGES):
            try:
                frames = _receive(socket)
            except zmq.Again:
                return True
            except zmq.ZMQError:
                # Interrupted, or closed under our feet: the next change of the descriptor tells.
                return True
            try:
                receive(frames)
            except Exception:
                # One message that cannot be dealt with must not silence the socket.
                log.exception("a message could not be dealt with")
            if not inlet.is_open:
                return True
            if time.perf_counter() >= until:
                return False
        return False


def _receive(socket: "zmq.Socket[bytes]") -> list[bytes]:
    """Return the frames of the next message, no more than a message of ours can have.  Raises zmq.Again."""
    receive, option = socket.recv, socket.getsockopt
    frames = [receive(zmq.NOBLOCK)]
    while option(zmq.RCVMORE):
        frame = receive(zmq.NOBLOCK)
        if len(frames) < _MAX_FRAMES:
            frames.append(frame)
    return frames
