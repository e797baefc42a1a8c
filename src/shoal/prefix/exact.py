"""The exact index: which endpoint holds which blocks on which tier, from what engines say.

Owns the meaning of holders and tiers.  Keys are those of `tokens`; where rows lie is `choices`', how sets are stored is
`sets`', what an engine's hashes mean is `ledger`'s.  It is never told the time.
"""

from heapq import heappop, heappush

import numpy as np

from shoal.pool.kvevents import Tier
from shoal.prefix.choices import NO_ROOM, TwoChoiceTable
from shoal.prefix.hashing import Blocks
from shoal.prefix.index import IndexGauges
from shoal.prefix.match import TIERS, ExactMatch, Leading
from shoal.prefix.sets import ID_BITS, MAX_SLOTS, HolderSets, slots_of
from shoal.prefix.table import ROW_BYTES, Entries, Rows

DEFAULT_EXACT_BUDGET_BYTES = 128 << 20
"""Room for 7 million blocks, shared ones counted once: 110 million tokens in blocks of 16."""

_ID_MASK = (1 << ID_BITS) - 1
_STAMP_MASK = np.uint64(((1 << 64) - 1) ^ _ID_MASK)
_SETS_SHARE = 8
_ALL_TIERS = (1 << len(TIERS)) - 1
_TIER_NUMBER = {tier: number for number, tier in enumerate(TIERS)}
# Bits are given anew to a cleared slot while the old ones are washed out of the sets.
_SPARE_PLACES = 256
_MAX_PLACES = MAX_SLOTS + _SPARE_PLACES
_WASH = 256
# A match looks at so many blocks first, then at so many times what it has seen: most prompts are held in part only.
_FIRST_STRETCH = 64
_STRETCH_GROWTH = 7
# Rows are moved to let no row go while more than one in so many is free, and kept in order of use from half on.
_LAST = 32
_SCARCE = 2
_CLOSED = 0
# A megabyte, which takes a millisecond at the most.
_PART_ROWS = 1 << 16
# Up to so many keys the plain way is faster than the one made for many.
_FEW = 16


class ExactIndex:
    """Key of a block -> its holders by tier, within a hard budget.

    A match counts leading blocks that are all known to be held; when the budget is reached the longest unused rows give
    way, and what was behind them is not claimed any more.  A holder is a place: a slot's current number.  `clear` gives
    the slot another place, so nothing of before is believed, whatever rows still name the old one.

    budget_bytes: hard for rows and sets together; that of the rows is taken in full by `prepare`, or by their use.
    """

    __slots__ = (
        "_budget_bytes",
        "_clock",
        "_displaced",
        "_free_places",
        "_free_slots",
        "_last_rows",
        "_ones",
        "_places",
        "_prepared",
        "_scarce_rows",
        "_sets",
        "_table",
        "_tiers_seen",
        "_width",
    )

    def __init__(self, budget_bytes: int = DEFAULT_EXACT_BUDGET_BYTES) -> None:
        sets_bytes = budget_bytes // _SETS_SHARE
        self._table = TwoChoiceTable(budget_bytes - sets_bytes)
        self._sets = HolderSets(sets_bytes, self._table.size, MAX_SLOTS * len(TIERS))
        self._budget_bytes = budget_bytes
        self._clock = 1
        self._displaced = self._prepared = 0
        self._free_slots: list[int] = []
        self._free_places: list[int] = []
        self._width = self._ones = 1
        self._scarce_rows = self._table.size // _SCARCE
        self._last_rows = self._table.size // _LAST
        self._places = np.zeros(0, np.int64)
        self._tiers_seen: list[Tier] = []

    def prepare(self) -> bool:
        """Take a part of the memory of the rows; returns whether there is more to take.

        Keys lie anywhere, so the first few thousand would have to wait for all of it.
        """
        start = self._prepared
        self._prepared = end = min(start + _PART_ROWS, self._table.size)
        self._table.touch(start, end)
        return end < self._table.size

    def open_slot(self) -> int:
        """Return a slot for a publisher (an endpoint's rank) that joined: the lowest free one.

        Raises ValueError at 4,096.
        """
        if self._free_slots:
            slot = heappop(self._free_slots)
        else:
            slot = len(self._places)
            if slot >= MAX_SLOTS:
                raise ValueError(f"more than {MAX_SLOTS} publishers of KV events")
            self._places = np.append(self._places, _CLOSED)
        self._move(slot, self._take_place())
        return slot

    def remove(self, slot: int) -> None:
        """Forget a publisher that left; its slot may be opened again."""
        self._retire(slot)
        self._move(slot, _CLOSED)
        heappush(self._free_slots, slot)

    def clear(self, slot: int) -> None:
        """Forget all that a publisher holds; takes no walk over rows, and over sets only a little at a time."""
        self._retire(slot)
        self._move(slot, self._take_place())

    def _retire(self, slot: int) -> None:
        self._sets.retire(_ALL_TIERS << self._place(slot) * len(TIERS))
        self._wash(_WASH)

    def _move(self, slot: int, place: int) -> None:
        self._places = self._places.copy()  # matches that were given out keep theirs
        self._places[slot] = place

    def _place(self, slot: int) -> int:
        place = int(self._places[slot]) if slot < len(self._places) else _CLOSED
        if place == _CLOSED:
            raise ValueError(f"slot {slot} is not open")
        return place

    def _take_place(self) -> int:
        while not self._free_places and self._width >= _MAX_PLACES:
            self._wash(1 << ID_BITS)
        if self._free_places:
            return heappop(self._free_places)
        self._ones |= 1 << self._width * len(TIERS)
        self._width += 1
        self._widen()
        return self._width - 1

    def _widen(self) -> None:
        self._sets.widen(self._width * len(TIERS), self._width * len(self._tiers_seen))

    def _wash(self, count: int) -> None:
        if self._sets.dead:
            done = slots_of(self._sets.wash(count)) // len(TIERS)
            for place in done[:: len(TIERS)].tolist():
                heappush(self._free_places, place)

    def store(self, slot: int, keys: Blocks, tier: Tier) -> None:
        """Note that a publisher holds these blocks on `tier` now.  Raises ValueError for a slot not open."""
        bit = self._place(slot) * len(TIERS) + _TIER_NUMBER[tier]
        if tier not in self._tiers_seen:
            self._tiers_seen.append(tier)
            self._widen()
        self._wash(_WASH)
        self._clock += 1
        if len(keys) <= _FEW:
            self._store_few(keys.tolist(), bit)
            return
        keys = _distinct(keys)
        rows = self._table.seek(keys)
        is_missing = rows < 0
        if is_missing.any():
            self._insert(keys[is_missing], bit)
            rows = rows[~is_missing]
        if len(rows):
            self._rename(rows, self._table.read(rows), self._clock << ID_BITS, 0, 1 << bit)

    def _store_few(self, keys: list[int], bit: int) -> None:
        """Store key by key: for a few, numpy's cost per call is more than that of the work."""
        table, sets, stamp = self._table, self._sets, self._clock << ID_BITS
        alone = sets.intern(1 << bit, bit)
        for key in keys:
            if not key:
                continue
            row = table.place_of(key)
            if row >= 0:
                old = table.entry_cells[row] & _ID_MASK
                new = sets.intern(sets.masks[old] & ~sets.dead | 1 << bit, bit)
                table.entry_cells[row] = stamp | new
                sets.swap(old, new)
            elif row != NO_ROOM:
                table.fill(~row, key, stamp | alone)
                sets.swap(0, alone)
            else:
                self._insert(np.array([key], np.uint64), bit)

    def evict(self, slot: int, keys: Blocks, tier: Tier) -> None:
        """Note that a publisher holds these blocks on `tier` no longer.  Raises ValueError for a slot not open."""
        bit = self._place(slot) * len(TIERS) + _TIER_NUMBER[tier]
        self._wash(_WASH)
        if len(keys) <= _FEW:
            self._evict_few(keys.tolist(), bit)
            return
        rows = self._table.seek(_distinct(keys))
        rows = rows[rows >= 0]
        if len(rows):
            self._rename(rows, self._table.read(rows), 0, 1 << bit, 0)
            self._table.erase(rows[self._table.read(rows) & _ID_MASK == 0])

    def _evict_few(self, keys: list[int], bit: int) -> None:
        table, sets = self._table, self._sets
        for key in keys:
            row = table.place_of(key) if key else NO_ROOM
            if row < 0:
                continue
            entry = table.entry_cells[row]
            old = entry & _ID_MASK
            left = sets.masks[old] & ~sets.dead & ~(1 << bit)
            if left:
                new = sets.intern(left, left.bit_length() - 1)
                table.entry_cells[row] = entry ^ old | new
            else:
                new = 0
                table.fill(row, 0, 0)
            sets.swap(old, new)

    def _insert(self, keys: Blocks, bit: int) -> None:
        """Give new keys rows with one holder."""
        sets = self._sets
        alone = sets.intern(1 << bit, bit)
        has_room = bool(sets.rows[0] > self._last_rows)
        placed, gave_way = self._table.settle(keys, self._clock << ID_BITS | alone, has_room)
        sets.hold(alone, placed)
        sets.hold(0, len(gave_way) - placed)
        if len(gave_way):
            sets.release((gave_way & _ID_MASK).view(np.intp))
            self._displaced += len(gave_way)

    def _rename(self, rows: Rows, entries: Entries, stamp: int, lost: int, gained: int) -> None:
        """Give rows other sets: without the holders `lost`, with those `gained`.  stamp: theirs, 0 to keep it."""
        sets = self._sets
        olds, places, counts = np.unique(entries & _ID_MASK, return_inverse=True, return_counts=True)
        news: Entries = np.empty(len(olds), np.uint64)
        changes = list(zip(olds.tolist(), counts.tolist(), strict=True))
        for number, (old, count) in enumerate(changes):
            holders = sets.masks[old] & ~sets.dead & ~lost | gained
            fallback = (gained or holders).bit_length() - 1
            new = sets.intern(holders, max(0, fallback))
            sets.hold(new, count)
            news[number] = new
        for old, count in changes:
            sets.hold(old, -count)
        stamps = np.uint64(stamp) if stamp else entries & _STAMP_MASK
        self._table.write(rows, np.bitwise_or(news.take(places), stamps))

    def match(self, keys: Blocks) -> ExactMatch:
        """Return how many leading blocks of the prompt each publisher holds, and on which tiers."""
        total = len(keys)
        if np.count_nonzero(keys) != total:
            keys = keys[: int((keys == 0).argmax())]
        stretches: list[Leading] = []
        tiers = [_TIER_NUMBER[tier] for tier in self._tiers_seen]
        tiers.sort()
        places = self._ones
        start = 0
        while places and start < len(keys):
            length = _FIRST_STRETCH if not start else start * _STRETCH_GROWTH
            part = keys[start : start + length]
            rows = self._table.seek(part)
            if rows.min() < 0:
                rows = rows[: int((rows < 0).argmax())]
            entries = self._table.read(rows)
            places = self._walk((entries & _ID_MASK).view(np.intp), places, tiers, stretches)
            if self._sets.rows[0] < self._scarce_rows:
                self._touch(rows, entries)
            start += len(rows)
            if len(rows) < len(part):
                break
        return ExactMatch(total, stretches, tiers, self._places)

    def _walk(self, ids: Rows, places: int, tiers: list[int], stretches: list[Leading]) -> int:
        """Append what `places` hold of blocks with these sets; return those that hold all of them."""
        if not len(ids):
            return 0
        masks, dead = self._sets.masks, self._sets.dead
        ends = (ids[1:] != ids[:-1]).nonzero()[0]
        ends += 1
        names = [int(ids[0]), *ids.take(ends).tolist()]
        start = 0
        for name, end in zip(names, [*ends.tolist(), len(ids)], strict=True):
            holders = masks[name] & ~dead if dead else masks[name]
            on_any = 0
            for tier in tiers:
                on_any |= holders >> tier
            places &= on_any
            if not places:
                break
            stretches.append((places, holders, end - start))
            start = end
        return places

    def _touch(self, rows: Rows, entries: Entries) -> None:
        """Keep what was asked for from giving way before what was not."""
        self._clock += 1
        entries = entries & np.uint64(_ID_MASK)
        entries |= np.uint64(self._clock << ID_BITS)
        self._table.write(rows, entries)

    def gauges(self) -> IndexGauges:
        """Return the size of the index.  rows: blocks known, shared ones counted once."""
        rows = self._table.size - int(self._sets.rows[0])
        used = rows * ROW_BYTES + self._sets.used_bytes
        return IndexGauges(rows, len(self._sets), used, self._budget_bytes, self._displaced)


def _distinct(keys: Blocks) -> Blocks:
    """Return the keys once each, without zeros."""
    if len(set(keys.tolist())) != len(keys):
        keys = np.unique(keys)
    return keys if keys.all() else keys[keys != 0]
