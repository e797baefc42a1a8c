"""Engines as nodes of the cluster: each with its own deadline in the loop, and what it tells the routers.

Owns when an engine's steps end.  What an answer means for its client is the cluster's.
"""

from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from shoal.engine import AggregateEngine, Engine, EngineConfig, Event, Finish, PaceChanged, Refuse, Ticked
from shoal.engine.changes import CacheChanged, Change, Cleared, Removed, Stored
from shoal.engine.commands import Command
from shoal.engine.hosttier import HostTier
from shoal.engine.profiles import TRANSFER_BYTES_PER_S
from shoal.pool import Endpoint, Signals
from shoal.routing import events
from shoal.simulation.handover import Role
from shoal.simulation.loop import Loop, Rank


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of the fleet.  id: as the router knows it.  labels: as in llm-d's endpoint files.

    is_aggregate: whether it is the fast approximation.  has_store: whether it uses the store that engines share.  role:
    with engines that prefill for others.  transfer_bytes_per_s: how fast KV goes to another engine or comes from one.
    """

    id: str
    engine: EngineConfig
    labels: dict[str, str] = {}
    is_aggregate: bool = False
    has_store: bool = False
    role: Role = Role.BOTH
    transfer_bytes_per_s: float = TRANSFER_BYTES_PER_S

    def make(self, store: HostTier | None) -> Engine | AggregateEngine:
        """Return a new engine.  store: what engines share."""
        if self.is_aggregate:
            return AggregateEngine(self.engine)
        return Engine(self.engine, is_streaming=False, store=store if self.has_store else None)


class Node:
    """One engine.  ended: called with each Finish or Refuse.  changed: called with what its cache tells.

    is_up: whether it is there.  is_leaving: whether it gets no more requests, and goes when it has none.
    """

    __slots__ = (
        "_at_rest", "_changed", "_ended", "_engine", "_loop", "_planned_at", "_store", "config", "endpoint",
        "is_leaving", "is_up",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        config: NodeConfig,
        loop: Loop,
        ended: Callable[["Node", Finish | Refuse], None],
        changed: Callable[["Node", list[Change]], None],
        store: HostTier | None = None,
    ) -> None:
        self.config = config
        address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:8000"
        self.endpoint = Endpoint(id=config.id, address=address, engine="shoal", labels=config.labels)
        self.is_up = True
        self.is_leaving = False
        self._loop = loop
        self._ended = ended
        self._changed = changed
        self._store = store
        self._engine = config.make(store)
        self._planned_at = -1.0
        self._at_rest = Signals()

    def feed(self, event: Event) -> None:
        """Give the engine an event now."""
        self._take(self._engine.handle(event, self._loop.now))
        self._plan()

    def restart(self) -> None:
        """Begin anew with an empty cache and without requests."""
        self._engine = self.config.make(self._store)
        self._planned_at = -1.0
        self.is_up = True
        self.is_leaving = False

    def slow_down(self, factor: float) -> None:
        """Make every step take `factor` times as long."""
        self.feed(PaceChanged(slow_factor=factor))

    def signals(self) -> Signals:
        """What its metrics page says: the same object while it has nothing to do."""
        engine, counters = self._engine, self._engine.counters
        is_at_rest = engine.deadline() is None
        if is_at_rest and self._at_rest.prefix_query_tokens == counters.prompt:
            return self._at_rest
        signals = Signals(
            waiting=float(engine.num_waiting),
            running=float(engine.num_running),
            kv_usage_ratio=engine.usage_ratio(self._loop.now),
            num_blocks=engine.num_blocks,
            block_size_tokens=engine.block_size,
            prefix_query_tokens=float(counters.prompt),
            prefix_hit_tokens=float(counters.cached),
        )
        if is_at_rest:
            self._at_rest = signals
        return signals

    def has_begun(self, request_id: str) -> bool:
        """Whether the client of a request has got anything of its answer."""
        return self._engine.has_begun(request_id)

    def held_tokens(self, hashes: tuple[int, ...]) -> int:
        """Return how many tokens of a prompt with these blocks are in its cache, those of tiers below not counted."""
        return self._engine.held_tokens(hashes)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._engine.block_size

    def _plan(self) -> None:
        """Have the end of the step in progress noticed when it comes."""
        deadline = self._engine.deadline()
        if deadline is not None and deadline != self._planned_at:
            self._planned_at = deadline
            self._loop.at(max(deadline, self._loop.now), Rank.ENGINE, self._step, self._engine, deadline)

    def _step(self, engine: Engine | AggregateEngine, deadline: float) -> None:
        if engine is not self._engine or deadline != self._planned_at or not self.is_up:
            return
        self._planned_at = -1.0
        self._take(engine.handle(Ticked(), self._loop.now))
        self._plan()

    def _take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Finish() | Refuse():
                    self._ended(self, command)
                case CacheChanged():
                    self._changed(self, command.changes)


def router_events(node: Node, changes: list[Change]) -> Iterator[events.Event]:
    """Return what a picker makes of the KV events of a node: the hashes of the model are its keys."""
    name = node.config.id
    for change in changes:
        match change:
            case Stored():
                keys = np.array(change.hashes, "<u8").tobytes()
                yield events.BlocksStored(name, keys, change.tier, node.block_size)
            case Removed():
                yield events.BlocksRemoved(name, np.array([change.block_hash], "<u8").tobytes(), change.tier)
            case Cleared():
                yield events.BlocksCleared(name)
