"""What one publisher of KV events holds: its own hashes turned into our keys, copies counted, orphans joined.

Owns the meaning of stores and removes: when a block is gone, what a second store of a block is.  Which events count is
`intake`'s; rows lie in `hashmap`, blocks with unknown parents in `orphans`.
"""

import sys
from array import array
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from shoal.pool.kvevents import KvCleared, KvEvent, KvRemoved, KvStored, Tier
from shoal.prefix.hashmap import BOUND_BYTES, STATE_BITS, HashMap
from shoal.prefix.intake import Batch, Intake
from shoal.prefix.match import TIERS
from shoal.prefix.orphans import BLOCK_BYTES, Orphans, Run
from shoal.prefix.tokens import TokenHasher

DEFAULT_LEDGER_BYTES = 16 << 20
"""Room for 560,000 blocks; it is taken as blocks come."""

_WORD = (1 << 64) - 1
_TIER_MASK = (1 << len(TIERS)) - 1
_HAS_COPIES = 1 << len(TIERS)
_TIER_NUMBER = {tier: number for number, tier in enumerate(TIERS)}
_GPU = _TIER_NUMBER[Tier.GPU]
_TIER_BITS = 3
# Of the budget: one part in so many for orphans, and for counts of copies, which take so many bytes each.
_ORPHANS_SHARE = 8
_COPIES_SHARE = 16
_COPY_BYTES = 150
_IS_LITTLE = sys.byteorder == "little"


class Stored(NamedTuple):
    """The publisher holds these blocks now.  keys: 8 bytes little-endian each, in no order."""

    keys: bytes
    tier: Tier
    block_size_tokens: int


class Removed(NamedTuple):
    """The publisher holds these blocks no longer on that tier."""

    keys: bytes
    tier: Tier


class Cleared(NamedTuple):
    """All that the publisher held before is gone."""


Change = Stored | Removed | Cleared


class LedgerGauges(msgspec.Struct, frozen=True):
    """Size of a ledger, and counts since its beginning, in blocks but for `other_groups` and `unreadable` (events).

    orphans: wait for what comes before them.  joined: of them those that found it; lost_orphans: were let go for want
    of room.  let_go: known blocks that were.  other_groups: sparse, or not the group that is followed.
    unknown_removes: of blocks that were not known.  uncounted: further copies beyond what is counted.
    """

    blocks: int
    orphans: int
    used_bytes: int
    joined: int = 0
    lost_orphans: int = 0
    let_go: int = 0
    other_groups: int = 0
    unreadable: int = 0
    unknown_removes: int = 0
    uncounted: int = 0


class Ledger:
    """Turns the events of one publisher (an endpoint's rank) into changes of what is held, in our keys.

    hasher: of the pool.  model: as the engines name it.  max_bytes: hard; beyond it the oldest blocks are let go, as
    changes say.

    A store of a block that is held already is a further copy, and as many removes end it: engines do keep two copies of
    equal blocks, and remove each.  It is none where a run from the first block of a prompt on repeats blocks that are
    on the GPU: an engine that has them would have used them, so this is a report (`kv_cache_report_mode=full`), to
    which no remove belongs; counted, it would keep the block for ever.  Equal first blocks that were computed side by
    side look the same, and are believed gone with the first copy.
    """

    __slots__ = (
        "_befores",
        "_copies",
        "_counts",
        "_hasher",
        "_intake",
        "_is_cleared",
        "_map",
        "_max_copies",
        "_model",
        "_orphans",
        "_rows",
    )

    def __init__(self, hasher: TokenHasher, model: str, max_bytes: int = DEFAULT_LEDGER_BYTES) -> None:
        self._hasher = hasher
        self._model = model
        shares = max_bytes // _ORPHANS_SHARE, max_bytes // _COPIES_SHARE
        self._map = HashMap((max_bytes - sum(shares)) // BOUND_BYTES, _TIER_MASK)
        self._orphans = Orphans(shares[0] // BLOCK_BYTES)
        self._max_copies = shares[1] // _COPY_BYTES
        self._copies: dict[int, int] = {}
        self._intake = Intake()
        self._rows: dict[int, int] = {}
        self._befores: dict[int, int] = {}
        self._is_cleared = False
        self._counts = dict.fromkeys(("joined", "let_go", "unknown_removes", "uncounted"), 0)

    def apply(self, events: Iterable[KvEvent]) -> list[Change]:
        """Return what these events, in order, change in all: at most one change per kind and tier.

        Many events at once cost far less than one by one.
        """
        events = list(events)
        self._is_cleared = KvCleared in map(type, events)
        if self._is_cleared:
            # What came before the last of them is over.
            del events[: len(events) - list(map(type, reversed(events))).index(KvCleared)]
            self._clear()
        batch = self._intake.read(events)
        self._rows = self._map.look_up(batch.hashes)
        digests = self._digests(batch)
        start = 0
        for event in batch.events:
            if isinstance(event, KvRemoved):
                self._remove(event)
                continue
            if not event.tokens:
                self._store_known(event.hashes, _TIER_NUMBER[event.tier])
                continue
            count = len(event.hashes)
            if count > 1 or not self._store_next(event, digests[start]):
                self._store(event, digests[start : start + count])
            start += count
        return self._changes()

    def _digests(self, batch: Batch) -> list[int]:
        """Return the digests of all blocks that come with tokens, one event after the other."""
        if not batch.ids:
            return []
        digests: list[int] = self._hasher.digests(np.frombuffer(batch.ids, np.uint32), self._intake.block_size).tolist()
        for place, event in batch.extras:
            for number, extra in enumerate((event.extras or [])[: len(event.hashes)], place):
                if extra:
                    digests[number] ^= self._hasher.extra_digest(extra)
        return digests

    def _store_next(self, event: KvStored, digest: int) -> bool:
        """Note one new block behind a known one, the commonest event of all; False where it is anything else."""
        value = None if event.parent is None else self._rows.get(event.parent)
        hash = event.hashes[0]
        if value is None or hash in self._rows or self._orphans.is_waiting:
            return False
        key = ((value >> STATE_BITS) * self._hasher.factor + digest) & _WORD
        self._rows[hash] = key << STATE_BITS | 1 << _TIER_NUMBER[event.tier]
        self._befores[hash] = 0
        return True

    def _store(self, event: KvStored, digests: list[int]) -> None:
        tier = _TIER_NUMBER[event.tier]
        parent = event.parent
        if parent is None:
            key = self._hasher.seed(self._model, event.lora, event.block_size)
        else:
            value = self._rows.get(parent)
            if value is None:
                self._store_known(event.hashes, tier)
                self._orphans.wait(parent, Run(event.hashes, digests))
                return
            key = value >> STATE_BITS
        self._chain(event.hashes, digests, key, tier, 1 << tier, may_report=parent is None and tier == _GPU)
        if self._orphans.is_waiting:
            self._join(event.hashes)

    def _chain(
        self, hashes: list[int], digests: list[int], key: int, tier: int, bit: int, *, may_report: bool = False
    ) -> None:
        """Note a run that follows the key `key`.  bit: of its tier, 0 when only its keys are to be known."""
        rows, befores, factor = self._rows, self._befores, self._hasher.factor
        if len(hashes) > 1 and rows.keys().isdisjoint(hashes):
            befores.update(dict.fromkeys(hashes, 0))
            keys = self._hasher.step(key, digests)
            rows.update(zip(hashes, [key << STATE_BITS | bit for key in keys], strict=True))
            return
        for hash, digest in zip(hashes, digests, strict=True):
            key = (key * factor + digest) & _WORD
            value = rows.get(hash)
            if value is None:
                befores[hash] = 0
                rows[hash] = key << STATE_BITS | bit
                may_report = False
            elif value >> STATE_BITS != key:
                self._forget_copies(hash)
                befores.setdefault(hash, value)
                rows[hash] = key << STATE_BITS | bit
                may_report = False
            elif not value & bit:
                befores.setdefault(hash, value)
                rows[hash] = value | bit
                may_report = False
            elif not may_report:
                self._copy(hash, tier, 1)

    def _store_known(self, hashes: list[int], tier: int) -> None:
        """Note blocks by their hashes alone; those that are not known wait."""
        bit = 1 << tier
        for hash in hashes:
            value = self._rows.get(hash)
            if value is None:
                self._orphans.hold(hash, tier)
            elif value & bit:
                self._copy(hash, tier, 1)
            else:
                self._befores.setdefault(hash, value)
                self._rows[hash] = value | bit

    def _join(self, hashes: list[int]) -> None:
        """Note what waited for these blocks, which are known now, and what waited for that."""
        known = list(hashes)
        while known:
            hash = known.pop()
            for tier, count in self._orphans.claim(hash):
                value = self._rows[hash]
                if not value & 1 << tier:
                    self._befores.setdefault(hash, value)
                    self._rows[hash] = value | 1 << tier
                    self._counts["joined"] += 1
                    count -= 1
                if count:
                    self._copy(hash, tier, count)
            for run in self._orphans.children(hash):
                missing = [each for each in run.hashes if each not in self._rows]
                self._rows.update(self._map.look_up(missing))
                self._chain(run.hashes, run.digests, self._rows[hash] >> STATE_BITS, 0, 0)
                known += run.hashes

    def _copy(self, hash: int, tier: int, count: int) -> None:
        """Count further copies of a block that is held."""
        place = hash << _TIER_BITS | tier
        copies = self._copies.get(place, 0)
        if not copies:
            if len(self._copies) >= self._max_copies:
                self._counts["uncounted"] += count
                return
            self._befores.setdefault(hash, self._rows[hash])
            self._rows[hash] |= _HAS_COPIES
        self._copies[place] = copies + count

    def _forget_copies(self, hash: int) -> None:
        if self._copies:
            for tier in range(len(TIERS)):
                self._copies.pop(hash << _TIER_BITS | tier, None)

    def _remove(self, event: KvRemoved) -> None:
        rows, tier = self._rows, _TIER_NUMBER[event.tier]
        bit = 1 << tier
        for hash in event.hashes:
            value = rows.get(hash)
            if value is None or not value & bit:
                if not self._orphans.release(hash, tier):
                    self._counts["unknown_removes"] += 1
                continue
            if value & _HAS_COPIES:
                place = hash << _TIER_BITS | tier
                copies = self._copies.get(place, 0)
                if copies:
                    if copies > 1:
                        self._copies[place] = copies - 1
                    else:
                        del self._copies[place]
                    continue
            self._befores.setdefault(hash, value)
            rows[hash] = value ^ bit

    def _clear(self) -> None:
        self._map.clear()
        self._orphans.clear()
        self._copies.clear()
        self._intake.clear()

    def _changes(self) -> list[Change]:
        """Write what was touched and return what it comes to."""
        rows, befores = self._rows, self._befores
        self._rows, self._befores = {}, {}
        changed: dict[int, int] = {}
        if any(befores.values()):
            changed = {hash: rows[hash] for hash, before in befores.items() if before}
            added = {hash: rows[hash] for hash, before in befores.items() if not before}
        else:
            added = dict(zip(befores, map(rows.__getitem__, befores), strict=True))
        for hash, value in self._map.write(added, changed):
            self._counts["let_go"] += 1
            self._forget_copies(hash)
            if hash in added:
                del added[hash]
            else:
                befores.setdefault(hash, value)
                changed[hash] = 0
        gained: list[list[int]] = [[] for _ in TIERS]
        lost: list[list[int]] = [[] for _ in TIERS]
        gains, losses = list(added.values()), []
        for hash, after in changed.items():
            before = befores[hash]
            kept = before & after & _TIER_MASK if before >> STATE_BITS == after >> STATE_BITS else 0
            gains.append(after & ~kept)
            losses.append(before & ~kept)
        _sort(gained, gains)
        _sort(lost, losses)
        changes: list[Change] = [Cleared()] if self._is_cleared else []
        changes += [Removed(_packed(keys), tier) for tier, keys in zip(TIERS, lost, strict=True) if keys]
        changes += [
            Stored(_packed(keys), tier, self._intake.block_size)
            for tier, keys in zip(TIERS, gained, strict=True)
            if keys
        ]
        return changes

    def gauges(self) -> LedgerGauges:
        """Return the size of the ledger and what it counted."""
        used = self._map.used_bytes + self._orphans.used_bytes + len(self._copies) * _COPY_BYTES
        return LedgerGauges(
            len(self._map),
            len(self._orphans),
            used,
            lost_orphans=self._orphans.let_go,
            other_groups=self._intake.other_groups,
            unreadable=self._intake.unreadable,
            **self._counts,
        )


def _sort(by_tier: list[list[int]], values: list[int]) -> None:
    """Append the key of each value to the list of each tier in its state."""
    states = {value & _TIER_MASK for value in values}
    for tier, keys in enumerate(by_tier):
        bit = 1 << tier
        if states == {bit}:
            keys += [value >> STATE_BITS for value in values]
            return
        if any(state & bit for state in states):
            keys += [value >> STATE_BITS for value in values if value & bit]


def _packed(keys: list[int]) -> bytes:
    return array("Q", keys).tobytes() if _IS_LITTLE else np.array(keys, "<u8").tobytes()
