"""From an engine's hash to what we know of the block: sorted arrays, 18 bytes a block, the newest ones apart.

Owns where rows lie, their age and who is let go when there are too many.  What keys and states mean is `ledger`'s.
"""

from collections.abc import Iterator
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.prefix.hashing import Blocks

STATE_BITS = 8
"""States are numbers below 2**8."""

_STATE_MASK = np.uint16((1 << STATE_BITS) - 1)
BOUND_BYTES = 24
"""What a row takes at most, with spare room and the newest rows of its segment."""

_ROW_BYTES = 18

# A segment is merged as a whole, so its size bounds how long that may take: under 2 ms.
_MAX_SEGMENT = 1 << 16
_MIN_RECENT = 256
_MAX_RECENT = 2048
_RECENT_SHARE = 16
_SLACK = 4
_MAPPED_ROWS = 1 << 13
_OWN = MAP_PRIVATE | MAP_ANONYMOUS
_AGES = 256
_OLD = 200
_EPOCHS = 64

Marks = npt.NDArray[np.uint16]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]


class Known(NamedTuple):
    """What is known of some hashes, in their order; key and state are 0 where `is_known` is False."""

    is_known: Flags
    keys: Blocks
    states: Marks


class Listed(NamedTuple):
    """Rows.  hashes: distinct."""

    hashes: Blocks
    keys: Blocks
    states: Marks

    def take(self, places: Rows) -> "Listed":
        """Return some of them."""
        return Listed(self.hashes.take(places), self.keys.take(places), self.states.take(places))

    def cut(self, start: int, end: int) -> "Listed":
        """Return those from one place to another."""
        return Listed(self.hashes[start:end], self.keys[start:end], self.states[start:end])

    def join(self, other: "Listed") -> "Listed":
        """Return these and others."""
        return Listed(
            np.concatenate((self.hashes, other.hashes)),
            np.concatenate((self.keys, other.keys)),
            np.concatenate((self.states, other.states)),
        )


NOTHING = Listed(np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(0, np.uint16))


class Segment:
    """The rows of one range of hashes, in order.  marks: state and age.  recent: rows of late, in order as well, that
    are not in the arrays."""

    __slots__ = ("count", "hashes", "keys", "marks", "recent")

    def __init__(self) -> None:
        self.count = 0
        self.recent = NOTHING
        self._make_room(0)

    def __len__(self) -> int:
        return self.count + len(self.recent.hashes)

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

    def look_up(self, sought: Blocks) -> Known:
        """Return what is known of these hashes."""
        count = len(sought)
        known = Known(np.zeros(count, np.bool_), np.zeros(count, np.uint64), np.zeros(count, np.uint16))
        for hashes, keys, marks in self._parts():
            rows, here = _rows(hashes, sought)
            if len(here):
                known.is_known[here] = True
                known.keys[here] = keys.take(rows)
                known.states[here] = marks.take(rows) & _STATE_MASK
        return known

    def write(self, rows: Listed, age: int) -> None:
        """Give rows that are known another key and state."""
        for hashes, keys, marks in self._parts():
            found, here = _rows(hashes, rows.hashes)
            if len(here):
                keys[found] = rows.keys.take(here)
                marks[found] = rows.states.take(here) | np.uint16(age << STATE_BITS)

    def _parts(self) -> Iterator[tuple[Blocks, Blocks, Marks]]:
        count = self.count
        if count:
            yield self.hashes[:count], self.keys[:count], self.marks[:count]
        if len(self.recent.hashes):
            yield self.recent

    def add(self, rows: Listed) -> bool:
        """Take rows that are not known.  Returns whether it is time to merge them into the arrays."""
        if len(self.recent.hashes):
            rows = self.recent.join(rows)
        self.recent = rows = rows.take(rows.hashes.argsort())
        return len(rows.hashes) > min(max(self.count // _RECENT_SHARE, _MIN_RECENT), _MAX_RECENT)

    def merge(self, age: int, max_rows: int, live: int) -> Listed:
        """Take the recent rows into the arrays and drop those without a state in `live`.

        age: of now, counted modulo 256.  Return the oldest, let go to have at most `max_rows`.
        """
        marks = self.marks[: self.count]
        keep = (marks & live).nonzero()[0]
        recent, self.recent = self.recent, NOTHING
        recent = recent._replace(states=recent.states & _STATE_MASK)
        order = (recent.states & live).nonzero()[0]
        let_go = NOTHING
        excess = len(keep) + len(order) - max_rows
        if excess > 0:
            ages = (age - (marks.take(keep) >> STATE_BITS)) & (_AGES - 1)
            oldest = (-ages.astype(np.int16)).argsort(kind="stable")[:excess]
            let_go = Listed(self.hashes, self.keys, marks).take(keep.take(oldest))
            keep = np.delete(keep, oldest)
            rest = excess - len(oldest)
            let_go = let_go.join(recent.take(order[:rest]))
            let_go = let_go._replace(states=let_go.states & _STATE_MASK)
            order = order[rest:]
        self._rebuild(keep, recent.take(order), age)
        return let_go

    def _rebuild(self, keep: Rows, added: Listed, age: int) -> None:
        """Have the rows `keep` and new ones, both in order, and nothing else."""
        hashes, keys, marks = self.hashes.take(keep), self.keys.take(keep), self.marks.take(keep)
        too_old = (age - (marks >> STATE_BITS)) & (_AGES - 1) > _OLD
        if too_old.any():  # ages go round: before an old row looks young again it is made a little younger
            marks[too_old] = (age - _OLD) % _AGES << STATE_BITS | marks[too_old] & _STATE_MASK
        self.count = count = len(keep) + len(added.hashes)
        if count > len(self.hashes) or count < len(self.hashes) // 2:
            self._make_room(count + count // _SLACK)
        places = hashes.searchsorted(added.hashes)
        places += np.arange(len(places))
        is_old = np.ones(count, np.bool_)
        is_old[places] = False
        olds = is_old.nonzero()[0]
        self.hashes[olds], self.hashes[places] = hashes, added.hashes
        self.keys[olds], self.keys[places] = keys, added.keys
        self.marks[olds], self.marks[places] = marks, added.states | np.uint16(age << STATE_BITS)

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
    """Engine hash -> key and state, for at most about `max_rows` rows.

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
        return len(self) * _ROW_BYTES

    def __len__(self) -> int:
        """Rows, those without a live state too until they are merged away."""
        return sum(map(len, self._segments))

    def look_up(self, hashes: Blocks) -> Known:
        """Return what is known of these hashes."""
        if len(self._segments) == 1:
            return self._segments[0].look_up(hashes)
        order = hashes.argsort()
        places = np.empty(len(hashes), np.intp)
        places[order] = np.arange(len(hashes))
        hashes = hashes.take(order)
        found = [segment.look_up(hashes[start:end]) for segment, start, end in self._stretches(hashes)]
        flags, keys, states = zip(*found, strict=True)
        return Known(
            np.concatenate(flags).take(places), np.concatenate(keys).take(places), np.concatenate(states).take(places)
        )

    def write(self, rows: Listed) -> None:
        """Give rows that `look_up` found another key and state."""
        for segment, mine in self._shares(rows):
            segment.write(mine, self._age)

    def add(self, rows: Listed) -> Listed:
        """Take rows that `look_up` did not find; return those that are let go for want of room."""
        let_go = NOTHING
        for segment, mine in self._shares(rows):
            if segment.add(mine):
                fair = self._max_rows // len(self._segments)
                room = len(segment) - (len(self) - self._max_rows)
                gone = segment.merge(self._age, max(fair, room), self._live)
                let_go = let_go.join(gone) if len(gone.hashes) else let_go
                if segment.count > _MAX_SEGMENT:
                    self._split(segment)
        self._until_older -= len(rows.hashes)
        if self._until_older <= 0:
            self._age = (self._age + 1) % _AGES
            self._until_older = self._max_rows // _EPOCHS
        return let_go

    def _shares(self, rows: Listed) -> list[tuple[Segment, Listed]]:
        """Return the rows of each segment that has some of them."""
        if len(self._segments) == 1:
            return [(self._segments[0], rows)] if len(rows.hashes) else []
        rows = rows.take(rows.hashes.argsort())
        return [(segment, rows.cut(start, end)) for segment, start, end in self._stretches(rows.hashes)]

    def _split(self, segment: Segment) -> None:
        upper = segment.split()
        place = self._segments.index(segment) + 1
        self._segments.insert(place, upper)
        self._bounds = np.insert(self._bounds, place, upper.hashes[0])

    def _stretches(self, hashes: Blocks) -> list[tuple[Segment, int, int]]:
        """Return each segment that has some of these hashes, which are in order, and which ones."""
        ends = [*hashes.searchsorted(self._bounds[1:]).tolist(), len(hashes)]
        starts = [0, *ends[:-1]]
        return [each for each in zip(self._segments, starts, ends, strict=True) if each[1] < each[2]]


def _rows(hashes: Blocks, sought: Blocks) -> tuple[Rows, Rows]:
    """Return where `sought` lie in `hashes`, which are in order, and which of them do."""
    rows = hashes.searchsorted(sought)
    np.minimum(rows, len(hashes) - 1, out=rows)
    here: Rows = (hashes.take(rows) == sought).nonzero()[0]
    return rows.take(here), here
