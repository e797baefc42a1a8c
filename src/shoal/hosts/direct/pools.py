"""Connections to engines: one pool per address, and the protocol of one connection.

Owns dialling, reuse, and when an unused connection ends.  What is said on a connection is `relay`'s.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from shoal.hosts.backends import Backend, BackendsFile
from shoal.hosts.direct.settings import DirectSettings
from shoal.hosts.direct.wheel import NEVER, Wheel

if TYPE_CHECKING:
    from shoal.hosts.direct.relay import Relay
    from shoal.hosts.direct.tunnels import Tunnel


class EngineConnection(asyncio.Protocol):
    """One connection to an engine.

    relay: whose answer is read here, None while it is unused.  take: what is done with bytes, None when none may come.
    is_reused: it has carried a request before.  due, visit: see `wheel.Timed`.
    """

    __slots__ = ("due", "is_reused", "pool", "relay", "take", "transport", "visit")

    def __init__(self, pool: "EnginePool") -> None:
        self.pool = pool
        self.relay: Relay | Tunnel | None = None
        self.take: Callable[[bytes], None] | None = None
        self.is_reused = False
        self.due = NEVER
        self.visit = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Hand bytes on; an engine that speaks unasked is not listened to."""
        take = self.take
        if take is None:
            self.close()
        else:
            take(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits for an answer."""
        relay, self.relay, self.take = self.relay, None, None
        self.due = NEVER
        if relay is None:
            self.pool.idle.pop(self, None)
        else:
            relay.engine_lost(self, exc)

    def pause_writing(self) -> None:
        """The engine does not read: nor do we read what is for it."""
        if self.relay is not None:
            self.relay.engine_paused()

    def resume_writing(self) -> None:
        """The engine reads again."""
        if self.relay is not None:
            self.relay.engine_resumed()

    def on_due(self, _: float) -> None:
        """It was unused for too long."""
        self.due = NEVER
        if self.relay is None:
            self.close()

    def close(self) -> None:
        """End the connection at once: an engine that still works on an answer hears of it."""
        self.relay = self.take = None
        self.pool.idle.pop(self, None)
        self.transport.abort()


class EnginePool:
    """The connections to one address.  idle: unused ones, the one used last at the end.

    own_lines: header lines of a request that differ by engine, each after its line end; its own key is among them.
    head_end: the same with the head's end.  shown: the line that names it in answers.
    """

    __slots__ = ("_pools", "address", "backend", "head_end", "host", "idle", "own_lines", "port", "shown")

    def __init__(self, pools: "Pools", address: str) -> None:
        self._pools = pools
        self.address = address
        host, _, port = address.rpartition(":")
        self.host = host.strip("[]")
        self.port = int(port)
        self.shown = f"x-shoal-endpoint: {address}\r\n".encode()
        self.idle: dict[EngineConnection, None] = {}
        self.take_backend(pools.backends.of(address))

    def take_backend(self, backend: Backend) -> None:
        """Dial differently from now on."""
        self.backend = backend
        key = backend.authorization
        lines = [f"x-gateway-destination-endpoint: {self.address}", *([f"authorization: {key}"] if key else [])]
        self.own_lines = "".join(f"\r\n{line}" for line in lines).encode("latin-1")
        self.head_end = self.own_lines + b"\r\n\r\n"

    def take(self) -> EngineConnection | None:
        """Return an unused connection, None when there is none."""
        idle = self.idle
        while idle:
            connection, _ = idle.popitem()
            connection.due = NEVER
            if not connection.transport.is_closing():
                return connection
        return None

    def give_back(self, connection: EngineConnection) -> None:
        """Keep a connection whose answer has ended."""
        connection.relay = connection.take = None
        pools = self._pools
        if len(self.idle) >= pools.settings.max_idle_per_engine or connection.transport.is_closing() or pools.is_closed:
            connection.close()
            return
        connection.is_reused = True
        self.idle[connection] = None
        connection.due = pools.wheel.now + pools.settings.clocks.engine_idle_s
        pools.wheel.watch(connection)

    def dial(self, relay: "Relay") -> None:
        """Open a connection for `relay`, which is told by `connected` or `unreachable`."""
        task = self._pools.loop.create_task(self._dial(relay))
        relay.dialling = task

    async def _dial(self, relay: "Relay") -> None:
        try:
            connection = await self._open()
            relay.dialling = None
            if connection is None:
                relay.unreachable()
            else:
                relay.connected(connection)
        except Exception as error:
            relay.fault(error)

    async def _open(self) -> EngineConnection | None:
        """Return a new connection, None when none can be had."""
        backend, loop = self.backend, self._pools.loop
        try:
            async with asyncio.timeout(self._pools.settings.clocks.connect_s):
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(self),
                    self.host,
                    self.port,
                    ssl=backend.tls,
                    server_hostname=backend.server_name,
                )
        except (OSError, TimeoutError):
            return None
        return connection

    def drop_idle(self) -> None:
        """Close what is unused."""
        for connection in list(self.idle):
            connection.close()


class Pools:
    """All pools of a worker, made on first use."""

    def __init__(
        self, settings: DirectSettings, backends: BackendsFile, wheel: Wheel, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.settings = settings
        self.backends = backends
        self.wheel = wheel
        self.loop = loop
        self.is_closed = False
        self._pools: dict[str, EnginePool] = {}
        backends.on_change = self._refresh

    def of(self, address: str) -> EnginePool:
        """Return the pool of an address."""
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = EnginePool(self, address)
        return pool

    def forget_unused(self) -> None:
        """Keep nothing of an address without connections; one that is asked for again is made anew."""
        for address, pool in list(self._pools.items()):
            if not pool.idle:
                del self._pools[address]

    def _refresh(self) -> None:
        for address, pool in self._pools.items():
            backend = self.backends.of(address)
            if backend.tls is not pool.backend.tls:
                pool.drop_idle()
            pool.take_backend(backend)

    def close(self) -> None:
        """Close what is unused, and everything that becomes so."""
        self.is_closed = True
        for pool in self._pools.values():
            pool.drop_idle()
