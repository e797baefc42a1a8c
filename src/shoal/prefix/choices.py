"""A table of rows in which every key may lie in either of two buckets, so that it can be nearly full and lose nothing.

Owns where a key lies and who gives way; rows are as in `table`.  With one bucket per key, one in twenty is already lost
when three rows in four are taken, and each lost block cuts an exact chain in two.
"""

import numpy as np

from shoal.prefix.hashing import Blocks
from shoal.prefix.sets import ID_BITS
from shoal.prefix.table import LINE_BYTES, WAYS, BlockTable, Entries, Rows, read_line

_MIXER = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_LOW_BITS = (1 << 32) - 1
_MIX = np.uint64(_MIXER)
_MOVES = 4
_HALF = np.uint64(32)
_LOW = np.uint64(_LOW_BITS)


NO_ROOM = -1 << 62
"""No row and none free."""


class TwoChoiceTable(BlockTable):
    """A fixed number of rows.

    A new key takes a free row of its first bucket, else of its second, else the oldest row of both: so most keys are
    found in the first.
    """

    __slots__ = ()

    def seek(self, keys: Blocks) -> Rows:
        """Return the row of each of `keys`, none of them zero; -1 where it has none."""
        rows = self._rows_in(self._first(keys), keys)
        missing = (rows < 0).nonzero()[0]
        if len(missing) == len(keys):
            return self._rows_in(self._second(keys), keys)
        if len(missing):
            rest = keys.take(missing)
            rows[missing] = self._rows_in(self._second(rest), rest)
        return rows

    def _rows_in(self, buckets: Rows, keys: Blocks) -> Rows:
        found: Rows = (self._keys.take(buckets, axis=0) == keys[:, None]).ravel().nonzero()[0]
        rows: Rows
        if len(found) == len(keys):
            rows = (buckets << 3) + (found & 7)
            return rows
        rows = np.full(len(keys), -1)
        if len(found):
            places = found >> 3
            rows[places] = (buckets.take(places) << 3) + (found & 7)
        return rows

    def place_of(self, key: int) -> int:
        """Return the row of one key, or `~row` of the free row that it would take, or NO_ROOM.

        For a few keys this is faster than `seek` and `settle`.
        """
        free = NO_ROOM
        count = self._bucket_count
        for bucket in ((key & _LOW_BITS) * count >> 32, ((key * _MIXER & _WORD) >> 32) * count >> 32):
            line = read_line(self._key_cells, bucket * LINE_BYTES)
            if key in line:
                return bucket * WAYS + line.index(key)
            if free == NO_ROOM and 0 in line:
                free = ~(bucket * WAYS + line.index(0))
        return free

    def fill(self, row: int, key: int, entry: int) -> None:
        """Give one key a free row; key and entry 0 free one."""
        self._key_cells[row] = key
        self.entry_cells[row] = entry

    def settle(self, keys: Blocks, entry: int, has_room: bool) -> tuple[int, Entries]:
        """Give each of `keys`, distinct and without a row, a row with `entry`.

        has_room: whether a row is moved to its other bucket before one gives way.  Keys that meet in one row are placed
        in turns.  Where both buckets are full of rows of this very stamp the key gets none.  Return how many got one,
        and the entries that gave way for them.
        """
        placed = 0
        gave_way = [_NO_ENTRIES]
        tries = _MOVES if has_room else 0
        while len(keys):
            later = _NO_ENTRIES
            rows, old = self._oldest(self._first(keys))
            is_crowded = bool(old.any())
            if is_crowded:
                tries -= 1
                keys, rows, old, later = self._settle_crowded(keys, rows, old, entry, tries >= 0)
            self._flat_keys[rows] = keys
            self._flat_entries[rows] = entry
            is_placed = self._flat_keys.take(rows) == keys
            here = int(np.count_nonzero(is_placed))
            placed += here
            if is_crowded:
                gave_way.append(old[is_placed & (old != 0)])
            keys = later if here == len(keys) else np.concatenate((keys[~is_placed], later))
        return placed, np.concatenate(gave_way) if len(gave_way) > 1 else _NO_ENTRIES

    def _settle_crowded(
        self, keys: Blocks, rows: Rows, old: Entries, entry: int, may_move: bool
    ) -> tuple[Blocks, Rows, Entries, Blocks]:
        """Look at the second bucket where the first is full; where that is full too, make room or take the oldest row.

        Return (keys, rows, what lies there) of those that are placed now, and the keys for the next turn.
        """
        crowded = old.nonzero()[0]
        first, second = self._first(keys.take(crowded)), self._second(keys.take(crowded))
        others, other_old = self._oldest(second)
        is_older = other_old < old.take(crowded)
        rows[crowded[is_older]], old[crowded[is_older]] = others[is_older], other_old[is_older]
        if may_move:
            is_full = other_old != 0
            if is_full.any():
                self._make_room(np.unique(np.concatenate((first[is_full], second[is_full]))))
            is_open = old == 0
            return keys[is_open], rows[is_open], old[is_open], keys[~is_open]
        is_open = old < entry >> ID_BITS << ID_BITS
        return keys[is_open], rows[is_open], old[is_open], _NO_ENTRIES

    def _make_room(self, buckets: Rows) -> None:
        """Move a row of each of these full buckets to its other bucket, where that has a free row."""
        keys = self._keys.take(buckets, axis=0)
        first = self._first(keys)
        others = np.where(first == buckets[:, None], self._second(keys), first)
        is_movable = (self._entries.take(others, axis=0) == 0).any(axis=2)
        ways = is_movable.argmax(axis=1)
        chosen = is_movable.any(axis=1).nonzero()[0]
        ways = ways.take(chosen)
        targets = others[chosen, ways]
        targets, places = np.unique(targets, return_index=True)  # one a time into a bucket
        sources = buckets.take(chosen.take(places)) * WAYS + ways.take(places)
        targets = targets * WAYS + self._entries.take(targets, axis=0).argmin(axis=1)
        self._flat_keys[targets] = self._flat_keys.take(sources)
        self._flat_entries[targets] = self._flat_entries.take(sources)
        self.erase(sources)

    def _oldest(self, buckets: Rows) -> tuple[Rows, Entries]:
        rows = (buckets << 3) + self._entries.take(buckets, axis=0).argmin(axis=1)
        return rows, self._flat_entries.take(rows)

    def _first(self, keys: Blocks) -> Rows:
        return ((keys & _LOW) * self._buckets >> _HALF).view(np.intp)

    def _second(self, keys: Blocks) -> Rows:
        return ((keys * _MIX >> _HALF) * self._buckets >> _HALF).view(np.intp)


_NO_ENTRIES: Entries = np.zeros(0, np.uint64)
