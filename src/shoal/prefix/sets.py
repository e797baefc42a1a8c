"""Interned sets of endpoint slots: a row of the index names its holders by a 16-bit id.

Owns the sets, their ids and how many rows name each.  A set is an int with bit `slot` for each holder.  Which
holders are still believed is decided in `index`.
"""

import numpy as np
import numpy.typing as npt

ID_BITS = 16
MAX_SLOTS = 4096
"""Endpoints at one time.  Each may need a set of its own, whatever else is interned."""

_MAX_SHARED = (1 << ID_BITS) - MAX_SLOTS
_OVERHEAD_BYTES = 136
"""List cell, dict entry, id object, int header and count of one set."""
_SWEEP = 1024
_FEW = 8

Slots = npt.NDArray[np.intp]


def slots_of(mask: int) -> Slots:
    """Return the slots of a set, ascending."""
    raw = mask.to_bytes((mask.bit_length() + 7) >> 3, "little")
    return np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little").nonzero()[0]


def mask_of(slots: Slots, width: int) -> int:
    """Return the set of `slots`, all below `width`."""
    bits = np.zeros(width, np.uint8)
    bits[slots] = 1
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


class HolderSets:
    """Sets by id, with the number of rows that name each.  Id 0 is the empty set: a row with no holder is free.

    budget_bytes: what the sets may take in all.  When no more fit, a row keeps only its newest holder, which
    always has a set: less is known then, never more memory used.
    """

    __slots__ = ("_budget_bytes", "_cells", "_cursor", "_free", "_ids", "_limit", "_set_bytes", "masks", "rows")

    def __init__(self, budget_bytes: int, free_rows: int) -> None:
        self.masks: list[int] = [0]
        self._take_rows(np.zeros(64, np.int64))
        self.rows[0] = free_rows
        self._ids: dict[int, int] = {0: 0}
        self._free: list[int] = []
        self._cursor = 1
        self._budget_bytes = budget_bytes
        self._limit = 0
        self._set_bytes = 0
        self.widen(1)

    def __len__(self) -> int:
        return len(self._ids) - 1

    @property
    def used_bytes(self) -> int:
        """What the sets take now, counting each as large as the widest."""
        return len(self._ids) * self._set_bytes

    def widen(self, slots: int) -> None:
        """Make room for sets over `slots` slots: wider sets are larger, so fewer fit beside one for each slot alone."""
        self._set_bytes = _OVERHEAD_BYTES + 4 * (slots // 30 + 1)
        self._limit = min(_MAX_SHARED, self._budget_bytes // self._set_bytes - slots)

    def intern(self, mask: int, slot: int) -> int:
        """Return the id of `mask`, or that of `slot` alone when no further set fits."""
        found = self._ids.get(mask)
        if found is not None:
            return found
        is_single = mask & (mask - 1) == 0
        if not is_single and not self._free and len(self.masks) >= self._limit:
            self._sweep()
            if not self._free:
                return self.intern(1 << slot, slot)
        if self._free:
            made = self._free.pop()
            self.masks[made] = mask
        else:
            made = len(self.masks)
            self.masks.append(mask)
            if made >= len(self.rows):
                self._take_rows(np.concatenate((self.rows, np.zeros(len(self.rows), np.int64))))
        self._cells[made] = 0
        self._ids[mask] = made
        return made

    def _take_rows(self, rows: npt.NDArray[np.int64]) -> None:
        self.rows = rows
        # Single counts are changed through this: a fifth of the cost of numpy's indexing.
        self._cells = rows.data

    def hold(self, set_id: int, rows: int) -> None:
        """Count `rows` more that name the set; negative: fewer."""
        self._cells[set_id] += rows

    def swap(self, old_id: int, new_id: int) -> None:
        """Count one row that named one set and now names another."""
        if old_id != new_id:
            self._cells[new_id] += 1
            self._cells[old_id] -= 1

    def release(self, ids: npt.NDArray[np.intp]) -> None:
        """Count one row less for each of `ids` (one entry per row)."""
        if len(ids) <= _FEW:
            for set_id in ids.tolist():
                self.rows[set_id] -= 1
        else:
            np.subtract.at(self.rows, ids, 1)

    def _sweep(self) -> None:
        """Free sets that no row names, looking at a bounded stretch of ids from where the last look ended.

        Sets of one slot stay: they are few, and there must always be one to fall back on.
        """
        if self._cursor >= len(self.masks):
            self._cursor = 1
        stretch = self.rows[self._cursor : min(self._cursor + _SWEEP, len(self.masks))]
        for set_id in (np.flatnonzero(stretch == 0) + self._cursor).tolist():
            mask = self.masks[set_id]
            if mask & (mask - 1):
                del self._ids[mask]
                self.rows[set_id] = -1
                self._free.append(set_id)
        self._cursor += _SWEEP
