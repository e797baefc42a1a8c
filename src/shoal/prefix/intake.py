"""Which of a publisher's KV events count, and their numbers together for a few array operations.

Owns the choice of the group that is followed and the checks of what an event says; what it changes is `ledger`'s.
"""

from array import array
from typing import NamedTuple, cast

from shoal.pool.kvevents import KvRemoved, KvStored, Tier
from shoal.prefix.match import TIERS
from shoal.prefix.tokens import MAX_BLOCK_TOKENS

DENSE_KINDS = frozenset(("", "full_attention", "mla_attention", "sink_full_attention"))
"""Kinds of groups that keep every block of a prompt; "" is an engine that does not say."""

_MAX_GROUPS = 256


ROOT = 1 << 8
GROWS = 1 << 9
LOSES = 1 << 10
TIER_BITS = {tier: 1 << number for number, tier in enumerate(TIERS)}


class Batch(NamedTuple):
    """Events that count, each with blocks.

    codes: of each event, the bit of its tier and ROOT where it stores the beginning of a prompt, GROWS where it has
    tokens, LOSES where it removes.  counts: its blocks.  parents: the hash before its first block, 0 for none.
    hashes: of all blocks.  ids: all tokens.  extras: events that have some, with the number of their first block among
    those with tokens.
    """

    events: list[KvStored | KvRemoved]
    codes: list[int]
    counts: list[int]
    parents: "array[int]"
    hashes: "array[int]"
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

    def read(self, events: list[KvStored | KvRemoved]) -> Batch:
        """Return those of `events` that count."""
        before = self._group, self.block_size, self.other_groups, self.unreadable
        try:
            return self._read(events)
        except (OverflowError, TypeError):
            self._group, self.block_size, self.other_groups, self.unreadable = before
            sound = [event for event in events if _is_sound(event)]
            self.unreadable += len(events) - len(sound)
            return self._read(sound)

    def _read(self, events: list[KvStored | KvRemoved]) -> Batch:
        """Return the events that count.  Raises OverflowError or TypeError for hashes that are none."""
        batch = Batch([], [], [], array("Q"), array("Q"), array("I"), [])
        kept, codes, counts, parents, hashes, ids, extras = batch
        group, size = self._group, self.block_size
        kind = self._kinds.get(group or 0, "")
        for event in events:
            own, tier = event.hashes, event.tier
            count, code = len(own), 1 if tier is Tier.GPU else TIER_BITS[tier]
            if type(event) is KvRemoved:  # isinstance takes ten times as long for these types
                if group is not None and event.group != group:
                    self.other_groups += 1
                    continue
                code |= LOSES
                parents.append(0)
            else:
                event = cast(KvStored, event)
                tokens, parent = event.tokens, event.parent
                # Nearly every event is like the one before it.
                if (
                    len(tokens) != count * size
                    or event.group != group
                    or event.block_size != size
                    or event.kind != kind
                ):
                    if not self._is_counted(event):
                        continue
                    group, size = self._group, self.block_size
                    kind = self._kinds.get(group or 0, "")
                if tokens:
                    code |= GROWS
                    if event.extras:
                        extras.append((len(ids) // size, event))
                    ids.fromlist(tokens)  # five times faster than numpy's way from a list
                if parent is None:
                    code |= ROOT
                    parents.append(0)
                else:
                    parents.append(parent)
            hashes.fromlist(own)
            codes.append(code)
            counts.append(count)
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
    """Whether all numbers of an event are of the size that they may have."""
    try:
        array("Q", event.hashes)
        if isinstance(event, KvStored):
            array("I", event.tokens)
            array("Q", [event.parent or 0])
    except (OverflowError, TypeError):
        return False
    return True
