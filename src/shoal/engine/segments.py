"""A prefix cache in runs of blocks: what the block pool does, in time that does not grow with the blocks of a hit.

Prompts that begin alike share segments of a tree, as in a radix tree; a segment nobody holds waits, the least recently
released first and the tail of a prompt before its head, until its room is needed.  Owns no request.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence


class Segment:
    """Blocks that follow each other.  hashes: of the blocks from position `start` of their prompts on, () for blocks
    that cannot be found.  size: how many blocks.  pins: who holds it."""

    __slots__ = ("hashes", "parent", "pins", "size", "start")

    def __init__(self, parent: "Segment | None", start: int, hashes: tuple[int, ...], size: int, pins: int) -> None:
        self.parent = parent
        self.start = start
        self.hashes = hashes
        self.size = size
        self.pins = pins


class SegmentCache:
    """At most `capacity` blocks, held and idle together; the caller counts further ones, of its own, as `private`.

    held: blocks that somebody holds, each once.  evicted: hashes that were forgotten, for the owner to take; None when
    nobody asks for them.
    """

    __slots__ = ("_idle", "_idle_blocks", "_segment_of", "capacity", "evicted", "held", "private")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self.private = 0.0
        self.evicted: list[int] | None = None
        self._segment_of: dict[int, Segment] = {}
        self._idle: OrderedDict[Segment, None] = OrderedDict()
        self._idle_blocks = 0

    def __len__(self) -> int:
        return len(self._segment_of)

    @property
    def room(self) -> float:
        """Blocks that could be had now, those with reusable content included; below 0 when there are too few."""
        return self.capacity - self.held - self.private

    def match(self, hashes: Sequence[int], known: int = 0) -> int:
        """How many blocks of `hashes` are here: a block is here only with all before it, so halving finds the edge.

        known: how many are here for certain.
        """
        segment_of = self._segment_of
        low, high = known, len(hashes)
        while low < high:
            middle = (low + high + 1) >> 1
            if hashes[middle - 1] in segment_of:
                low = middle
            else:
                high = middle - 1
        return low

    def idle_of(self, hashes: Sequence[int], count: int) -> int:
        """How many of the first `count` blocks, which are here, nobody holds."""
        idle = 0
        segment = self._segment_of[hashes[count - 1]] if count else None
        while segment is not None and not segment.pins:
            idle += min(segment.size, count - segment.start)
            segment = segment.parent
        return idle

    def hold(self, hashes: tuple[int, ...], count: int) -> Segment | None:
        """Hold the blocks of `hashes`, of which the first `count` are here; returns the last segment, to release it.

        The caller has seen that there is room.
        """
        last = self._cut(hashes, count) if count else None
        segment = last
        while segment is not None:
            if not segment.pins:
                del self._idle[segment]
                self._idle_blocks -= segment.size
                self.held += segment.size
            segment.pins += 1
            segment = segment.parent
        if count < len(hashes):
            own = hashes[count:]
            last = Segment(last, count, own, len(own), 1)
            self._segment_of.update(dict.fromkeys(own, last))
            self.held += len(own)
        self.make_room()
        return last

    def release(self, last: Segment | None, further: int) -> None:
        """Let go of what `hold` returned, and of `further` blocks that were private: they wait until needed, too."""
        if further:
            self._rest(Segment(None, 0, (), further, 0))
        while last is not None:
            last.pins -= 1
            if not last.pins:
                self.held -= last.size
                self._rest(last)
            last = last.parent
        self.make_room()

    def make_room(self) -> None:
        """Forget idle blocks until all fit."""
        over = self._idle_blocks + self.held + self.private - self.capacity
        if over <= 0:
            return
        excess = math.ceil(over)
        while excess > 0 and self._idle:
            segment = next(iter(self._idle))
            count = min(segment.size, excess)
            kept = len(segment.hashes) - count if segment.hashes else 0
            gone = segment.hashes[kept:]
            for block_hash in gone:
                del self._segment_of[block_hash]
            if self.evicted is not None:
                self.evicted += reversed(gone)
            segment.hashes = segment.hashes[:kept]
            segment.size -= count
            self._idle_blocks -= count
            excess -= count
            if not segment.size:
                del self._idle[segment]

    def _rest(self, segment: Segment) -> None:
        self._idle[segment] = None
        self._idle_blocks += segment.size

    def _cut(self, hashes: Sequence[int], count: int) -> Segment:
        """Return the segment that ends after `count` blocks, cut off a longer one where it must be."""
        tail = self._segment_of[hashes[count - 1]]
        length = count - tail.start
        if length == tail.size:
            return tail
        head = Segment(tail.parent, tail.start, tail.hashes[:length], length, tail.pins)
        tail.parent, tail.start = head, count
        tail.hashes, tail.size = tail.hashes[length:], tail.size - length
        self._segment_of.update(dict.fromkeys(head.hashes, head))
        if not head.pins:
            # The head is as old as the tail, and leaves after it.
            self._idle[head] = None
        return head
