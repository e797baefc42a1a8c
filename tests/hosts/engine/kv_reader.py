"""Reads KV events of a running engine, and the messages of real ones, for the tests of this folder."""

import struct
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from shoal.engine import Engine as Model
from shoal.hosts.engine import EngineServer, EngineServerConfig
from shoal.hosts.engine.kvevents import KvEvents
from shoal.pool.kvevents import KvCleared, KvEvent, KvStored, Tier
from tests.hosts.engine.engine_http import Engine

GOLDEN = (Path(__file__).parent / "golden", Path(__file__).parents[2] / "wire/golden")
U64 = 2**64 - 1


class Message(NamedTuple):
    """One message of a PUB socket or one reply of a replay, without the client's frames."""

    topic: bytes | None
    number: int
    payload: bytes


class Believed:
    """What a reader of all events believes that the engine holds."""

    def __init__(self) -> None:
        self.held: dict[Tier, set[int]] = {Tier.GPU: set(), Tier.CPU: set()}

    def apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            if isinstance(event, KvCleared):
                self.held = {Tier.GPU: set(), Tier.CPU: set()}
            elif isinstance(event, KvStored):
                assert not self.held[event.tier] & set(event.hashes), "stored twice"
                self.held[event.tier].update(event.hashes)
            else:
                assert self.held[event.tier] >= set(event.hashes), "removed what was not there"
                self.held[event.tier].difference_update(event.hashes)


def events_on(**changes: Any) -> KvEvents:
    """Events and replay on free ports."""
    fields: dict[str, Any] = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
    return KvEvents(**(fields | changes))


@asynccontextmanager
async def publishing(config: EngineServerConfig) -> AsyncIterator[tuple[Engine, EngineServer]]:
    """Run a server on a free port; gives a client of it and the server itself."""
    server = EngineServer()
    port = await server.start(config)
    try:
        async with aiohttp.ClientSession() as session:
            yield Engine(port, session), server
    finally:
        await server.stop()


def model_of(server: EngineServer) -> Model:
    """The model inside a server."""
    assert server._context is not None
    return server._context.ranks.all[0].engine


def sources_of(server: EngineServer, rank: int = 0) -> KvEvents:
    """Where a rank of a server publishes."""
    assert server._context is not None
    publisher = server._context.ranks.all[rank].publisher
    assert publisher is not None
    return publisher.config


async def replay(server: EngineServer, start: int = 0, request: list[bytes] | None = None) -> list[Message]:
    """Ask for a replay and return its messages, the end mark left out."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.IPV6, 1)
        dealer.connect(sources_of(server).replay_endpoint)
        await dealer.send_multipart(request or [b"", start.to_bytes(8, "big")])
        out = []
        while (message := _message((await dealer.recv_multipart())[1:])).number != U64:
            out.append(message)
        assert message.payload == b""
        return out
    finally:
        dealer.close(linger=0)
        context.term()


@asynccontextmanager
async def subscribed(source: EngineServer | str, topic: bytes = b"") -> AsyncIterator[zmq.asyncio.Socket]:
    """A SUB socket to a server or an address; the publisher may not know it yet."""
    endpoint = source if isinstance(source, str) else sources_of(source).endpoint
    context = zmq.asyncio.Context()
    sub = context.socket(zmq.SUB)
    try:
        sub.setsockopt(zmq.SUBSCRIBE, topic)
        sub.connect(endpoint)
        yield sub
    finally:
        sub.close(linger=0)
        context.term()


async def receive(sub: zmq.asyncio.Socket) -> Message:
    """The next message of the live stream."""
    return _message(await sub.recv_multipart())


def real(name: str) -> Iterator[dict[str, Any] | list[Any]]:
    """The events of a real engine as they stand on the wire."""
    data = next(path for path in (folder / f"{name}.bin" for folder in GOLDEN) if path.exists()).read_bytes()
    at = 0
    while at < len(data):
        (count,) = struct.unpack_from(">I", data, at)
        at += 4
        frames = []
        for _ in range(count):
            (size,) = struct.unpack_from(">I", data, at)
            frames.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        yield from msgspec.msgpack.decode(frames[2])[1]


def _message(frames: list[bytes]) -> Message:
    topic = frames[0] if len(frames) == 3 else None
    return Message(topic, int.from_bytes(frames[-2], "big"), frames[-1])
