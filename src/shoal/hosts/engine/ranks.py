"""The data-parallel ranks behind one server: each an engine of its own, with its own cache and its own KV events.

Owns which rank serves a generation, and that an order reaches all of them.  How one runs is `driver`'s.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from shoal.engine import Engine, Submitted
from shoal.engine.events import PauseMode
from shoal.hosts.engine.driver import EngineDriver
from shoal.hosts.engine.errors import bad_request
from shoal.hosts.engine.generation import Sink
from shoal.hosts.engine.kvpublisher import KvPublisher
from shoal.hosts.engine.meter import Meter

_WAITING_WEIGHT = 4


class Rank(NamedTuple):
    """One rank.  labels: of its vLLM series, in text format.  publisher: of its KV events, None for none."""

    engine: Engine
    meter: Meter
    labels: str
    driver: EngineDriver
    publisher: KvPublisher | None

    @property
    def load(self) -> int:
        """What vLLM's balancer counts: those that run, and four times those that wait."""
        return _WAITING_WEIGHT * self.engine.num_waiting + self.engine.num_running


class Ranks:
    """All ranks, in order; at least one once the server is made."""

    __slots__ = ("all",)

    def __init__(self) -> None:
        self.all: tuple[Rank, ...] = ()

    def add(self, rank: Rank) -> None:
        """Add the next one."""
        self.all += (rank,)

    def choose(self, asked: int | None = None) -> Rank:
        """Return the rank that a client asked for, else the one with the least to do.

        Raises ApiError 400 for a rank that there is not.
        """
        if asked is None:
            return min(self.all, key=lambda rank: rank.load)
        if not 0 <= asked < len(self.all):
            raise bad_request(f"data_parallel_rank {asked} is out of range [0, {len(self.all)}).")
        return self.all[asked]

    def submit(self, event: Submitted, sink: Sink, asked: int | None = None) -> None:
        """Start a generation; see `EngineDriver.submit` and `choose`."""
        self.choose(asked).driver.submit(event, sink)

    def abort(self, request_id: str) -> None:
        """End a generation whose client left."""
        for rank in self.all:
            rank.driver.abort(request_id)

    def cancel(self, is_meant: Callable[[str], bool]) -> None:
        """See `EngineDriver.cancel`."""
        for rank in self.all:
            rank.driver.cancel(is_meant)

    async def reset_cache(self, *, is_forced: bool = False, is_all: bool = False) -> bool:
        """Empty every prefix cache, and say whether that was done with all of them."""
        orders = [rank.driver.reset_cache(is_forced=is_forced, is_all=is_all) for rank in self.all]
        return all(await asyncio.gather(*orders))

    async def pause(self, mode: PauseMode, *, is_clearing: bool) -> None:
        """See `EngineDriver.pause`."""
        await asyncio.gather(*[rank.driver.pause(mode, is_clearing=is_clearing) for rank in self.all])

    def resume(self) -> None:
        """End a pause."""
        for rank in self.all:
            rank.driver.resume()

    def change_pace(self, slow_factor: float) -> None:
        """Make steps take `slow_factor` times their model time."""
        for rank in self.all:
            rank.driver.change_pace(slow_factor)

    async def close(self) -> None:
        """Stop ticking and publishing."""
        for rank in self.all:
            rank.driver.close()
            if rank.publisher is not None:
                await rank.publisher.stop()
