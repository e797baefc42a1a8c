"""A scripted publisher of KV events with real sockets, a ledger and a router that can be looked into."""

import asyncio
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec
import zmq

from shoal.hosts.signals import KvSettings, KvSubscriber
from shoal.pool import Endpoint, ServedModel
from shoal.pool.kvevents import KvEvent, KvRemoved, KvSource, KvState, KvStored
from shoal.prefix.ledger import Change, Cleared, Ledger, Removed, Stored
from shoal.prefix.tokens import TokenHasher
from shoal.routing.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EndpointJoined,
    EndpointLeft,
    Event,
    KvStreamChanged,
    ModelsSeen,
)

QUICK = KvSettings(
    settle_s=0.02,
    reconnect_s=0.02,
    reconnect_most_s=0.1,
    replay_idle_s=0.3,
    retry_s=0.02,
    cool_down_s=0.4,
    warm_up_s=60.0,
    check_s=0.2,
)
END = b"\xff" * 8


def stored(*hashes: int, **fields: Any) -> dict[str, Any]:
    """A BlockStored without tokens."""
    return {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": None, "token_ids": [],
            "block_size": 16, **fields}  # fmt: skip


def removed(*hashes: int) -> dict[str, Any]:
    """A BlockRemoved."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}


def payload(*events: Any, ts: float = 1.0) -> bytes:
    """A batch as vLLM writes it."""
    return msgspec.msgpack.encode([ts, list(events), 0])


class ScriptedPublisher:
    """PUB and ROUTER as vLLM has them, to be used with `with` or closed.

    buffer: batches kept for replays.  send_messages: live ones that wait, past which they are
    dropped.  has_topic_frame: as vLLM from 0.26.  reply_pause_s: before each reply.
    is_mute: the ROUTER never answers.  ends: whether replays end with the marker.
    """

    def __init__(
        self, port: int = 0, replay_port: int = 0, *, buffer: int = 10_000, send_messages: int = 100_000
    ) -> None:
        self.context = zmq.Context[Any]()
        self._publisher = self.context.socket(zmq.PUB)
        self._publisher.set(zmq.LINGER, 0)
        self._publisher.set(zmq.SNDHWM, send_messages)
        self._router = self.context.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 0)
        self._router.set(zmq.SNDHWM, 100_000)
        self.port = _bind(self._publisher, port)
        self.replay_port = _bind(self._router, replay_port)
        self.topic = b"kv@m"
        self.sequence = -1
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self.has_topic_frame = True
        self.is_mute = False
        self.ends = True
        self.reply_pause_s = 0.0
        self.asked: list[int] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def __enter__(self) -> "ScriptedPublisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def source(self, *, has_replay: bool = True, rank: int = 0) -> KvSource:
        return KvSource(
            endpoint=f"tcp://127.0.0.1:{self.port}",
            replay_endpoint=f"tcp://127.0.0.1:{self.replay_port}" if has_replay else "",
            topic=self.topic.decode(),
            rank=rank,
        )

    def publish(self, *events: Any, is_lost: bool = False) -> None:
        """Publish one batch.  is_lost: nobody gets it, and only a replay brings it."""
        self.publish_raw(payload(*events, ts=time.time()), is_lost=is_lost)

    def send(self, *frames: bytes) -> None:
        """Send frames as they are."""
        self._publisher.send_multipart(frames)

    def publish_raw(self, data: bytes, *, is_lost: bool = False) -> None:
        with self._lock:
            self.sequence += 1
            self.kept.append((self.sequence, data))
        if not is_lost:
            self._publisher.send_multipart([self.topic, struct.pack(">q", self.sequence), data])

    def close(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self._publisher.close()
        self._router.close()
        self.context.term()

    def _answer(self) -> None:
        while not self._stop.is_set():
            if not self._router.poll(10):
                continue
            peer, _, start = self._router.recv_multipart()
            number = int.from_bytes(start, "big")
            self.asked.append(number)
            if self.is_mute:
                continue
            with self._lock:
                kept = [each for each in self.kept if each[0] >= number]
            for sequence, data in kept:
                if self._stop.is_set():
                    return
                if self.reply_pause_s:
                    time.sleep(self.reply_pause_s)
                self._reply(peer, struct.pack(">q", sequence), data)
            if self.ends:
                self._reply(peer, END, b"")

    def _reply(self, peer: bytes, number: bytes, data: bytes) -> None:
        topic = [self.topic if data else b""] if self.has_topic_frame else []
        self._router.send_multipart([peer, b"", *topic, number, data])


def _bind(socket: "zmq.Socket[Any]", port: int) -> int:
    # The port of a publisher that has just ended may take a moment to be free.
    for _ in range(100):
        try:
            socket.bind(f"tcp://127.0.0.1:{port or '*'}")
            break
        except zmq.ZMQError:
            time.sleep(0.02)
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":")[-1].rstrip("\0"))


class PlainLedger(Ledger):
    """Takes the engine's hashes for our keys.  faults: blocks that it fails on."""

    def __init__(self, model: str = "", faults: Collection[int] = ()) -> None:
        super().__init__(TokenHasher(1), model)
        self._faults = faults

    def apply(self, events: Iterable[KvEvent]) -> list[Change]:
        return [self._change(event) for event in events]

    def _change(self, event: KvEvent) -> Change:
        if isinstance(event, KvStored):
            if not set(event.hashes).isdisjoint(self._faults):
                raise RuntimeError("a fault of the ledger")
            return Stored(_keys(event.hashes), event.tier, event.block_size)
        if isinstance(event, KvRemoved):
            return Removed(_keys(event.hashes), event.tier)
        return Cleared()


def _keys(hashes: list[int]) -> bytes:
    return b"".join(each.to_bytes(8, "little") for each in hashes)


class SeenRouter:
    """What a router would know: blocks by endpoint and rank, and the state of each stream with its history."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int], set[int]] = {}
        self.history: dict[str, list[KvState]] = {}
        self.cleared = 0
        self.events: list[Event] = []

    def feed(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case BlocksStored():
                self.held(event.endpoint_id, event.rank).update(_hashes(event.keys))
            case BlocksRemoved():
                self.held(event.endpoint_id, event.rank).difference_update(_hashes(event.keys))
            case BlocksCleared():
                self.cleared += 1
                for key in self.blocks:
                    if key[0] == event.endpoint_id and event.rank in (None, key[1]):
                        self.blocks[key] = set()
            case KvStreamChanged():
                self.history.setdefault(event.endpoint_id, []).append(event.state)

    def held(self, endpoint_id: str = "e", rank: int = 0) -> set[int]:
        return self.blocks.setdefault((endpoint_id, rank), set())

    def state(self, endpoint_id: str = "e") -> KvState:
        return (self.history.get(endpoint_id) or [KvState.NONE])[-1]


def _hashes(keys: bytes) -> set[int]:
    return {int.from_bytes(keys[at : at + 8], "little") for at in range(0, len(keys), 8)}


class Following:
    """A subscriber with its router."""

    def __init__(self, settings: KvSettings = QUICK) -> None:
        self.router = SeenRouter()
        self.models: list[str] = []
        self.faults: set[int] = set()
        self.subscriber = KvSubscriber(self.router.feed, self._ledger, settings)
        self.subscriber.configure(lambda endpoint: endpoint.kv_sources)

    def join(self, *sources: KvSource, endpoint_id: str = "e") -> None:
        endpoint = Endpoint(id=endpoint_id, address="127.0.0.1:1", kv_sources=sources)
        self.subscriber.observe(EndpointJoined(endpoint))
        self.subscriber.observe(ModelsSeen(endpoint_id, (ServedModel(id="m"),)))

    def leave(self, endpoint_id: str = "e") -> None:
        self.subscriber.observe(EndpointLeft(endpoint_id))

    async def fresh(self, endpoint_id: str = "e") -> None:
        await self.until(lambda: self.router.state(endpoint_id) is KvState.FRESH)

    async def until(self, holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait until `holds`; fails after a generous time."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"held={self.router.blocks} states={self.router.history}"
            await asyncio.sleep(0.005)

    def count(self, name: str, **labels: str) -> float:
        """One counter or gauge, summed over the labels that are not given."""
        return sum(
            sample.value
            for family in self.subscriber.families()
            if family.name == name
            for sample in family.samples
            if labels.items() <= sample.labels.items()
        )

    def _ledger(self, model: str) -> PlainLedger:
        self.models.append(model)
        return PlainLedger(model, self.faults)

    def __enter__(self) -> "Following":
        return self

    def __exit__(self, *_: object) -> None:
        self.subscriber.close()
