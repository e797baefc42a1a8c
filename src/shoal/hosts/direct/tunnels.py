"""An upgraded connection: bytes both ways, unread, until one side ends.

Owns it from the switch on, in the place of the `relay` that led to it and that records what came of it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.hosts.direct.pools import EngineConnection
from shoal.routing.commands import Cut, Evict
from shoal.routing.events import Kept

if TYPE_CHECKING:
    from shoal.hosts.direct.clients import ClientConnection
    from shoal.hosts.direct.plane import Plane


class Tunnel:
    """Between one client and one engine.

    ended: called once, with flags as in Envoy's access log and the bytes that the engine sent.
    """

    __slots__ = (
        "_client",
        "_ended",
        "_engine",
        "_plane",
        "_quiet_since",
        "_seen",
        "_size_bytes",
        "_started_at",
        "_up_bytes",
        "request_id",
    )

    def __init__(
        self,
        plane: "Plane",
        client: "ClientConnection",
        engine: EngineConnection,
        request_id: str,
        started_at: float,
        ended: Callable[[str, int], None],
    ) -> None:
        self._plane = plane
        self._client = client
        self._engine = engine
        self._ended = ended
        self._started_at = started_at
        self._quiet_since = plane.wheel.now
        self._seen = -1
        self._up_bytes = self._size_bytes = 0
        self.request_id = request_id

    def from_engine(self, data: bytes) -> None:
        """Pass on to the client."""
        self._size_bytes += len(data)
        self._client.transport.write(data)

    def from_client(self, data: bytes) -> None:
        """Pass on to the engine."""
        self._up_bytes += len(data)
        self._engine.transport.write(data)

    # ------------------------------------------------------------------ who does not read

    def client_paused(self) -> None:
        """The client does not read: nor do we read what is for it."""
        self._engine.transport.pause_reading()

    def client_resumed(self) -> None:
        """The client reads again."""
        if not self._engine.transport.is_closing():
            self._engine.transport.resume_reading()

    def engine_paused(self) -> None:
        """The engine does not read: nor do we read what is for it."""
        self._client.transport.pause_reading()

    def engine_resumed(self) -> None:
        """The engine reads again."""
        if not self._client.transport.is_closing():
            self._client.transport.resume_reading()

    # ------------------------------------------------------------------ the end

    def on_due(self, now: float) -> float:
        """Look after it; returns when to look again."""
        clocks = self._plane.settings.clocks
        seen = self._up_bytes + self._size_bytes - self._engine.transport.get_write_buffer_size()
        if clocks.stream_s and now - self._started_at >= clocks.stream_s:
            self._cut("DT")
        elif seen != self._seen:
            self._seen, self._quiet_since = seen, now
        elif now - self._quiet_since >= clocks.stream_idle_s:
            self._cut("SI")
        return self._plane.next_look(now, self._started_at)

    def overload(self) -> None:
        """What unread answers hold is over the limit, and this one has just grown."""
        self._cut("OM")

    def abort(self, _: Cut) -> None:
        """The router ends it."""
        self._cut("OA")

    def evict(self, command: Evict) -> None:
        """Another request needs the place: what goes through a tunnel cannot be sent again."""
        if command.may_cut:
            self._cut("OA")
        else:
            self._plane.picker.driver.feed(Kept(command.request_id))

    def engine_lost(self, connection: EngineConnection, _: Exception | None) -> None:
        """The engine has ended it: what it said before still reaches the client."""
        if connection is self._engine:
            self._client.break_off(b"")
            self._ended("", self._size_bytes)

    def leave(self) -> None:
        """The client has ended it: what it said before still reaches the engine."""
        engine = self._engine
        engine.relay = engine.take = None
        engine.transport.close()
        self._ended("", self._size_bytes)

    def _cut(self, flag: str) -> None:
        self._engine.close()
        self._client.break_off(b"")
        self._ended(flag, self._size_bytes)
