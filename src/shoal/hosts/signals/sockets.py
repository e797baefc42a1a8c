"""ZMQ sockets towards engines: bounded, quick to close, and aware of peers that are gone."""

import zmq

from shoal.hosts.signals.settings import KvSettings
from shoal.wire.kvevents import MAX_PAYLOAD_BYTES

_MAX_SOCKETS = 60_000
"""The default of ZMQ is 1,023; one publisher takes up to four."""


class Sockets:
    """Makes the sockets of one process; one I/O thread serves them all."""

    __slots__ = ("_context", "_settings")

    def __init__(self, settings: KvSettings) -> None:
        self._settings = settings
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def subscription(self, topic: str) -> "zmq.Socket[bytes]":
        """A SUB socket for messages whose topic begins with `topic`; not connected yet."""
        socket = self._make(zmq.SUB, self._settings.receive_messages)
        socket.set(zmq.SUBSCRIBE, topic.encode())
        return socket

    def asker(self) -> "zmq.Socket[bytes]":
        """A DEALER socket, which can receive many replies to one request; not connected yet."""
        return self._make(zmq.DEALER, self._settings.replay_receive_messages)

    def close(self) -> None:
        """End the I/O thread; every socket must be closed."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _make(self, kind: int, receive_messages: int) -> "zmq.Socket[bytes]":
        if self._context is None:
            self._context = zmq.Context(io_threads=1)
            self._context.set(zmq.MAX_SOCKETS, min(_MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT)))
        settings = self._settings
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, receive_messages)
        socket.set(zmq.SNDHWM, 16)
        socket.set(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        socket.set(zmq.IPV6, 1)
        socket.set(zmq.RECONNECT_IVL, round(settings.reconnect_s * 1000))
        socket.set(zmq.RECONNECT_IVL_MAX, round(settings.reconnect_most_s * 1000))
        socket.set(zmq.HEARTBEAT_IVL, round(settings.heartbeat_s * 1000))
        socket.set(zmq.HEARTBEAT_TIMEOUT, round(settings.heartbeat_timeout_s * 1000))
        return socket
