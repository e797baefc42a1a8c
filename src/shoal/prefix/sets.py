"""Interned sets of holders: a row of an index names its holders by a 16-bit id.

Owns the sets, their ids and how many rows name each.  A set is an int with a bit for each holder: an endpoint's slot in
`index`, a slot and a tier in `exact`.  Which holders are still believed is decided there.
"""

import numpy as np
import numpy.typing as npt

ID_BITS = 16
MAX_SLOTS = 4096
"""Endpoints at one time.  Each may need a set of its own, whatever else is interned."""

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
    always has a set: less is known then, never more memory used.  max_holders: bits that a set may have.  dead: bits
    that `retire` took out of all sets, to be left out by readers until `wash` has come by.
    """

    __slots__ = (
        "_budget_bytes",
        "_cells",
        "_cursor",
        "_free",
        "_ids",
        "_limit",
        "_max_shared",
        "_retired",
        "_set_bytes",
        "_washed",
        "_washing",
        "dead",
        "masks",
        "rows",
    )

    def __init__(self, budget_bytes: int, free_rows: int, max_holders: int = MAX_SLOTS) -> None:
        self.masks: list[int] = [0]
        self._take_rows(np.zeros(64, np.int64))
        self.rows[0] = free_rows
        self._ids: dict[int, int] = {0: 0}
        self._free: list[int] = []
        self._cursor = 1
        self._budget_bytes = budget_bytes
        self._limit = 0
        self._max_shared = (1 << ID_BITS) - max_holders
        self._set_bytes = 0
        self.dead = self._washing = self._retired = 0
        self._washed = 1
        self.widen(1)

    def __len__(self) -> int:
        return len(self.masks) - len(self._free) - 1

    @property
    def used_bytes(self) -> int:
        """What the sets take now, counting each as large as the widest."""
        return (len(self) + 1) * self._set_bytes

    def widen(self, holders: int, alone: int | None = None) -> None:
        """Make room for sets over so many holders: wider sets are larger, so fewer fit.

        alone: how many holders may need a set for each alone, all of them by default; the rest is for sets of several.
        """
        self._set_bytes = _OVERHEAD_BYTES + 4 * (holders // 30 + 1)
        reserved = holders if alone is None else alone
        self._limit = min(self._max_shared, self._budget_bytes // self._set_bytes - reserved)

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

    def move(self, old_id: int, new_id: int, rows: int) -> None:
        """Count `rows` that named one set and now name another."""
        self._cells[new_id] += rows
        self._cells[old_id] -= rows

    def replace(self, old_ids: list[int], new_id: int) -> None:
        """Count a row for each of `old_ids` that named that set and now names another."""
        cells = self._cells
        cells[new_id] += len(old_ids)
        for old_id in old_ids:
            cells[old_id] -= 1

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
            if mask & (mask - 1) or not mask:
                self._drop(set_id)
        self._cursor += _SWEEP

    def _drop(self, set_id: int) -> None:
        """Free a set that no row names."""
        mask = self.masks[set_id]
        if self._ids.get(mask) == set_id:
            del self._ids[mask]
        self.masks[set_id] = 0
        self.rows[set_id] = -1
        self._free.append(set_id)

    def retire(self, holders: int) -> None:
        """Take holders out of every set at once: they are `dead` until `wash` says that no set names them."""
        self.dead |= holders
        self._retired |= holders

    def wash(self, count: int) -> int:
        """Take dead holders out of up to `count` sets; return those that no set names any longer, for another use.

        What was retired during a round waits for the next one.
        """
        if not self._washing:
            self._washing, self._retired, self._washed = self._retired, 0, 1
        end = min(self._washed + count, len(self.masks))
        for set_id in range(self._washed, end):
            if self.masks[set_id] & self._washing:
                self._take_out(set_id, self._washing)
        self._washed = end
        if end < len(self.masks):
            return 0
        done, self._washing = self._washing, 0
        self.dead &= ~done
        return done

    def _take_out(self, set_id: int, holders: int) -> None:
        """Make one set smaller.  Where another has the same holders then, both stay until no row names them."""
        mask = self.masks[set_id]
        if self._ids.get(mask) == set_id:
            del self._ids[mask]
        mask &= ~holders
        self.masks[set_id] = mask
        if mask:
            self._ids.setdefault(mask, set_id)
        elif self.rows[set_id] == 0:
            self._drop(set_id)
