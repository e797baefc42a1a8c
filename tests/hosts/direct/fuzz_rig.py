"""A data plane in one process without sockets, clocks or tasks: thousands of conversations in seconds.

Owns the pretended loop and transports.  h11 reads what engines and clients get (`fuzz_readers`).  Which bytes are said,
and in what order things happen, is for the tests.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import h11
import msgspec
from hypothesis import Phase, settings

from shoal.hosts.backends import BackendsFile
from shoal.hosts.direct.clients import ClientConnection
from shoal.hosts.direct.plane import Plane
from shoal.hosts.direct.pools import EngineConnection, EnginePool, Pools
from shoal.hosts.direct.settings import settings_of
from shoal.hosts.direct.turns import Turn
from shoal.hosts.driver import Driver
from shoal.hosts.picker import Picker
from shoal.kernel import Chance
from shoal.measures import Fold
from shoal.pool import Endpoint, EndpointState, ServedModel
from shoal.prefix import BlockHasher
from shoal.routing import Account, Router
from shoal.routing.config import load
from shoal.routing.events import EndpointChanged, EndpointJoined, ModelsSeen
from tests.hosts.direct.fuzz_readers import MAX_HEAD_BYTES, Asked

EXAMPLES = os.environ.get("SHOAL_FUZZ_EXAMPLES")
_SOON_S = 0.05  # longer timers are the wheel's and the router's
_PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
# The default index is 16 ms to make.
_HEAD = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nindex: {budget_bytes: 1Mi}\n"


def examples(count: int) -> settings:
    """How often a law is tried: `count` times and always the same, or SHOAL_FUZZ_EXAMPLES times and always anew."""
    if EXAMPLES:
        return settings(max_examples=int(EXAMPLES), deadline=None, phases=_PHASES)
    return settings(max_examples=count, derandomize=True, database=None, deadline=None, phases=_PHASES)


class Loop:
    """What the plane asks of an event loop; `run` carries out what is due."""

    def __init__(self) -> None:
        self._ready: deque[tuple[asyncio.Handle, Callable[..., object], tuple[object, ...]]] = deque()

    def call_soon(self, callback: Callable[..., object], *args: object) -> asyncio.Handle:
        """Put behind what is due."""
        handle = asyncio.Handle(callback, args, self)  # type: ignore[arg-type]
        self._ready.append((handle, callback, args))
        return handle

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: object) -> asyncio.Handle:
        """Short pauses pass at once, long ones never."""
        if delay_s < _SOON_S:
            return self.call_soon(callback, *args)
        return asyncio.Handle(callback, args, self)  # type: ignore[arg-type]

    def get_debug(self) -> bool:
        """As the handles ask."""
        return False

    def step(self) -> bool:
        """Carry out one thing; False when there is none.  What it raises is raised here."""
        if not self._ready:
            return False
        handle, callback, args = self._ready.popleft()
        if not handle.cancelled():
            callback(*args)
        return True

    def run(self) -> None:
        """Carry out everything."""
        for _ in range(100_000):
            if not self.step():
                return
        raise AssertionError("the loop never comes to rest")


class Transport:
    """One connection as its protocol sees it, and, with `peer_`, as the other side does.

    heard: what was sent, as far as the peer has read it.  is_lost: the connection is over.  is_reset: its end is a
    reset.  has_ended: the peer saw an end in order.
    """

    def __init__(self, loop: Loop, protocol: Any, on_heard: Callable[[bytes], None] | None = None) -> None:
        self._loop = loop
        self._protocol = protocol
        self._on_heard = on_heard
        self._unread = b""
        self._high = 64 * 1024
        self._is_slow = self._is_over_high = self._is_closing = self._has_eof = self._is_peer_done = False
        self._is_reading = True
        self._waiting: deque[bytes] = deque()
        self.heard = bytearray()
        self.is_lost = self.is_reset = False
        protocol.connection_made(self)

    @property
    def has_ended(self) -> bool:
        return self.is_lost and not self.is_reset

    # What the plane calls.

    def write(self, data: bytes) -> None:
        assert type(data) is bytes
        assert not self._has_eof, "bytes behind the end"
        if self._is_closing:
            return
        if not self._is_slow:
            self._hear(data)
            return
        self._unread += data
        if len(self._unread) > self._high and not self._is_over_high:
            self._is_over_high = True
            self._protocol.pause_writing()

    def writelines(self, pieces: tuple[bytes, ...]) -> None:
        self.write(b"".join(pieces))

    def write_eof(self) -> None:
        self._has_eof = True

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self._unread:
                self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self._unread = b""
        self._is_closing = True
        self._loop.call_soon(self._lose, None)

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        if not self._is_reading and not self._is_closing:
            self._is_reading = True
            self._loop.call_soon(self._deliver)

    def get_write_buffer_size(self) -> int:
        return len(self._unread)

    def set_write_buffer_limits(self, high: int) -> None:
        self._high = high

    def get_extra_info(self, name: str) -> Any:
        return ("192.0.2.1", 5000) if name == "peername" else self if name == "socket" else None

    def setsockopt(self, level: int, name: int, _: bytes) -> None:
        assert (level, name) == (socket.SOL_SOCKET, socket.SO_LINGER)
        self.is_reset = True

    # What the peer does.

    def peer_says(self, data: bytes) -> None:
        """Send to the plane."""
        if data:
            self._waiting.append(data)
            self._deliver()

    def peer_ends(self) -> None:
        """Close in order."""
        self._is_peer_done = True
        self._deliver()

    def peer_resets(self) -> None:
        """Break."""
        self._waiting.clear()
        self._is_closing = True
        self._lose(ConnectionResetError())

    def peer_stops_reading(self) -> None:
        """What is sent piles up."""
        self._is_slow = True

    def peer_reads(self) -> None:
        """Read all that has piled up, and what comes."""
        self._is_slow = False
        data, self._unread = self._unread, b""
        if data and not self.is_lost:
            self._hear(data)
        if self._is_over_high:
            self._is_over_high = False
            if not self.is_lost:
                self._protocol.resume_writing()
        if self._is_closing:
            self._loop.call_soon(self._lose, None)

    def _deliver(self) -> None:
        while self._waiting and self._is_reading and not self._is_closing:
            self._protocol.data_received(self._waiting.popleft())
        if self._is_peer_done and self._is_reading and not self._waiting and not self._protocol.eof_received():
            self.close()

    def _hear(self, data: bytes) -> None:
        self.heard += data
        if self._on_heard is not None:
            self._on_heard(data)

    def _lose(self, error: Exception | None) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._protocol.connection_lost(error)


class Engine:
    """The far end of one connection to an engine: h11 reads, `world.answer` says what comes back."""

    def __init__(self, world: "World", protocol: EngineConnection) -> None:
        self._world = world
        self._reader = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._request: h11.Request | None = None
        self._body = b""
        self.transport = Transport(world.loop, protocol, self._hears)

    def _hears(self, data: bytes) -> None:
        self._reader.receive_data(data)
        while True:
            event = self._reader.next_event()
            if isinstance(event, h11.Request):
                assert self._request is None, "a request before the answer to the last one"
                self._request, self._body = event, b""
            elif isinstance(event, h11.Data):
                self._body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                request = self._request
                assert request is not None
                self._request = None
                asked = Asked(bytes(request.method), bytes(request.target), tuple(request.headers), self._body)
                self._world.asked.append(asked)
                self._reader = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
                self._world.loop.call_soon(self._world.answer, self.transport, asked)
            else:
                assert event is h11.NEED_DATA, event
                return


class World:
    """A plane and everything around it.

    asked: what engines got, in order.  answer: called with an engine's connection and what it got.  dials: whether the
    next connections can be opened; all can when it is empty.
    """

    def __init__(self, engines: int, config: str, **plane_settings: Any) -> None:
        self.loop = Loop()
        self.asked: list[Asked] = []
        self.accounts: list[Account] = []
        self.answer: Callable[[Transport, Asked], None] = says_ok
        self.dials: deque[bool] = deque()
        self.engines: list[Engine] = []
        self.clients: list[Transport] = []
        loaded = load(_HEAD + config, "fuzz")
        driver = Driver(Router(loaded, Chance(1)), Fold(), on_account=self.accounts.append)
        self.picker = Picker(driver, loaded, BlockHasher(7), "0", "run")
        chosen = msgspec.structs.replace(settings_of(loaded.pool), **plane_settings)
        self.plane = Plane(self.picker, chosen, BackendsFile(None))
        self.plane.pools = _Pools(self)
        for number in range(engines):
            address = f"192.0.2.{number + 10}:8000"
            driver.feed(EndpointJoined(Endpoint(id=address, address=address)))
            driver.feed(ModelsSeen(address, (ServedModel(id="m"),)))
            driver.feed(EndpointChanged(address, EndpointState.READY))

    def client(self) -> Transport:
        """Connect."""
        self.clients.append(Transport(self.loop, ClientConnection(self.plane)))
        return self.clients[-1]

    def pass_time(self, seconds: float) -> None:
        """Let the clients' clocks run."""
        self.plane.wheel.now += seconds
        for client in list(self.plane._clients):
            if client.due <= self.plane.wheel.now:
                client.on_due(self.plane.wheel.now)
        self.loop.run()

    def check_at_rest(self) -> None:
        """Nothing is held, booked or counted for anybody once all have left."""
        self.loop.run()
        for client in self.clients:
            client.peer_resets()
        self.loop.run()
        plane, picker = self.plane, self.picker
        assert (picker.buffered_bytes, plane.active, plane.retrying, plane.clients) == (0, 0, 0, 0)
        assert picker.driver.router.status().inflight == 0
        idle = {id(each.transport) for pool in plane.pools._pools.values() for each in pool.idle}
        for engine in self.engines:
            assert engine.transport.is_closing() or id(engine.transport) in idle, "a connection that nobody owns"


class _Pool(EnginePool):
    def dial(self, relay: Any) -> None:
        world = self._pools.world  # type: ignore[attr-defined]
        relay.dialling = world.loop.call_soon(self._arrive, world, relay)

    def _arrive(self, world: World, relay: Any) -> None:
        relay.dialling = None
        if world.dials and not world.dials.popleft():
            relay.unreachable()
            return
        connection = EngineConnection(self)
        world.engines.append(Engine(world, connection))
        relay.connected(connection)


class _Pools(Pools):
    def __init__(self, world: World) -> None:
        plane = world.plane
        super().__init__(plane.settings, BackendsFile(None), plane.wheel, world.loop)  # type: ignore[arg-type]
        self.world = world

    def of(self, address: str) -> EnginePool:
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = _Pool(self, address)
        return pool


def says_ok(transport: Transport, asked: Asked) -> None:
    """Answer with the length of the body, in a head that depends on nothing."""
    body = b'{"bytes": %d}' % len(asked.body)
    if asked.method == b"HEAD":
        body = b""
    transport.peer_says(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
    transport.peer_says(b"content-length: %d\r\n\r\n%b" % (len(body), body))


@contextmanager
def world(engines: int = 1, config: str = "", **plane_settings: Any) -> Iterator[World]:
    """A world, which must be at rest at its end."""
    made: list[World] = []
    with patch.object(asyncio, "get_running_loop", lambda: made[0].loop if made else _FIRST):
        made.append(World(engines, config, **plane_settings))
        made[0].plane.loop = made[0].loop  # type: ignore[assignment]
        made[0].plane.turn = Turn(made[0].loop)  # type: ignore[arg-type]
        yield made[0]
        made[0].check_at_rest()


_FIRST = Loop()


def cut(data: bytes, random: Random) -> list[bytes]:
    """Cut at chance: whole, into a few pieces, or into very small ones."""
    way = random.random()
    if way < 0.2 or len(data) < 2:
        return [data]
    if way < 0.4 and len(data) < 3000:
        return [data[at : at + 1] for at in range(len(data))]
    places = sorted({random.randrange(1, len(data)) for _ in range(random.randrange(1, 8))})
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
