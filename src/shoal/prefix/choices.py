"""A table of rows in which every key may lie in either of two buckets, so that it can be nearly full and lose nothing.

Owns where a key lies and who gives way; rows are as in `table`.  With one bucket per key, one in twenty is already lost
when three rows in four are taken, and each lost block cuts an exact chain in two.
"""

from typing import NamedTuple

import numpy as np

from shoal.prefix.hashing import Blocks
from shoal.prefix.sets import ID_BITS
from shoal.prefix.table import WAYS, BlockTable, Entries, Rows

_MIX = np.uint64(0x9E3779B97F4A7C15)
_MOVES = 4
_HALF = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)


class Sought(NamedTuple):
    """Where keys are.  found: positions, ascending, of those that have a row; rows: those rows; missing: the others."""

    found: Rows
    rows: Rows
    missing: Rows


class TwoChoiceTable(BlockTable):
    """A fixed number of rows; a new key takes the emptier of its two buckets, or the oldest row of both."""

    __slots__ = ()

    def seek(self, keys: Blocks) -> Sought:
        """Return where `keys`, none of them zero, lie."""
        buckets = self._first(keys)
        found, ways = (self._keys.take(buckets, axis=0) == keys[:, None]).nonzero()
        rows = buckets.take(found) * WAYS + ways
        if len(found) == len(keys):
            return Sought(found, rows, _NONE)
        is_missing = np.ones(len(keys), np.bool_)
        is_missing[found] = False
        missing = is_missing.nonzero()[0]
        rest = keys.take(missing)
        buckets = self._second(rest)
        also, ways = (self._keys.take(buckets, axis=0) == rest[:, None]).nonzero()
        if not len(also):
            return Sought(found, rows, missing)
        more = missing.take(also)
        is_missing[more] = False
        found = np.concatenate((found, more))
        rows = np.concatenate((rows, buckets.take(also) * WAYS + ways))
        order = found.argsort()
        return Sought(found.take(order), rows.take(order), is_missing.nonzero()[0])

    def settle(self, keys: Blocks, entry: int, has_room: bool) -> Entries:
        """Give each of `keys`, distinct and without a row, a row with `entry`; return the entries that gave way.

        has_room: whether a row is moved to its other bucket before one gives way.  Keys that meet in one row are placed
        in turns.  Where both buckets are full of rows of this very stamp the key gets none, so the result is shorter
        then.
        """
        newest = entry >> ID_BITS << ID_BITS
        gave_way = []
        tries = _MOVES if has_room else 0
        while len(keys):
            first, second = self._first(keys), self._second(keys)
            rows, old = self._choose(first, second)
            later = keys[:0]
            if tries and old.any():
                tries -= 1
                is_crowded = old != 0
                self._make_room(np.unique(np.concatenate((first[is_crowded], second[is_crowded]))))
                later, is_open = keys[is_crowded], ~is_crowded
            else:
                is_open = old < newest
            if not is_open.all():
                keys, rows, old = keys[is_open], rows[is_open], old[is_open]
            self._flat_keys[rows] = keys
            self._flat_entries[rows] = entry
            is_placed = self._flat_keys.take(rows) == keys
            gave_way.append(old[is_placed])
            keys = np.concatenate((keys[~is_placed], later))
        return gave_way[0] if len(gave_way) == 1 else np.concatenate([_NO_ENTRIES, *gave_way])

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

    def _choose(self, first: Rows, second: Rows) -> tuple[Rows, Entries]:
        """Return the row to take in one of two buckets each, and what lies there: the oldest, of free ones in the
        emptier bucket."""
        ones, others = self._entries.take(first, axis=0), self._entries.take(second, axis=0)
        ways, other_ways = ones.argmin(axis=1), others.argmin(axis=1)
        rows, other_rows = first * WAYS + ways, second * WAYS + other_ways
        old, other_old = self._flat_entries.take(rows), self._flat_entries.take(other_rows)
        is_other = other_old < old
        both_free = (old == 0) & (other_old == 0)
        is_other |= both_free & (np.count_nonzero(others, axis=1) < np.count_nonzero(ones, axis=1))
        return np.where(is_other, other_rows, rows), np.where(is_other, other_old, old)

    def _first(self, keys: Blocks) -> Rows:
        return ((keys & _LOW) * self._buckets >> _HALF).view(np.intp)

    def _second(self, keys: Blocks) -> Rows:
        return ((keys * _MIX >> _HALF) * self._buckets >> _HALF).view(np.intp)


_NONE: Rows = np.zeros(0, np.intp)
_NO_ENTRIES: Entries = np.zeros(0, np.uint64)
