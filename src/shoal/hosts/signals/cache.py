"""What the messages of one publisher do to the router: payloads in, router events out.

Owns the ledger of one data-parallel rank of an endpoint.  Which message comes when is `publisher`'s.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from shoal.hosts.signals.counts import KvCounts
from shoal.kernel import InvalidInput
from shoal.pool.kvevents import KvCleared, KvEvent, KvRemoved, KvStored
from shoal.prefix.ledger import Change, Removed, Stored
from shoal.routing.events import BlocksCleared, BlocksRemoved, BlocksStored, Event
from shoal.wire.kvevents import decode

_KINDS: tuple[tuple[type[KvEvent], tuple[str]], ...] = (
    (KvStored, ("stored",)),
    (KvRemoved, ("removed",)),
    (KvCleared, ("cleared",)),
)


class KvLedger(Protocol):
    """Turns an engine's events into changes by our own keys (`prefix.ledger.Ledger`)."""

    def apply(self, events: Iterable[KvEvent]) -> Sequence[Change]:
        """Take events in order."""
        ...


class Cache:
    """The cache of one publisher.  make_ledger: a ledger that knows nothing.  feed: takes router events."""

    __slots__ = (
        "_counts",
        "_endpoint_id",
        "_feed",
        "_is_empty",
        "_ledger",
        "_make_ledger",
        "_messages",
        "_pending",
        "_rank",
    )

    def __init__(
        self,
        endpoint_id: str,
        rank: int,
        make_ledger: Callable[[], KvLedger],
        feed: Callable[[Event], object],
        counts: KvCounts,
    ) -> None:
        self._endpoint_id = endpoint_id
        self._rank = rank
        self._make_ledger = make_ledger
        self._feed = feed
        self._counts = counts
        self._ledger = make_ledger()
        self._is_empty = True
        self._pending: list[KvEvent] = []
        self._messages = 0

    def apply(self, payload: bytes) -> bool:
        """Take one message; the router hears of it with the next `flush`.

        Returns whether it says that the cache was emptied.
        """
        self._messages += 1
        try:
            batch = decode(payload)
        except InvalidInput:
            self._counts.skipped.add(("unreadable-message",))
            return False
        if batch.skipped:
            self._counts.skipped.add(("unreadable-event",), batch.skipped)
        self._pending += batch.events
        return KvCleared in map(type, batch.events)

    def flush(self) -> None:
        """Tell the router what the messages since the last time change in all: together they cost far less."""
        if self._messages:
            self._counts.messages.add(amount=self._messages)
            self._messages = 0
        if self._pending:
            pending, self._pending = self._pending, []
            self._count(pending)
            for change in self._ledger.apply(pending):
                self._tell(change)

    def clear(self) -> None:
        """Forget everything, and have the router forget it."""
        was_empty = self._is_empty
        self.forget()
        if not was_empty:
            self._feed(BlocksCleared(self._endpoint_id, self._rank))

    def forget(self) -> None:
        """Forget everything; the router is told by someone else."""
        self._pending.clear()
        self._ledger = self._make_ledger()
        self._is_empty = True

    def _count(self, events: list[KvEvent]) -> None:
        kinds = list(map(type, events))
        for kind, key in _KINDS:
            if count := kinds.count(kind):
                self._counts.events.add(key, count)

    def _tell(self, change: Change) -> None:
        if isinstance(change, Stored):
            self._is_empty = False
            stored = BlocksStored(self._endpoint_id, change.keys, change.tier, change.block_size_tokens, self._rank)
            self._feed(stored)
        elif isinstance(change, Removed):
            self._feed(BlocksRemoved(self._endpoint_id, change.keys, change.tier, self._rank))
        else:
            self._is_empty = True
            self._feed(BlocksCleared(self._endpoint_id, self._rank))
