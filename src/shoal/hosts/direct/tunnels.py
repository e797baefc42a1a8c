"""An upgraded connection: bytes both ways, unread, until one side ends.

Owns nothing of the request that led to it; `relay` records that when the tunnel ends.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.hosts.direct.pools import EngineConnection

if TYPE_CHECKING:
    from shoal.hosts.direct.clients import ClientConnection


class Tunnel:
    """Between one client and one engine.  ended: called once, with the bytes that the engine sent."""

    __slots__ = ("_client", "_ended", "_engine", "_up_bytes", "size_bytes")

    def __init__(self, client: "ClientConnection", engine: EngineConnection, ended: Callable[[int], None]) -> None:
        self._client = client
        self._engine = engine
        self._ended = ended
        self._up_bytes = self.size_bytes = 0

    @property
    def moved_bytes(self) -> int:
        """Bytes of both directions."""
        return self._up_bytes + self.size_bytes

    def from_engine(self, data: bytes) -> None:
        """Pass on to the client."""
        self.size_bytes += len(data)
        self._client.transport.write(data)

    def from_client(self, data: bytes) -> None:
        """Pass on to the engine."""
        self._up_bytes += len(data)
        self._engine.transport.write(data)

    def pause(self, is_engine: bool) -> None:
        """One side does not read: nor is the other."""
        (self._client if is_engine else self._engine).transport.pause_reading()

    def resume(self, is_engine: bool) -> None:
        """It reads again."""
        other = (self._client if is_engine else self._engine).transport
        if not other.is_closing():
            other.resume_reading()

    def engine_lost(self) -> None:
        """The engine has ended it: what it said before still reaches the client."""
        self._client.break_off(b"")
        self._ended(self.size_bytes)

    def client_lost(self) -> None:
        """The client has ended it: what it said before still reaches the engine."""
        engine = self._engine
        engine.relay = engine.take = None
        engine.transport.close()
        self._ended(self.size_bytes)
