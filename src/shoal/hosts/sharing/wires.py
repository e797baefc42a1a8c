"""ZMQ sockets on the event loop: opened with limits and keys, read until empty whenever something came.

Owns options, keys and the one peculiarity of ZMQ's descriptor: it tells once that something changed, also after a send.
Does not know what is said.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

import zmq

from shoal.hosts import logs
from shoal.hosts.sharing.messages import MAX_MESSAGE_BYTES
from shoal.hosts.sharing.secret import Secret

Frames = list[bytes]

_HIGH_WATER = 500
"""Messages that wait for a slow peer before some are lost, which it notices as a gap."""

_MAX_SOCKETS = 8192
"""The default of ZMQ is 1,023, and each peer takes two."""

_RECONNECT_MS = (100, 2_000)
_HANDSHAKE_MS = 5_000
_PER_TURN = 64

_log = logs.get("sharing")


class Wires:
    """Opens sockets.  secret: None for unix sockets alone."""

    def __init__(self, secret: Secret | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, min(_MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT)))
        self._keys = _key_pair(secret) if secret is not None else None

    def open(self, kind: int) -> "zmq.Socket[bytes]":
        """Return a socket with limits on everything, closed at once when it is closed.  Raises OSError."""
        with _as_os_error("a socket"):
            socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    def bind(self, socket: "zmq.Socket[bytes]", address: str) -> None:
        """Listen at an address; over a network with keys alone.  Raises OSError."""
        if not address.startswith("ipc://"):
            if self._keys is None:
                raise OSError(f"{address}: not without keys")
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys[1])
        with _as_os_error(address):
            socket.bind(address)

    def connect(self, socket: "zmq.Socket[bytes]", address: str) -> None:
        """Dial an address, again and again until it answers; over a network with keys alone.  Raises OSError."""
        if not address.startswith("ipc://"):
            if self._keys is None:
                raise OSError(f"{address}: not without keys")
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys[0])
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys[0])
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys[1])
        with _as_os_error(address):
            socket.connect(address)

    def close(self) -> None:
        """End it once every socket is closed, without waiting for last words."""
        threading.Thread(target=self._context.term, name="sharing-end", daemon=True).start()


class Inbox:
    """Reads a socket: `take` is called with the frames of each message, from the loop.  It closes the socket."""

    def __init__(self, socket: "zmq.Socket[bytes]", take: Callable[[Frames], None]) -> None:
        self.socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self.look)
        self._again: asyncio.Handle | None = None
        self._look_again()

    def send(self, frames: Frames) -> bool:
        """Send a message; False when the other side does not take any more."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        finally:
            self._look_again()
        return True

    def look(self) -> None:
        """Read what is there, a bounded number per turn of the loop."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        for _ in range(_PER_TURN):
            if self.socket.closed:
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            try:
                self._take(frames)
            except Exception:
                _log.exception("a message of a peer could not be handled")
        self._look_again()

    def _look_again(self) -> None:
        """Look in the loop's next turn, once however many ask for it: else a flood would take all of its turns."""
        if self._again is None:
            self._again = self._loop.call_soon(self.look)

    def close(self, linger_ms: int = 0) -> None:
        """Stop reading.  linger_ms: how long what was sent last may take to leave."""
        with contextlib.suppress(OSError, ValueError):
            self._loop.remove_reader(self._descriptor)
        self.socket.close(linger_ms)


@contextlib.contextmanager
def _as_os_error(address: str) -> Iterator[None]:
    """ZMQ's errors are no OSErrors, though they mean the same."""
    try:
        yield
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"{address}: {error.strerror}") from None


def _key_pair(secret: Secret) -> tuple[bytes, bytes]:
    """Return the public and the private key in ZMQ's text form."""
    from zmq.utils import z85

    private = z85.encode(secret.curve_key)
    return zmq.curve_public(private), private
