"""From an engine's hash to what we know of the block: sorted arrays, 18 bytes a block, and a few newest in dicts.

Owns where rows lie, their age and who is let go when there are too many.  What a row's value means is `ledger`'s.
"""

from collections.abc import Iterable, Iterator

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
_MIN_RECENT = 64
_MAX_RECENT = 1024
_RECENT_SHARE = 32
_SLACK = 16
_AGES = 256
_OLD = 200
_EPOCHS = 64

Marks = npt.NDArray[np.uint16]


class Segment:
    """The rows of one range of hashes.  recent: rows of late, by hash, that are not in the arrays."""

    __slots__ = ("count", "hashes", "keys", "marks", "recent")

    def __init__(self) -> None:
        self.count = 0
        self.hashes: Blocks = np.zeros(0, np.uint64)
        self.keys: Blocks = np.zeros(0, np.uint64)
        self.marks: Marks = np.zeros(0, np.uint16)
        self.recent: dict[int, int] = {}

    @property
    def used_bytes(self) -> int:
        return len(self.hashes) * _ROW_BYTES + len(self.recent) * _RECENT_BYTES

    @property
    def is_due(self) -> bool:
        """Whether there are so many recent rows that they should be merged."""
        return len(self.recent) > min(max(self.count // _RECENT_SHARE, _MIN_RECENT), _MAX_RECENT)

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
            rows = rows[is_here]
            keys, marks = self.keys.take(rows).tolist(), self.marks.take(rows).tolist()
            for hash, key, mark in zip(sought[is_here].tolist(), keys, marks, strict=True):
                found[hash] = key << STATE_BITS | mark & _STATE_MASK

    def write(self, values: dict[int, int], hashes: Iterable[int], age: int) -> None:
        """Set the values of `hashes`."""
        recent = self.recent
        if not self.count:
            for hash in hashes:
                recent[hash] = values[hash]
            return
        others = []
        for hash in hashes:
            if hash in recent:
                recent[hash] = values[hash]
            else:
                others.append(hash)
        if not others:
            return
        sought, rows = self._rows(others)
        is_here = self.hashes.take(rows) == sought
        if not is_here.any():
            for hash in others:
                recent[hash] = values[hash]
            return
        written = []
        for hash, is_row in zip(others, is_here.tolist(), strict=True):
            if is_row:
                written.append(values[hash])
            else:
                recent[hash] = values[hash]
        rows = rows[is_here]
        self.keys[rows] = np.array([value >> STATE_BITS for value in written], np.uint64)
        self.marks[rows] = np.array([age << STATE_BITS | value & _STATE_MASK for value in written], np.uint16)

    def _rows(self, hashes: list[int]) -> tuple[Blocks, npt.NDArray[np.intp]]:
        sought = np.array(hashes, np.uint64)
        rows = self.hashes[: self.count].searchsorted(sought)
        return sought, np.minimum(rows, self.count - 1)

    def merge(self, age: int, max_rows: int, live: int) -> list[tuple[int, int]]:
        """Take the recent rows into the arrays and drop those without a state in `live`.

        age: of now, counted modulo 256.  Return (hash, value) of the oldest, let go to have at most `max_rows`.
        """
        marks = self.marks[: self.count]
        keep = (marks & live).nonzero()[0]
        added = sorted((hash, value) for hash, value in self.recent.items() if value & live)
        self.recent.clear()
        let_go: list[tuple[int, int]] = []
        excess = len(keep) + len(added) - max_rows
        if excess > 0:
            ages = (age - (marks.take(keep) >> STATE_BITS)) & (_AGES - 1)
            oldest = (-ages.astype(np.int16)).argsort(kind="stable")[:excess]
            gone = keep.take(oldest)
            states = (marks.take(gone) & _STATE_MASK).tolist()
            keys = self.keys.take(gone).tolist()
            let_go = [
                (hash, key << STATE_BITS | state)
                for hash, key, state in zip(self.hashes.take(gone).tolist(), keys, states, strict=True)
            ]
            keep = np.delete(keep, oldest)
            let_go += added[: excess - len(gone)]
            del added[: excess - len(gone)]
        self._rebuild(keep, added, age)
        return let_go

    def _rebuild(self, keep: npt.NDArray[np.intp], added: list[tuple[int, int]], age: int) -> None:
        hashes, keys, marks = self.hashes.take(keep), self.keys.take(keep), self.marks.take(keep)
        too_old = (age - (marks >> STATE_BITS)) & (_AGES - 1) > _OLD
        if too_old.any():  # ages go round: before an old row looks young again it is made a little younger
            marks[too_old] = (age - _OLD) % _AGES << STATE_BITS | marks[too_old] & _STATE_MASK
        new = np.array([hash for hash, _ in added], np.uint64)
        places = hashes.searchsorted(new)
        self.count = len(keep) + len(added)
        if self.count > len(self.hashes) or self.count < len(self.hashes) // 2:
            room = self.count + self.count // _SLACK
            self.hashes, self.keys = np.zeros(room, np.uint64), np.zeros(room, np.uint64)
            self.marks = np.zeros(room, np.uint16)
        self.hashes[: self.count] = np.insert(hashes, places, new)
        new_keys = np.array([value >> STATE_BITS for _, value in added], np.uint64)
        self.keys[: self.count] = np.insert(keys, places, new_keys)
        new_marks = np.array([age << STATE_BITS | value & _STATE_MASK for _, value in added], np.uint16)
        self.marks[: self.count] = np.insert(marks, places, new_marks)

    def split(self) -> "Segment":
        """Move the upper half of the rows to a new segment and return it; nothing may be recent."""
        half = self.count // 2
        upper = Segment()
        upper.count = self.count - half
        upper.hashes = self.hashes[half : self.count].copy()
        upper.keys, upper.marks = self.keys[half : self.count].copy(), self.marks[half : self.count].copy()
        self.count = half
        self.hashes = self.hashes[:half].copy()
        self.keys, self.marks = self.keys[:half].copy(), self.marks[:half].copy()
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

    def write(self, values: dict[int, int], hashes: list[int]) -> list[tuple[int, int]]:
        """Set the values of `hashes`; return (hash, value) of rows that are let go for want of room."""
        let_go: list[tuple[int, int]] = []
        for segment, part in list(self._parts(hashes)):
            self._until_older -= len(part)
            segment.write(values, part, self._age)
            if segment.is_due:
                fair = self._max_rows // len(self._segments)
                room = segment.count + len(segment.recent) - (len(self) - self._max_rows)
                let_go += segment.merge(self._age, max(fair, room), self._live)
                if segment.count > _MAX_SEGMENT:
                    self._split(segment)
        if self._until_older <= 0:
            self._age = (self._age + 1) % _AGES
            self._until_older = self._max_rows // _EPOCHS
        return let_go

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
