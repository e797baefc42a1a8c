"""Handing the estimated index from one router to another that begins: its rows and horizons, in parts.

Owns the form of the parts and their checks.  Rows keep the stamps of the giver, so which is older stays true; a set of
endpoints is written in the giver's slots, and the taker says which of its own slots each of them is.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from shoal.kernel import InvalidInput
from shoal.prefix.hashing import Blocks
from shoal.prefix.horizon import Horizons
from shoal.prefix.sets import ID_BITS, MAX_SLOTS, HolderSets, mask_of, slots_of
from shoal.prefix.table import BlockTable, Entries, Rows

ROWS_PER_PART = 4096
"""Rows with a holder in one part: 80 KB, and under a millisecond for the giver."""

SCAN_ROWS = 1 << 20
"""Rows looked at for one part, most of which may be free: 8 MB of memory, 2 ms."""

_STEP_ROWS = 1 << 15
_ID_MASK = (1 << ID_BITS) - 1
_MAX_STAMP = 1 << 47
_KEY_BYTES = 8


class IndexRows(msgspec.Struct, frozen=True, array_like=True):
    """Some rows of an index.

    keys: block hashes, 8 bytes little-endian each.  stamps: of their last use, 8 bytes little-endian each.  holders:
    the place in `sets` of each, 2 bytes little-endian.  sets: endpoints as bits by slot, little-endian.
    """

    keys: Annotated[bytes, msgspec.Meta(max_length=ROWS_PER_PART * _KEY_BYTES)] = b""
    stamps: Annotated[bytes, msgspec.Meta(max_length=ROWS_PER_PART * _KEY_BYTES)] = b""
    holders: Annotated[bytes, msgspec.Meta(max_length=ROWS_PER_PART * 2)] = b""
    sets: tuple[Annotated[bytes, msgspec.Meta(max_length=MAX_SLOTS // 8)], ...] = ()


def give_rows(
    table: BlockTable, sets: HolderSets, horizons: Horizons, at: int, clock: int
) -> tuple[IndexRows, int | None]:
    """Return the next rows from row `at` on, and where to go on, None at the end.

    clock: the giver's when it began; a slot that was cleared or given to another endpoint since is left out.
    """
    places, end = _next_rows(table, at)
    keys, entries = table.cut(at, end)
    keys, entries = keys[places], entries[places]
    ids, holders = np.unique((entries & np.uint64(_ID_MASK)).astype(np.uint16), return_inverse=True)
    gone = horizons.later_than(clock)
    masks = [sets.masks[each] & ~gone for each in ids.tolist()]
    rows = IndexRows(
        keys.astype("<u8").tobytes(),
        np.minimum(entries >> np.uint64(ID_BITS), np.uint64(clock)).astype("<u8").tobytes(),
        holders.astype("<u2").tobytes(),
        tuple([mask.to_bytes((mask.bit_length() + 7) >> 3, "little") for mask in masks]),
    )
    return rows, end if end < table.size else None


def _next_rows(table: BlockTable, at: int) -> tuple[Rows, int]:
    """Return the places of the next rows that are not free, counted from `at`, and where the look ended."""
    found: list[Rows] = []
    count, end = 0, at
    while count < ROWS_PER_PART and end < min(at + SCAN_ROWS, table.size):
        start, end = end, min(end + _STEP_ROWS, table.size)
        found.append(table.cut(start, end)[1].nonzero()[0] + (start - at))
        count += len(found[-1])
    places = np.concatenate(found) if found else np.zeros(0, np.intp)
    if count > ROWS_PER_PART:
        places = places[:ROWS_PER_PART]
        end = at + int(places[-1]) + 1
    return places, end


def take_rows(table: BlockTable, sets: HolderSets, rows: IndexRows, slots: Sequence[int], clock: int) -> int:
    """Add rows to a table that does not have them; return how many found room.

    slots: the taker's slot for each of the giver's, -1 for none.  clock: no row is younger.  Raises InvalidInput.
    """
    count = len(rows.keys) // _KEY_BYTES
    if len(rows.keys) % _KEY_BYTES or len(rows.stamps) != len(rows.keys) or len(rows.holders) != 2 * count:
        raise InvalidInput("the columns of handed-over index rows are of different lengths")
    keys = np.frombuffer(rows.keys, "<u8").astype(np.uint64)
    stamps = np.frombuffer(rows.stamps, "<u8").astype(np.uint64)
    holders = np.frombuffer(rows.holders, "<u2").astype(np.intp)
    if count and (int(holders.max()) >= len(rows.sets) or int(stamps.max()) > min(clock, _MAX_STAMP)):
        raise InvalidInput("handed-over index rows name a set or a time that there is not")
    taken = 0
    for place, raw in enumerate(rows.sets):
        mine = _translated(raw, slots)
        if not mine:
            continue
        is_here = (holders == place) & (keys != 0) & (stamps != 0)
        wanted, entries = keys[is_here], stamps[is_here] << np.uint64(ID_BITS)
        if not len(wanted):
            continue
        set_id = sets.intern(mine, (mine & -mine).bit_length() - 1)
        taken += _insert(table, sets, wanted, entries | np.uint64(set_id), set_id)
    return taken


def _insert(table: BlockTable, sets: HolderSets, keys: Blocks, entries: Entries, set_id: int) -> int:
    """Give rows to those of `keys` that have none, all with the same set."""
    keys, first = np.unique(keys, return_index=True)
    is_new = np.ones(len(keys), np.bool_)
    is_new[table.locate(keys).found] = False
    gave_way = table.adopt(keys[is_new], entries[first[is_new]])
    sets.hold(set_id, len(gave_way))
    sets.release((gave_way & np.uint64(_ID_MASK)).astype(np.intp))
    return len(gave_way)


def _translated(raw: bytes, slots: Sequence[int]) -> int:
    """Return the giver's set in the taker's slots."""
    mine = [slots[each] for each in slots_of(int.from_bytes(raw, "little")).tolist() if each < len(slots)]
    known = sorted({each for each in mine if each >= 0})
    return mask_of(np.array(known, np.intp), known[-1] + 1) if known else 0
