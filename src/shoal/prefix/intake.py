"""Which of a publisher's KV events count, and their numbers together for a few array operations.

Owns the choice of the group that is followed and the checks of what an event says; what it changes is `ledger`'s.
"""

from array import array
from typing import NamedTuple

from shoal.pool.kvevents import KvEvent, KvRemoved, KvStored
from shoal.prefix.tokens import MAX_BLOCK_TOKENS

DENSE_KINDS = frozenset(("", "full_attention", "mla_attention", "sink_full_attention"))
"""Kinds of groups that keep every block of a prompt; "" is an engine that does not say."""

_MAX_GROUPS = 256


class Batch(NamedTuple):
    """Events that count.

    hashes: theirs and their parents'.  ids: all tokens.  extras: events that have some, with the number of their first
    block.
    """

    events: list[KvStored | KvRemoved]
    hashes: list[int]
    ids: "array[int]"
    extras: list[tuple[int, KvStored]]


class Intake:
    """Reads events and skips what does not count.

    Only one group of a hybrid model is followed, the first dense one that is seen, so that a block of several groups is
    not counted several times.  block_size: of that group, in tokens, 0 before it is known.  other_groups, unreadable:
    events that were skipped.
    """

    __slots__ = ("_group", "_kinds", "block_size", "other_groups", "unreadable")

    def __init__(self) -> None:
        self._kinds: dict[int, str] = {}
        self._group: int | None = None
        self.block_size = 0
        self.other_groups = 0
        self.unreadable = 0

    def clear(self) -> None:
        """Follow no group; the next one may have another block size."""
        self._group, self.block_size = None, 0

    def read(self, events: list[KvEvent]) -> Batch:
        """Return those of `events`, among which is no KvCleared, that count."""
        batch = self._read(events)
        try:
            array("Q", batch.hashes)
        except (OverflowError, TypeError):
            sound: list[KvEvent] = [event for event in batch.events if _is_sound(event)]
            self.unreadable += len(batch.events) - len(sound)
            batch = self._read(sound)
        return batch

    def _read(self, events: list[KvEvent]) -> Batch:
        """Return the events that count, with their numbers together."""
        batch = Batch([], [], array("I"), [])
        kept, hashes, ids, extras = batch
        group, size = self._group, self.block_size
        kind = self._kinds.get(group or 0, "")
        for event in events:
            if type(event) is KvStored:
                tokens = event.tokens
                is_usual = event.group == group and event.block_size == size and event.kind == kind
                # Nearly every event is like the one before it.
                if not is_usual or len(tokens) != len(event.hashes) * size:
                    if not self._is_counted(event):
                        continue
                    group, size = self._group, self.block_size
                    kind = self._kinds.get(group or 0, "")
                if tokens:
                    place = len(ids) // size
                    try:
                        ids.fromlist(tokens)  # five times faster than numpy's way from a list
                    except (OverflowError, TypeError):
                        self.unreadable += 1
                        continue
                    if event.extras:
                        extras.append((place, event))
                if event.parent is not None:
                    hashes.append(event.parent)
                hashes += event.hashes
            elif type(event) is KvRemoved:
                if group is not None and event.group != group:
                    self.other_groups += 1
                    continue
                hashes += event.hashes
            else:
                continue
            kept.append(event)
        return batch

    def _is_counted(self, event: KvStored) -> bool:
        """Whether a store is of the group that is followed, and whole.  Learns which group that is."""
        group, size = event.group, event.block_size
        if event.kind and len(self._kinds) < _MAX_GROUPS:
            self._kinds[group] = event.kind
        if self._kinds.get(group, "") not in DENSE_KINDS or (self._group is not None and group != self._group):
            self.other_groups += 1
            return False
        if not event.tokens:
            return True
        if not 0 < size <= MAX_BLOCK_TOKENS or (self.block_size and size != self.block_size):
            self.unreadable += 1
            return False
        if len(event.tokens) != len(event.hashes) * size:
            self.other_groups += 1
            return False
        self._group, self.block_size = group, size
        return True


def _is_sound(event: KvStored | KvRemoved) -> bool:
    """Whether all hashes of an event are of the size that they may have."""
    hashes = list(event.hashes)
    if isinstance(event, KvStored) and event.parent is not None:
        hashes.append(event.parent)
    return all(type(hash) is int and hash >> 64 == 0 for hash in hashes)
