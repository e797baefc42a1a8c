"""The estimated index: which endpoint is believed to hold how much of a prompt, from what was sent where.

Owns the meaning of stamps, sets and horizons, and answers in blocks.  Where rows lie is `table`'s, how sets are stored
is `sets`', how far an endpoint remembers is `horizon`'s.  It keeps nothing per request, and is never told the time.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.kernel import InvalidInput
from shoal.prefix.handover import IndexRows, give_rows, take_rows
from shoal.prefix.hashing import REACH, SPANS, Blocks, hashes_within
from shoal.prefix.horizon import UNLIMITED, Horizons, HorizonState
from shoal.prefix.match import Expectation, Match, Run
from shoal.prefix.sets import ID_BITS, MAX_SLOTS, HolderSets
from shoal.prefix.table import ROW_BYTES, BlockTable, Entries, Rows

DEFAULT_BUDGET_BYTES = 64 << 20
"""Room for 3.6 million hashes, or 235 million tokens in short prompts and many times that in long ones: at the least
what 500 engines with 450,000 tokens of KV cache hold."""

Spans = npt.NDArray[np.int64]
"""Blocks that each of some hashes covers."""

MAX_CLOCK = 1 << 46
"""More uses than a router sees in its life; a clock beyond it is no clock."""

_ID_MASK = (1 << ID_BITS) - 1
_SETS_SHARE = 8
_STRIDE = 16
# Up to so many blocks and rows the plain way is faster than the one made for many.
_STRIDE_FROM = 96
# Up to this many hashes of a request are looked at one by one.
_FEW_BLOCKS = 32
_FIRST_SPANS: list[int] = SPANS[:_FEW_BLOCKS].tolist()
_MANY = 16


class IndexGauges(NamedTuple):
    """Size of the index.  rows: blocks known; displaced: how many were pushed out since the start by newer ones."""

    rows: int
    sets: int
    used_bytes: int
    budget_bytes: int
    displaced: int


class EstimatedIndex:
    """Block hash -> set of endpoints, within a hard budget.

    An engine frees a chain from its end, so who holds block j holds all before it: an endpoint's match is the deepest
    block that names it, and a row that was displaced in the middle costs nothing.  budget_bytes: hard for rows and sets
    together, whatever is added; the least recently used rows of a bucket give way.
    """

    __slots__ = ("_budget_bytes", "_clock", "_displaced", "_free_slots", "_horizons", "_sets", "_table")

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        sets_bytes = budget_bytes // _SETS_SHARE
        self._table = BlockTable(budget_bytes - sets_bytes)
        self._sets = HolderSets(sets_bytes, self._table.size)
        self._budget_bytes = budget_bytes
        self._clock = 1
        self._displaced = 0
        self._free_slots: list[int] = []
        self._horizons = Horizons()

    def open_slot(self) -> int:
        """Return a slot for an endpoint that joined: the lowest free one.  Raises ValueError at 4,096 endpoints."""
        if self._free_slots:
            slot = heappop(self._free_slots)
            self._horizons.reset(slot, self._clock + 1, UNLIMITED)
            return slot
        if len(self._horizons) >= MAX_SLOTS:
            raise ValueError(f"more than {MAX_SLOTS} endpoints")
        slot = self._horizons.open()
        self._sets.widen(slot + 1)
        return slot

    def remove(self, slot: int) -> None:
        """Forget an endpoint that left; its slot may be opened again."""
        self.clear(slot)
        heappush(self._free_slots, slot)

    def clear(self, slot: int) -> None:
        """Forget all that an endpoint holds and what was learnt of it, as when its engine restarted; its limit stays.

        Takes no walk over rows or sets: the horizon moves to now, and a name behind the horizon of its slot is never
        believed and is dropped when the row is next used.
        """
        self._horizons.reset(slot, self._clock + 1, self._horizons[slot].limit)

    def set_capacity(self, slot: int, blocks: int | None) -> None:
        """Set how many blocks the endpoint can hold at most (see `capacity_blocks`); None when unknown: no limit."""
        self._horizons[slot].set_limit(blocks)

    def match(self, blocks: Blocks) -> Match:
        """Return how many leading blocks of the prompt each endpoint is believed to hold."""
        count = len(blocks)
        if count <= _FEW_BLOCKS:
            keys = blocks.tolist()
            if keys and 0 not in keys:
                return self._match_few(keys)
        if np.count_nonzero(blocks) != count:
            return self._match_chains(blocks)
        found, entries = self._table.find(blocks) if count < _STRIDE_FROM else self._find_in_strides(blocks)
        if len(found) > _MANY:
            ends = _run_ends(entries[1:] != entries[:-1])
            found, entries = found[ends], entries[ends]
        return Match(REACH[count], self._believed_runs(found.tolist(), entries.tolist()), len(self._horizons))

    def _match_few(self, keys: list[int]) -> Match:
        """Match one short chain block by block: here numpy's cost per call is more than that of the work."""
        rows, cells, last = self._table.rows_of(keys), self._table.entry_cells, 0
        positions, entries = list[int](), list[int]()
        for position, row in enumerate(rows):
            if row < 0:
                continue
            entry = cells[row]
            if entry == last:
                # Of those that are alike the deepest says it all.
                positions[-1] = position
            else:
                positions.append(position)
                entries.append(entry)
                last = entry
        runs = self._believed_runs(positions, entries) if positions else []
        return Match(REACH[len(keys)], runs, len(self._horizons), keys, rows)

    def _match_chains(self, blocks: Blocks) -> Match:
        """Match a request with several prompts, each chain by itself."""
        is_block = blocks != 0
        chains = (~is_block).cumsum()[is_block]
        total = sum(REACH[count] for count in np.bincount(chains).tolist())
        found, entries = self._table.find(blocks[is_block])
        runs: list[Run] = []
        if len(found):
            depths = found - chains.searchsorted(chains[found])
            edges = (np.flatnonzero(chains[found][1:] != chains[found][:-1]) + 1).tolist()
            for start, end in zip([0, *edges], [*edges, len(found)], strict=True):
                runs += self._believed_runs(depths[start:end].tolist(), entries[start:end].tolist())
        return Match(total, runs, len(self._horizons))

    def _find_in_strides(self, blocks: Blocks) -> tuple[Rows, Entries]:
        """Find the blocks of one long chain, looking closely only where something changes.

        A later use of a chain's part touches all before it, so sets and stamps only shrink along a chain: where two
        blocks have the same entry, so have all between them.
        """
        found, entries = self._table.find(blocks[::_STRIDE])
        strides = -(-len(blocks) // _STRIDE)
        probes = np.zeros(strides + 1, np.uint64)
        probes[found] = entries
        is_wanted = np.zeros((strides, _STRIDE), np.bool_)
        is_wanted[probes[1:] != probes[:-1]] = True
        is_wanted[found, 0] = True
        wanted = is_wanted.ravel()[: len(blocks)].nonzero()[0]
        found, entries = self._table.find(blocks.take(wanted))
        return wanted.take(found), entries

    def _believed_runs(self, positions: list[int], entries: list[int]) -> list[Run]:
        """Walk one chain's rows from the deepest to the first; keep for each the holders not met deeper."""
        runs = []
        masks, latest = self._sets.masks, self._horizons.latest
        met = 0
        for position, entry in zip(reversed(positions), reversed(entries), strict=True):
            holders = masks[entry & _ID_MASK] & ~met
            if not holders:
                continue
            stamp = entry >> ID_BITS
            if stamp < latest:
                holders = self._horizons.believed(holders, stamp)
            if holders:
                met |= holders
                runs.append(Run(holders, REACH[position + 1], stamp))
        return runs

    def add(self, slot: int, blocks: Blocks, match: Match | None = None) -> None:
        """Note that a prompt was sent to `slot`: it holds all of these blocks, last used now.

        match: what `match` said of these very blocks, if nothing was added since.  Adding again is harmless.  The
        hashes of one chain are distinct, as `BlockHasher` makes them.
        """
        if match is not None and match.rows:
            keys, rows = match.keys, match.rows
        else:
            keys = blocks.tolist() if len(blocks) <= _FEW_BLOCKS else []
            # A zero parts several chains, whose spans begin anew.
            rows = self._table.rows_of(keys) if 0 not in keys else []
        if rows:
            self._clock += 1
            fresh = self._add_few(slot, keys, rows, _FIRST_SPANS)
        else:
            blocks, spans = _distinct(blocks)
            if not len(blocks):
                return
            self._clock += 1
            if len(blocks) <= _FEW_BLOCKS:
                keys = blocks.tolist()
                fresh = self._add_few(slot, keys, self._table.rows_of(keys), spans.tolist())
            else:
                fresh = self._add_many(slot, blocks, spans)
        self._horizons.advance(slot, self._clock, fresh)

    def _add_few(self, slot: int, keys: list[int], rows: list[int], spans: list[int]) -> int:
        """Name `slot` in the rows of a few blocks one by one; return to how many it is new.

        Rows that exist come first: what was used now does not give way to the new ones.  Those that follow each other
        with the same entry get the same.
        """
        table, sets, own, stamp = self._table, self._sets, 1 << slot, self._clock << ID_BITS
        cells, fresh, is_new = table.entry_cells, 0, False
        entry = made = count = 0
        for row, span in zip(rows, spans, strict=False):
            if row < 0:
                fresh += span
                continue
            if cells[row] != entry:
                sets.move(entry & _ID_MASK, made, count)
                entry, count = cells[row], 0
                holders = self._horizons.believed(sets.masks[entry & _ID_MASK], entry >> ID_BITS)
                is_new = not holders & own
                made = sets.intern(holders | own, slot)
            cells[row] = stamp | made
            count += 1
            if is_new:
                fresh += span
        sets.move(entry & _ID_MASK, made, count)
        absent = [key for key, row in zip(keys, rows, strict=True) if row < 0]
        if absent:
            made = sets.intern(own, slot)
            gave_way = [old & _ID_MASK for old in table.place_few(absent, stamp | made)]
            self._displaced += len(gave_way) - gave_way.count(0)
            sets.replace(gave_way, made)
        return fresh

    def _add_many(self, slot: int, blocks: Blocks, spans: Spans) -> int:
        """Name `slot` in the rows of many hashes at once; return to how many blocks it is new."""
        buckets, found, rows = self._table.locate(blocks)
        fresh = self._join(slot, rows, spans[found]) if len(rows) else 0
        if len(found) < len(blocks):
            if len(found):
                is_missing = np.ones(len(blocks), np.bool_)
                is_missing[found] = False
                blocks, buckets, spans = blocks[is_missing], buckets[is_missing], spans[is_missing]
            self._insert(slot, blocks, buckets)
            fresh += int(np.add.reduce(spans))
        return fresh

    def _insert(self, slot: int, blocks: Blocks, buckets: Rows) -> None:
        """Give new hashes rows that name `slot`."""
        alone = self._sets.intern(1 << slot, slot)
        gave_way = self._table.place(blocks, buckets, self._clock << ID_BITS | alone)
        self._sets.hold(alone, len(gave_way))
        free = self._sets.rows[0]
        self._sets.release((gave_way & _ID_MASK).view(np.intp))
        self._displaced += len(gave_way) - int(free - self._sets.rows[0])

    def _join(self, slot: int, rows: Rows, spans: Spans) -> int:
        """Name `slot` in rows that exist and stamp them; return to how many blocks it is new."""
        own = 1 << slot
        fresh = start = 0
        joined = []
        sets = self._sets
        runs = self._rows_by_entry(rows)
        for entry, count in runs:
            holders = self._horizons.believed(sets.masks[entry & _ID_MASK], entry >> ID_BITS)
            if not holders & own:
                fresh += int(np.add.reduce(spans[start : start + count]))
            start += count
            new = sets.intern(holders | own, slot)
            sets.hold(new, count)
            joined.append((self._clock << ID_BITS | new, count))
        self._rewrite(rows, joined)
        for entry, count in runs:
            sets.hold(entry & _ID_MASK, -count)
        return fresh

    def forget(self, slot: int, blocks: Blocks, keep: int = 0) -> None:
        """Take back an `add` that did not come true: the request never reached the endpoint.

        keep: leading blocks that were believed to be there before (the match at dispatch); deeper ones lose the name.
        Of several prompts all lose it.  Stamps stay: that a prefix was asked for is still true.
        """
        distinct, _ = _distinct(blocks)
        rows = self._table.locate(blocks[hashes_within(keep) :] if distinct is blocks else distinct).rows
        if not len(rows):
            return
        sets = self._sets
        runs = self._rows_by_entry(rows)
        left = []
        for entry, count in runs:
            others = sets.masks[entry & _ID_MASK] & ~(1 << slot)
            new = sets.intern(others, max(0, others.bit_length() - 1))
            sets.hold(new, count)
            left.append((entry & ~_ID_MASK | new, count))
        self._rewrite(rows, left)
        self._table.erase(rows[self._table.read(rows) & _ID_MASK == 0])
        for entry, count in runs:
            sets.hold(entry & _ID_MASK, -count)

    def _rows_by_entry(self, rows: Rows) -> list[tuple[int, int]]:
        """Return the runs of equal entries in `rows`, each as (entry, number of rows)."""
        entries = self._table.read(rows)
        ends = _run_ends(entries[1:] != entries[:-1])
        starts = [-1, *ends[:-1]]
        return [(entry, end - start) for entry, start, end in zip(entries[ends].tolist(), starts, ends, strict=True)]

    def _rewrite(self, rows: Rows, runs: list[tuple[int, int]]) -> None:
        """Write runs of (entry, number of rows) over `rows`."""
        if len(runs) == 1:
            self._table.write(rows, runs[0][0])
        else:
            entries = np.array([entry for entry, _ in runs], np.uint64)
            self._table.write(rows, entries.repeat([count for _, count in runs]))

    def expect(self, match: Match, slot: int) -> Expectation:
        """Return what sending the matched request to `slot` now expects; take it before `add`."""
        horizon = self._horizons[slot]
        blocks = age = 0
        for holders, depth, stamp in match.runs:
            if holders >> slot & 1:
                age = age if blocks else horizon.age(stamp)
                blocks += depth
        return Expectation(slot, horizon.epoch, blocks, match.total, age)

    def correct(self, expectation: Expectation, cached_tokens: int, prompt_tokens: int) -> None:
        """Learn from what the engine says was cached of a request that was added.

        The request's own rows need no correction: whatever was missing, the engine has just filled, and in doing so has
        pushed out as much, which is counted here.  What can be wrong is everything else believed of that endpoint, that
        is the size of its cache: generated tokens, other routers and a smaller memory than announced all push blocks
        out earlier than assumed.

        So the lesson goes to the assumed capacity.  If a block was gone although only `age` blocks came since its
        last use, the cache is worth no more than about `age` blocks, and from the second such answer in a row the
        capacity moves an eighth of the way there.  An answer about a block used just now (age under an eighth of
        the capacity) says nothing: its first prefill is still running, or another endpoint's use refreshed the
        stamp of the row they share.  Nor does a small difference, as engines count in blocks of their own and tokens
        are estimated; both sides are compared as parts of the whole prompt.  More cached than believed raises
        the capacity by a tenth, an old block found as believed by a fiftieth, never above `set_capacity`.
        """
        horizon = self._horizons[expectation.slot]
        if horizon.epoch != expectation.epoch or prompt_tokens <= 0:
            return
        cached = cached_tokens * expectation.total // prompt_tokens
        if horizon.learn(expectation.blocks, cached, expectation.age):
            self._horizons.advance(expectation.slot, self._clock, expectation.blocks - cached)

    # ------------------------------------------------------------------ handing over

    @property
    def clock(self) -> int:
        """The stamp of the last use."""
        return self._clock

    def horizon(self, slot: int) -> HorizonState:
        """Return what is known of an endpoint's memory, for another router."""
        return self._horizons[slot].state()

    def give(self, at: int, clock: int) -> tuple[IndexRows, int | None]:
        """Return rows from row `at` on, and where to go on; see `handover.give_rows`."""
        return give_rows(self._table, self._sets, self._horizons, at, clock)

    def begin_taking(self, clock: int, horizons: Sequence[tuple[int, HorizonState]]) -> None:
        """Go on from another router's clock and what it knew of endpoints, by own slot.  Raises InvalidInput."""
        if not 0 < clock < MAX_CLOCK:
            raise InvalidInput(f"the clock of a handed-over index is {clock}")
        if any(max([state.stamp, *(at for at, _ in state.marks)]) > clock + 1 for _, state in horizons):
            raise InvalidInput("a handed-over horizon is ahead of its clock")
        self._clock = max(self._clock, clock)
        for slot, state in horizons:
            self._horizons.take(slot, state)

    def take(self, rows: IndexRows, slots: Sequence[int]) -> int:
        """Add another router's rows that are not here, and return how many; see `handover.take_rows`."""
        return take_rows(self._table, self._sets, rows, slots, self._clock)

    def sent_blocks(self, slot: int) -> int:
        """Return how many blocks have come to an endpoint that were not there, since it was cleared."""
        return self._horizons[slot].total

    def capacity(self, slot: int) -> int:
        """Return how many blocks the endpoint is assumed to hold now (`UNLIMITED` when nothing is known)."""
        return self._horizons[slot].capacity

    def gauges(self) -> IndexGauges:
        """Return the size of the index."""
        rows = self._table.size - int(self._sets.rows[0])
        used = rows * ROW_BYTES + self._sets.used_bytes
        return IndexGauges(rows, len(self._sets), used, self._budget_bytes, self._displaced)


def _run_ends(is_change: npt.NDArray[np.bool_]) -> list[int]:
    """Return the last position of each run, given where a value differs from the one before it."""
    ends: list[int] = is_change.nonzero()[0].tolist()
    ends.append(len(is_change))
    return ends


def _distinct(blocks: Blocks) -> tuple[Blocks, Spans]:
    """Return the hashes without separators and what each covers; those of several chains once each, as equal prompts
    may stand in them."""
    if np.count_nonzero(blocks) == len(blocks):
        return blocks, SPANS[: len(blocks)]
    starts = np.flatnonzero(np.append(0, blocks[:-1]) == 0)
    places = np.arange(len(blocks))
    places -= starts[starts.searchsorted(places, "right") - 1]
    distinct, first = np.unique(blocks, return_index=True)
    return distinct[1:], SPANS[places[first[1:]]]
