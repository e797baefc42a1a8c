"""The data plane of one worker: its listening sockets, its clients, and what all requests share.

Owns opening, draining and closing.  A connection is `clients`', a request `relay`'s.
"""

import asyncio
import contextlib
import secrets
import socket
import ssl
from collections.abc import Mapping

from shoal.hosts.backends import BackendsFile
from shoal.hosts.direct.answerheads import AnswerReader
from shoal.hosts.direct.clients import ClientConnection
from shoal.hosts.direct.heads import HeadReader
from shoal.hosts.direct.pools import Pools
from shoal.hosts.direct.settings import CONTROL_PREFIXES, DirectSettings
from shoal.hosts.direct.turns import Turn
from shoal.hosts.direct.wheel import Wheel
from shoal.hosts.picker import Picker
from shoal.routing.commands import Cut, Evict
from shoal.routing.events import Kept

BACKLOG = 4096
LINGER_S = 2.0
"""While draining, an unused connection is kept this long: its next request may be on the way."""

CRAM_RATIO = 1.5
"""Up to this many budgets of buffered bytes small bodies are let in, so that large ones cannot shut them out."""

# How often silence is looked for, as a share of the time that is too long.
_LOOKS = 4


class Plane:
    """One worker's data plane, on the running loop.

    active: requests at engines.  retrying: those of them that were sent again.  is_tls: whether clients speak TLS.
    """

    def __init__(self, picker: Picker, settings: DirectSettings, backends: BackendsFile) -> None:
        self.loop = asyncio.get_running_loop()
        self.picker = picker
        self.wheel = Wheel(self.loop)
        self.heads = HeadReader(CONTROL_PREFIXES)
        self.answers = AnswerReader()
        self.pools = Pools(settings, backends, self.wheel, self.loop)
        self.turn = Turn(self.loop)
        self.active = self.retrying = 0
        self.is_draining = self.is_tls = False
        self.linger_s = LINGER_S
        self._clients: dict[ClientConnection, None] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._servers: list[asyncio.Server] = []
        # A worker's own prefix and a count are as unique as chance, for a tenth of the cost.
        self._id_prefix = _id_prefix()
        self._ids = 0
        self.configure(settings)
        picker.driver.on_evict = self.evict

    def configure(self, settings: DirectSettings) -> None:
        """Take new settings; requests under way keep what they have begun."""
        self.settings = self.pools.settings = settings
        clocks = settings.clocks
        self._look_s = min(clocks.stream_idle_s, clocks.hold_s) / _LOOKS

    async def listen(self, sockets: list[socket.socket], tls: ssl.SSLContext | None = None) -> None:
        """Accept clients on bound sockets."""
        self.is_tls = tls is not None
        for each in sockets:
            server = await self.loop.create_server(lambda: ClientConnection(self), sock=each, ssl=tls, backlog=BACKLOG)
            self._servers.append(server)

    async def listen_at(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Accept clients at an address; port 0 takes a free one."""
        await self.listen([listening(host, port)], tls)

    @property
    def ports(self) -> list[int]:
        """Where clients connect."""
        return [each.getsockname()[1] for server in self._servers for each in server.sockets]

    @property
    def clients(self) -> int:
        """Open client connections."""
        return len(self._clients)

    def fresh_id(self) -> bytes:
        """Return a request id for a client that sent none, in the form of a UUID."""
        self._ids += 1
        return b"%b%012x" % (self._id_prefix, self._ids)

    def next_look(self, now: float, started_at: float) -> float:
        """When a request that began at `started_at` is looked after next."""
        stream_s = self.settings.clocks.stream_s
        look = now + self._look_s
        return min(look, started_at + stream_s) if stream_s else look

    def may_retry(self) -> bool:
        """Whether one more request may be sent again."""
        settings = self.settings
        return self.retrying < max(settings.min_retries, settings.budget_ratio * self.active)

    def is_crammed(self) -> bool:
        """Whether what clients have sent and not read is so far over the budget that small bodies must wait as well."""
        return self.picker.buffered_bytes > CRAM_RATIO * self.settings.max_buffered_bytes

    # ------------------------------------------------------------------ clients

    def joined(self, client: ClientConnection) -> bool:
        """A client has connected; False when there are too many."""
        if len(self._clients) >= self.settings.max_connections:
            return False
        self._clients[client] = None
        self._is_empty.clear()
        if self.is_draining:
            client.leave(self.linger_s)
        return True

    def left(self, client: ClientConnection) -> None:
        """A client's connection is closed."""
        self._clients.pop(client, None)
        if not self._clients:
            self._is_empty.set()

    def cut(self, commands: Mapping[str, Cut]) -> int:
        """End these requests; returns how many there were."""
        count = 0
        for client in list(self._clients):
            relay = client.relay
            command = commands.get(relay.request_id) if relay is not None else None
            if relay is not None and command is not None:
                relay.abort(command)
                count += 1
        return count

    def evict(self, command: Evict) -> None:
        """Take a request back from its engine, end it, or say that it goes on."""
        for client in self._clients:
            relay = client.relay
            if relay is not None and relay.request_id == command.request_id:
                relay.evict(command)
                return
        self.picker.driver.feed(Kept(command.request_id))

    # ------------------------------------------------------------------ the end

    def drain(self, linger_s: float = LINGER_S) -> None:
        """Accept no more; each connection ends with its next answer, or after `linger_s` unused."""
        self.is_draining = True
        self.linger_s = linger_s
        for server in self._servers:
            server.close()
        for client in list(self._clients):
            client.leave(linger_s)

    async def drained(self) -> None:
        """Wait until no client is left."""
        await self._is_empty.wait()

    async def close(self, grace_s: float = 0.0) -> None:
        """Drain for up to `grace_s`, then cut what is left."""
        self.drain(0.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.drained()
        for client in list(self._clients):
            client.abort()
        await self.drained()
        self.pools.close()
        self.wheel.close()


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket that other processes may share the port of.  Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((host, port))
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def _id_prefix() -> bytes:
    digits = secrets.token_hex(10)
    return f"{digits[:8]}-{digits[8:12]}-4{digits[12:15]}-a{digits[15:18]}-".encode()
