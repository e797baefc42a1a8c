"""From an engine's hash to what we know of the block: sorted arrays, 18 bytes a block, and a few newest in dicts.

Owns where rows lie, their age and who is let go when there are too many.  What a row's value means is `ledger`'s.
"""

from array import array
from collections.abc import Iterator
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np
import numpy.typing as npt

from shoal.prefix.hashing import Blocks

STATE_BITS = 8
"""A value is `key << STATE_BITS | state`."""

_STATE_MASK = (1 << STATE_BITS) - 1
BOUND_BYTES = 24
"""What a row takes at most, with spare room and the newest rows of its segment."""

_ROW_BYTES = 18
# What a row takes until it is merged: dict cell and two numbers.
_RECENT_BYTES = 150

# A segment is merged as a whole, so its size bounds how long that may take: under 2 ms.
_MAX_SEGMENT = 1 << 16
_MIN_RECENT = 256
_MAX_RECENT = 1024
_RECENT_SHARE = 16
_SLACK = 4
_MAPPED_ROWS = 1 << 13
_OWN = MAP_PRIVATE | MAP_ANONYMOUS
_AGES = 256
_OLD = 200
_EPOCHS = 64

Marks = npt.NDArray[np.uint16]
Rows = npt.NDArray[np.intp]


class Segment:
    """The rows of one range of hashes.  recent: rows of late, by hash, that are not in the arrays."""

    __slots__ = ("count", "hashes", "keys", "marks", "recent")

    def __init__(self) -> None:
        self.count = 0
        self.recent: dict[int, int] = {}
        self._make_room(0)

    @property
    def used_bytes(self) -> int:
        return self.count * _ROW_BYTES + len(self.recent) * _RECENT_BYTES

    def _make_room(self, rows: int) -> None:
        """Take new arrays.  Large ones are mapped each by itself: pages that nothing is written to cost no memory, and
        those of old arrays go back at once instead of leaving holes in the heap."""
        if rows < _MAPPED_ROWS:
            self.hashes: Blocks = np.zeros(rows, np.uint64)
            self.keys: Blocks = np.zeros(rows, np.uint64)
            self.marks: Marks = np.zeros(rows, np.uint16)
        else:
            self.hashes = np.frombuffer(mmap(-1, 8 * rows, _OWN), np.uint64)
            self.keys = np.frombuffer(mmap(-1, 8 * rows, _OWN), np.uint64)
            self.marks = np.frombuffer(mmap(-1, 2 * rows, _OWN), np.uint16)

    def look_up(self, hashes: list[int], found: dict[int, int]) -> None:
        """Add the values of those hashes that have one to `found`."""
        recent = self.recent
        if recent:
            rest = []
            for hash in hashes:
                value = recent.get(hash)
                if value is None:
                    rest.append(hash)
                else:
                    found[hash] = value
            hashes = rest
        if self.count and hashes:
            sought, rows = self._rows(hashes)
            is_here = self.hashes.take(rows) == sought
            if not is_here.any():
                return
            rows = rows[is_here]
            keys, marks = self.keys.take(rows).tolist(), self.marks.take(rows).tolist()
            for hash, key, mark in zip(sought[is_here].tolist(), keys, marks, strict=True):
                found[hash] = key << STATE_BITS | mark & _STATE_MASK

    def write(self, values: dict[int, int], age: int) -> None:
        """Set the values of hashes that `look_up` found."""
        recent = self.recent
        others = []
        for hash in values:
            if hash in recent:
                recent[hash] = values[hash]
            else:
                others.append(hash)
        if others and self.count:
            sought, rows = self._rows(others)
            is_here = self.hashes.take(rows) == sought
            if not is_here.all():
                recent.update((hash, values[hash]) for hash in sought[~is_here].tolist())
                others, rows = sought[is_here].tolist(), rows[is_here]
            keys, states = _halves([values[hash] for hash in others])
            self.keys[rows] = keys
            self.marks[rows] = states | np.uint16(age << STATE_BITS)
        else:
            recent.update((hash, values[hash]) for hash in others)

    def _rows(self, hashes: list[int]) -> tuple[Blocks, Rows]:
        sought = np.array(hashes, np.uint64)
        rows = self.hashes[: self.count].searchsorted(sought)
        return sought, np.minimum(rows, self.count - 1)

    def merge(self, age: int, max_rows: int, live: int) -> list[tuple[int, int]]:
        """Take the recent rows into the arrays and drop those without a state in `live`.

        age: of now, counted modulo 256.  Return (hash, value) of the oldest, let go to have at most `max_rows`.
        """
        marks = self.marks[: self.count]
        keep = (marks & live).nonzero()[0]
        hashes = np.array(list(self.recent), np.uint64)
        keys, states = _halves(list(self.recent.values()))
        self.recent.clear()
        order = hashes.argsort()
        order = order[(states.take(order) & live) != 0]
        let_go: list[tuple[int, int]] = []
        excess = len(keep) + len(order) - max_rows
        if excess > 0:
            ages = (age - (marks.take(keep) >> STATE_BITS)) & (_AGES - 1)
            oldest = (-ages.astype(np.int16)).argsort(kind="stable")[:excess]
            let_go = _listed(self.hashes, self.keys, marks, keep.take(oldest))
            keep = np.delete(keep, oldest)
            rest = excess - len(oldest)
            let_go += _listed(hashes, keys, states, order[:rest])
            order = order[rest:]
        self._rebuild(
            keep, hashes.take(order), keys.take(order), states.take(order) | np.uint16(age << STATE_BITS), age
        )
        return let_go

    def _rebuild(self, keep: Rows, new_hashes: Blocks, new_keys: Blocks, new_marks: Marks, age: int) -> None:
        """Have the rows `keep` and new ones, both in order, and nothing else."""
        hashes, keys, marks = self.hashes.take(keep), self.keys.take(keep), self.marks.take(keep)
        too_old = (age - (marks >> STATE_BITS)) & (_AGES - 1) > _OLD
        if too_old.any():  # ages go round: before an old row looks young again it is made a little younger
            marks[too_old] = (age - _OLD) % _AGES << STATE_BITS | marks[too_old] & _STATE_MASK
        self.count = count = len(keep) + len(new_hashes)
        if count > len(self.hashes) or count < len(self.hashes) // 2:
            self._make_room(count + count // _SLACK)
        places = hashes.searchsorted(new_hashes) + np.arange(len(new_hashes))
        is_old = np.ones(count, np.bool_)
        is_old[places] = False
        self.hashes[:count][is_old], self.hashes[places] = hashes, new_hashes
        self.keys[:count][is_old], self.keys[places] = keys, new_keys
        self.marks[:count][is_old], self.marks[places] = marks, new_marks

    def split(self) -> "Segment":
        """Move the upper half of the rows to a new segment and return it; nothing may be recent."""
        half, count = self.count // 2, self.count
        hashes, keys, marks = self.hashes, self.keys, self.marks
        upper = Segment()
        for segment, part in ((upper, slice(half, count)), (self, slice(0, half))):
            segment.count = part.stop - part.start
            segment._make_room(segment.count + segment.count // _SLACK)
            segment.hashes[: segment.count] = hashes[part]
            segment.keys[: segment.count] = keys[part]
            segment.marks[: segment.count] = marks[part]
        return upper


class HashMap:
    """Engine hash -> value, for at most about `max_rows` rows.

    live: the state bits of which a row needs one to be kept; a row that has none left may still be found for a while.
    """

    __slots__ = ("_age", "_bounds", "_live", "_max_rows", "_segments", "_until_older")

    def __init__(self, max_rows: int, live: int) -> None:
        self._max_rows = max_rows
        self._live = live
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self._segments = [Segment()]
        self._bounds: Blocks = np.zeros(1, np.uint64)
        self._age = 0
        self._until_older = self._max_rows // _EPOCHS

    @property
    def used_bytes(self) -> int:
        return sum(segment.used_bytes for segment in self._segments)

    def __len__(self) -> int:
        """Rows, those without a live state too until they are merged away."""
        return sum(segment.count + len(segment.recent) for segment in self._segments)

    def look_up(self, hashes: list[int]) -> dict[int, int]:
        """Return the values of those hashes that have one."""
        found: dict[int, int] = {}
        for segment, part in self._parts(hashes):
            segment.look_up(part, found)
        return found

    def write(self, added: dict[int, int], changed: dict[int, int]) -> list[tuple[int, int]]:
        """Set values; return (hash, value) of rows that are let go for want of room.

        added: of hashes that `look_up` did not find.  changed: of those that it found.
        """
        let_go: list[tuple[int, int]] = []
        for segment, part in self._shares(changed):
            segment.write(part, self._age)
        for segment, part in self._shares(added):
            segment.recent.update(part)
            if len(segment.recent) > min(max(segment.count // _RECENT_SHARE, _MIN_RECENT), _MAX_RECENT):
                fair = self._max_rows // len(self._segments)
                room = segment.count + len(segment.recent) - (len(self) - self._max_rows)
                let_go += segment.merge(self._age, max(fair, room), self._live)
                if segment.count > _MAX_SEGMENT:
                    self._split(segment)
        self._until_older -= len(added)
        if self._until_older <= 0:
            self._age = (self._age + 1) % _AGES
            self._until_older = self._max_rows // _EPOCHS
        return let_go

    def _shares(self, values: dict[int, int]) -> list[tuple[Segment, dict[int, int]]]:
        if not values:
            return []
        if len(self._segments) == 1:
            return [(self._segments[0], values)]
        return [(segment, {hash: values[hash] for hash in part}) for segment, part in self._parts(list(values))]

    def _split(self, segment: Segment) -> None:
        upper = segment.split()
        place = self._segments.index(segment) + 1
        self._segments.insert(place, upper)
        self._bounds = np.insert(self._bounds, place, upper.hashes[0])

    def _parts(self, hashes: list[int]) -> Iterator[tuple[Segment, list[int]]]:
        if len(self._segments) == 1:
            if hashes:
                yield self._segments[0], hashes
            return
        sought = np.array(hashes, np.uint64)
        places = self._bounds.searchsorted(sought, "right") - 1
        for place in np.unique(places).tolist():
            yield self._segments[place], sought[places == place].tolist()


def _halves(values: list[int]) -> tuple[Blocks, Marks]:
    """Return the keys and states of values."""
    keys = np.array(array("Q", [value >> STATE_BITS for value in values]), np.uint64)
    return keys, np.frombuffer(bytes([value & _STATE_MASK for value in values]), np.uint8).astype(np.uint16)


def _listed(hashes: Blocks, keys: Blocks, marks: Marks, rows: Rows) -> list[tuple[int, int]]:
    """Return (hash, value) of some rows."""
    states = (marks.take(rows) & _STATE_MASK).tolist()
    values = [key << STATE_BITS | state for key, state in zip(keys.take(rows).tolist(), states, strict=True)]
    return list(zip(hashes.take(rows).tolist(), values, strict=True))
