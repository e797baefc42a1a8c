"""What the messages of one publisher do to the router: payloads in, router events out.

Owns the ledger of one data-parallel rank of an endpoint.  Which message comes when is `publisher`'s.
"""

from collections.abc import Callable

from shoal.hosts.signals.counts import KvCounts
from shoal.pool.kvevents import KvCleared, KvEvent, KvRemoved
from shoal.prefix.ledger import Change, Ledger, LedgerGauges, Removed, Stored
from shoal.routing.events import BlocksCleared, BlocksRemoved, BlocksStored, Event
from shoal.wire.kvevents import decode_all

_CLEARED = b"AllBlocksCleared"
_STORED = ("stored",)
_KINDS: tuple[tuple[type[KvEvent], tuple[str]], ...] = ((KvRemoved, ("removed",)), (KvCleared, ("cleared",)))


class Cache:
    """The cache of one publisher.  make_ledger: a ledger that knows nothing.  feed: takes router events."""

    __slots__ = (
        "_counts",
        "_endpoint_id",
        "_feed",
        "_is_empty",
        "_ledger",
        "_make_ledger",
        "_pending",
        "_rank",
    )

    def __init__(
        self,
        endpoint_id: str,
        rank: int,
        make_ledger: Callable[[], Ledger],
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
        self._pending: list[bytes] = []

    def apply(self, payload: bytes) -> bool:
        """Take one message; it is read, and the router hears of it, with the next `flush`.

        Returns whether it says that the cache was emptied.
        """
        self._pending.append(payload)
        return _CLEARED in payload and KvCleared in map(type, decode_all([payload]).events)

    def flush(self) -> None:
        """Tell the router what the messages since the last time change in all: together they cost far less."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        self._counts.messages.add(amount=len(pending))
        read = decode_all(pending)
        for reason, count in (("unreadable-message", read.unreadable), ("unreadable-event", read.skipped)):
            if count:
                self._counts.skipped.add((reason,), count)
        if read.events:
            self._count(read.events)
            for change in self._ledger.apply(read.events):
                self._tell(change)

    def gauges(self) -> LedgerGauges:
        """Return the size of what is known, and what was left out of it since it was empty."""
        return self._ledger.gauges()

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
        others = len(kinds)
        for kind, key in _KINDS:
            count = kinds.count(kind)
            others -= count
            if count:
                self._counts.events.add(key, count)
        if others:
            self._counts.events.add(_STORED, others)

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
