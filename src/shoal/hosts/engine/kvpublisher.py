"""Sends KV events: a PUB socket for the live stream, a ROUTER socket for those who missed some.

Owns sequence numbers, frames, the replay buffer and the sockets.  Sending never waits: libzmq's own thread does the
I/O, and what a slow subscriber does not take is dropped for it past `hwm`.  What a batch says is `kvforms`'.
"""

import asyncio
import time
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from shoal.engine.changes import Change
from shoal.hosts.engine.faults import FaultBox
from shoal.hosts.engine.kvevents import KvEvents
from shoal.hosts.engine.kvforms import KvEncoder
from shoal.kernel import ConfigError

_END = b"\xff" * 8
_SLICE = 64
_STALL_POLL_S = 0.02
_MAX_REQUEST_BYTES = 1024
_SOURCE = "--kv-events-config"


class _Batch(NamedTuple):
    number: int
    payload: bytes


class KvPublisher:
    """The publisher of one engine, on the running loop.

    has_topic: whether replies to a replay carry the topic, as since vLLM 0.26.  host: where the engine listens; a
    publisher without an address of its own binds there.  Raises ConfigError when an address cannot be had.
    """

    __slots__ = (
        "_batches",
        "_box",
        "_config",
        "_context",
        "_encoder",
        "_has_topic",
        "_next",
        "_pub",
        "_replay",
        "_sockets",
        "_topic",
        "config",
    )

    def __init__(self, config: KvEvents, encoder: KvEncoder, box: FaultBox, host: str, *, has_topic: bool) -> None:
        self._encoder = encoder
        self._box = box
        self._has_topic = has_topic
        self._topic = config.topic.encode()
        self._batches: deque[_Batch] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._context = zmq.Context()
        self._replay: asyncio.Task[None] | None = None
        self._pub = self._context.socket(zmq.PUB)
        self._sockets: list[zmq.Socket[Any]] = [self._pub]
        try:
            self._pub.setsockopt(zmq.SNDHWM, config.hwm)
            endpoint = _open(self._pub, config.endpoint, host, is_binding=False)
            replay_endpoint = None
            if config.replay_endpoint:
                router = zmq.asyncio.Socket(self._context, zmq.ROUTER)
                self._sockets.append(router)
                router.setsockopt(zmq.SNDHWM, 2 * (config.buffer_steps + 1))
                router.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
                replay_endpoint = _open(router, config.replay_endpoint, host, is_binding=True)
                self._replay = asyncio.get_running_loop().create_task(self._serve(router))
        except ConfigError:
            self._close()
            raise
        self.config = msgspec.structs.replace(
            config, enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=replay_endpoint
        )

    @property
    def num_batches(self) -> int:
        """Batches so far: the sequence number of the next one."""
        return self._next

    def publish(self, changes: list[Change]) -> None:
        """Send one batch, if the form has words for it."""
        payload = self._encoder.encode(changes, time.time())
        if payload is None:
            return
        batch = _Batch(self._next, payload)
        self._next += 1
        self._batches.append(batch)
        faults = self._box.faults
        if faults.kv_drop_batches:
            self._box.put(msgspec.structs.replace(faults, kv_drop_batches=faults.kv_drop_batches - 1))
            return
        with suppress(zmq.Again):
            self._pub.send_multipart([self._topic, batch.number.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    async def stop(self) -> None:
        """Close the sockets; what was not sent is lost."""
        if self._replay is not None:
            self._replay.cancel()
            with suppress(asyncio.CancelledError):
                await self._replay
        self._close()

    def _close(self) -> None:
        for sock in self._sockets:
            sock.close(linger=0)
        self._context.term()

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        """Answer requests one after the other; one that is not `[empty, 8 bytes]` gets nothing, as in vLLM."""
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            while self._box.faults.is_kv_replay_stalled:
                await asyncio.sleep(_STALL_POLL_S)
            await self._answer(router, frames[0], int.from_bytes(frames[2], "big"))

    async def _answer(self, router: zmq.asyncio.Socket, client: bytes, start: int) -> None:
        """Send the buffered batches from `start` on, and the end mark."""
        wanted = [batch for batch in self._batches if batch.number >= start]
        for position, batch in enumerate(wanted):
            await router.send_multipart(self._reply(client, batch.number.to_bytes(8, "big"), batch.payload))
            if position % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
        await router.send_multipart(self._reply(client, _END, b""))

    def _reply(self, client: bytes, number: bytes, payload: bytes) -> list[bytes]:
        topic = self._topic if number != _END else b""
        return [client, b"", *([topic] if self._has_topic else []), number, payload]


def _open(sock: zmq.Socket[Any], endpoint: str, host: str, *, is_binding: bool) -> str:
    """Bind or connect a socket; returns the address with a port that was chosen filled in."""
    is_free = endpoint.startswith("tcp://") and endpoint.endswith(":0")
    wanted = endpoint.replace("*", _interface(host), 1) if is_free else endpoint
    is_binding = is_binding or is_free or "*" in wanted or "::" in wanted or wanted.startswith(("ipc://", "inproc://"))
    sock.setsockopt(zmq.IPV6, int("::" in wanted))
    try:
        if is_binding:
            sock.bind(wanted)
        else:
            sock.connect(wanted)
    except zmq.ZMQError as error:
        reason = "is already taken" if error.errno == zmq.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise ConfigError(f"{wanted} {reason}", source=_SOURCE) from None
    if not is_free:
        return endpoint
    port = sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"{wanted.rpartition(':')[0]}:{port}"


def _interface(host: str) -> str:
    """Return the interface that is meant by the host an engine listens on."""
    if host in ("", "0.0.0.0", "::"):
        return "*"
    if host == "localhost":
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
