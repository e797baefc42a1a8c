"""The rows of the index: a set-associative table of fixed size in flat memory.

Owns where a block hash lies and who gives way when a bucket is full.  A row is a key (the hash) and an entry
(`stamp << 16 | set id`) of 8 bytes each; 8 rows make a bucket, one cache line of keys and one of entries.  What stamps
and sets mean is decided in `index`.  Nothing is ever rebuilt, so no request pays for the growth of the table.
"""

from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.prefix.hashing import Blocks
from shoal.prefix.sets import ID_BITS

Rows = npt.NDArray[np.intp]
Entries = npt.NDArray[np.uint64]

ROW_BYTES = 16
WAYS = 8
LINE_BYTES = 64
_PAGE_ROWS = 4096 // 8
_NOTHING = np.uint64(0)

read_line = Struct(f"={WAYS}Q").unpack_from
"""Return the cells of one bucket, given all cells and the byte at which it begins: a third of the cost of a slice."""


class Located(NamedTuple):
    """Where hashes are.  buckets: of each hash.  found: positions of those that have a row; rows: those rows."""

    buckets: Rows
    found: Rows
    rows: Rows


class BlockTable:
    """A fixed number of rows.  budget_bytes: the size of the whole table; pages never written cost nothing.

    entry_cells: the entry of each row, for reading and writing single ones.
    """

    __slots__ = (
        "_bucket_count",
        "_buckets",
        "_entries",
        "_flat_entries",
        "_flat_keys",
        "_key_cells",
        "_keys",
        "entry_cells",
        "size",
    )

    def __init__(self, budget_bytes: int) -> None:
        buckets = max(1, budget_bytes // (ROW_BYTES * WAYS))
        self.size = buckets * WAYS
        self._bucket_count = buckets
        self._buckets = np.uint64(buckets)
        self._keys = _zero_lines(buckets)
        self._entries = _zero_lines(buckets)
        self._flat_keys = self._keys.reshape(-1)
        self._flat_entries = self._entries.reshape(-1)
        # Single cells are read and written through these: a fifth of the cost of numpy's indexing.
        self._key_cells = self._flat_keys.data
        self.entry_cells = self._flat_entries.data

    def find(self, hashes: Blocks) -> tuple[Rows, Entries]:
        """Return the positions of those hashes that have a row, ascending, and their entries."""
        buckets = (hashes % self._buckets).view(np.intp)
        is_here = self._keys.take(buckets, axis=0) == hashes[:, None]
        found = is_here.ravel().nonzero()[0]
        many_rows = buckets.take(found >> 3)
        many_rows <<= 3
        many_rows += found & 7
        return found >> 3, self._flat_entries.take(many_rows)

    def rows_of(self, keys: list[int]) -> list[int]:
        """Return the row of each of a few hashes, -1 for one that has none."""
        read, cells, buckets, rows = read_line, self._key_cells, self._bucket_count, []
        for key in keys:
            bucket = key % buckets
            line = read(cells, bucket * LINE_BYTES)
            rows.append(bucket * WAYS + line.index(key) if key in line else -1)
        return rows

    def place_few(self, keys: list[int], entry: int) -> list[int]:
        """Give a few hashes without a row, one after the other, rows with `entry`; return the entries that gave way.

        A bucket in which all is as new as `entry` keeps what it has.
        """
        read, cells, key_cells, buckets = read_line, self.entry_cells, self._key_cells, self._bucket_count
        oldest, gave_way = entry >> ID_BITS << ID_BITS, []
        for key in keys:
            bucket = key % buckets
            line = read(cells, bucket * LINE_BYTES)
            old: int = 0 if 0 in line else min(line)
            if old < oldest:
                row = bucket * WAYS + line.index(old)
                key_cells[row] = key
                cells[row] = entry
                gave_way.append(old)
        return gave_way

    def locate(self, hashes: Blocks) -> Located:
        """Return where `hashes` lie, for `read`, `write`, `erase` and `place`."""
        buckets = (hashes % self._buckets).view(np.intp)
        found, ways = (self._keys.take(buckets, axis=0) == hashes[:, None]).nonzero()
        return Located(buckets, found, buckets.take(found) * WAYS + ways)

    def read(self, rows: Rows) -> Entries:
        """Return the entries of `rows`."""
        return self._flat_entries.take(rows)

    def write(self, rows: Rows, entries: Entries | int) -> None:
        """Overwrite the entries of `rows`."""
        self._flat_entries[rows] = entries

    def erase(self, rows: Rows) -> None:
        """Free `rows`."""
        self._flat_keys[rows] = 0
        self._flat_entries[rows] = 0

    def place(self, hashes: Blocks, buckets: Rows, entry: int) -> Entries:
        """Give each of `hashes`, distinct and without a row, a row with `entry`; return the entries that gave way.

        In each bucket the row with the oldest stamp gives way (a free one has stamp 0).  Hashes that meet in one row
        are placed in turns; a bucket full of rows of this very stamp takes no more, so the result is shorter then.
        """
        newest = entry >> ID_BITS << ID_BITS
        gave_way = []
        while len(hashes):
            rows = buckets * WAYS + self._entries.take(buckets, axis=0).argmin(axis=1)
            old = self._flat_entries.take(rows)
            if int(old.max()) >= newest:
                is_open = old < newest
                hashes, buckets, rows, old = hashes[is_open], buckets[is_open], rows[is_open], old[is_open]
            self._flat_keys[rows] = hashes
            self._flat_entries[rows] = entry
            is_placed = self._flat_keys.take(rows) == hashes
            if is_placed.all():
                gave_way.append(old)
                break
            gave_way.append(old[is_placed])
            hashes, buckets = hashes[~is_placed], buckets[~is_placed]
        return gave_way[0] if len(gave_way) == 1 else np.concatenate([_NO_ENTRIES, *gave_way])

    def touch(self, start: int, end: int) -> None:
        """Have the system give the memory of the rows from `start` up to `end` now; nothing in them changes."""
        for cells in (self._flat_keys, self._flat_entries):
            cells[start:end:_PAGE_ROWS] |= _NOTHING

    def cut(self, start: int, end: int) -> tuple[Blocks, Entries]:
        """Return keys and entries of the rows from `start` up to `end`, free ones included; to be read at once."""
        return self._flat_keys[start:end], self._flat_entries[start:end]

    def adopt(self, hashes: Blocks, entries: Entries) -> Entries:
        """Give each of `hashes`, distinct and without a row, a row with its own entry; return what gave way.

        As `place`, but the stamps differ: what is older than all in its bucket finds no room.
        """
        gave_way = []
        while len(hashes):
            buckets = (hashes % self._buckets).view(np.intp)
            rows = buckets * WAYS + self._entries.take(buckets, axis=0).argmin(axis=1)
            rows, first = np.unique(rows, return_index=True)
            old, new = self._flat_entries.take(rows), entries[first]
            is_open = old >> np.uint64(ID_BITS) < new >> np.uint64(ID_BITS)
            self._flat_keys[rows[is_open]] = hashes[first[is_open]]
            self._flat_entries[rows[is_open]] = new[is_open]
            gave_way.append(old[is_open])
            rest = np.ones(len(hashes), np.bool_)
            rest[first] = False
            hashes, entries = hashes[rest], entries[rest]
        return np.concatenate([_NO_ENTRIES, *gave_way])


_NO_ENTRIES: Entries = np.zeros(0, np.uint64)


def _zero_lines(count: int) -> npt.NDArray[np.uint64]:
    """Return `count` zeroed buckets that begin on cache lines, so that reading one never touches two."""
    raw: npt.NDArray[Any] = np.zeros(count * LINE_BYTES + LINE_BYTES, np.uint8)
    start = -int(raw.__array_interface__["data"][0]) % LINE_BYTES
    return raw[start : start + count * LINE_BYTES].view(np.uint64).reshape(count, WAYS)
