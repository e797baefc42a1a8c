"""What one publisher of KV events holds: its own hashes turned into our keys, copies counted, orphans joined.

Owns the meaning of stores and removes: when a block is gone, what a second store of a block is.  Which events count is
`intake`'s; rows lie in `hashmap`, blocks with unknown parents in `orphans`.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple, cast

import msgspec
import numpy as np

from shoal.pool.kvevents import KvCleared, KvEvent, KvRemoved, KvStored, Tier
from shoal.prefix.hashing import Blocks
from shoal.prefix.hashmap import BOUND_BYTES, STATE_BITS, HashMap, Listed, Marks
from shoal.prefix.intake import GROWS, LOSES, ROOT, Batch, Intake
from shoal.prefix.match import TIERS
from shoal.prefix.orphans import BLOCK_BYTES, Orphans, Run
from shoal.prefix.plain import Turns, numbers_of, read_plain
from shoal.prefix.tokens import TokenHasher

DEFAULT_LEDGER_BYTES = 16 << 20
"""Room for 560,000 blocks; it is taken as blocks come."""

_WORD = (1 << 64) - 1
_TIER_MASK = (1 << len(TIERS)) - 1
_HAS_COPIES = 1 << len(TIERS)
_TIER_NUMBER = {tier: number for number, tier in enumerate(TIERS)}
_GPU = _TIER_NUMBER[Tier.GPU]
_TIER_BITS = 3
# Of the budget: one part in so many for orphans, and for counts of copies, which take so many bytes each.
_ORPHANS_SHARE = 8
_COPIES_SHARE = 16
_COPY_BYTES = 150
_STATE_MASK = (1 << STATE_BITS) - 1
# Fewer blocks are taken one by one: then the calls of numpy cost more than the work.
_FEW = 12


class Stored(NamedTuple):
    """The publisher holds these blocks now.  keys: 8 bytes little-endian each, in no order."""

    keys: bytes
    tier: Tier
    block_size_tokens: int


class Removed(NamedTuple):
    """The publisher holds these blocks no longer on that tier."""

    keys: bytes
    tier: Tier


class Cleared(NamedTuple):
    """All that the publisher held before is gone."""


Change = Stored | Removed | Cleared


class LedgerGauges(msgspec.Struct, frozen=True):
    """Size of a ledger, and counts since its beginning, in blocks but for `other_groups` and `unreadable` (events).

    orphans: wait for what comes before them.  joined: of them those that found it; lost_orphans: were let go for want
    of room.  let_go: known blocks that were.  other_groups: sparse, or not the group that is followed.
    unknown_removes: of blocks that were not known.  uncounted: further copies beyond what is counted.
    """

    blocks: int
    orphans: int
    used_bytes: int
    joined: int = 0
    lost_orphans: int = 0
    let_go: int = 0
    other_groups: int = 0
    unreadable: int = 0
    unknown_removes: int = 0
    uncounted: int = 0


class Ledger:
    """Turns the events of one publisher (an endpoint's rank) into changes of what is held, in our keys.

    hasher: of the pool.  model: as the engines name it.  max_bytes: hard; beyond it the oldest blocks are let go, as
    changes say.

    A store of a block that is held already is a further copy, and as many removes end it: engines do keep two copies of
    equal blocks, and remove each.  It is none where a run from the first block of a prompt on repeats blocks that are
    on the GPU: an engine that has them would have used them, so this is a report (`kv_cache_report_mode=full`), to
    which no remove belongs; counted, it would keep the block for ever.  Equal first blocks that were computed side by
    side look the same, and are believed gone with the first copy.
    """

    __slots__ = (
        "_befores",
        "_copies",
        "_counts",
        "_hasher",
        "_intake",
        "_map",
        "_max_copies",
        "_model",
        "_orphans",
        "_rows",
    )

    def __init__(self, hasher: TokenHasher, model: str, max_bytes: int = DEFAULT_LEDGER_BYTES) -> None:
        self._hasher = hasher
        self._model = model
        shares = max_bytes // _ORPHANS_SHARE, max_bytes // _COPIES_SHARE
        self._map = HashMap((max_bytes - sum(shares)) // BOUND_BYTES, _TIER_MASK)
        self._orphans = Orphans(shares[0] // BLOCK_BYTES)
        self._max_copies = shares[1] // _COPY_BYTES
        self._copies: dict[int, int] = {}
        self._intake = Intake()
        self._rows: dict[int, int] = {}
        self._befores: dict[int, int] = {}
        self._counts = dict.fromkeys(("joined", "let_go", "unknown_removes", "uncounted"), 0)

    def apply(self, events: Iterable[KvEvent]) -> list[Change]:
        """Return what these events, in order, change in all: at most one change per kind and tier.

        Many events at once cost far less than one by one.
        """
        events = list(events)
        is_cleared = KvCleared in map(type, events)
        if is_cleared:
            # What came before the last of them is over.
            del events[: len(events) - list(map(type, reversed(events))).index(KvCleared)]
            self._clear()
        batch = self._intake.read(cast("list[KvStored | KvRemoved]", events))
        digests = self._digests(batch)
        turns: list[Turns] = []
        rest: Collection[int] = range(len(batch.events))
        if len(batch.hashes) >= _FEW and not self._orphans.is_waiting:
            rest = self._take_plain(batch, digests, turns)
        if rest:
            self._take_each(batch, digests, rest, turns)
        return [Cleared()] * is_cleared + self._changes(turns)

    def _digests(self, batch: Batch) -> Blocks:
        """Return the digests of all blocks that come with tokens, one event after the other."""
        if not batch.ids:
            return np.zeros(0, np.uint64)
        digests = self._hasher.digests(np.frombuffer(batch.ids, np.uint32), self._intake.block_size)
        for place, event in batch.extras:
            for number, extra in enumerate((event.extras or [])[: len(event.hashes)], place):
                if extra:
                    digests[number] ^= np.uint64(self._hasher.extra_digest(extra))
        return digests

    def _take_plain(self, batch: Batch, digests: Blocks, turns: list[Turns]) -> list[int]:
        """Take the plain events of a batch; return the numbers of the others."""
        numbers = numbers_of(batch)
        known = self._map.look_up(np.concatenate((numbers.hashes, numbers.parents)))
        seeds = np.zeros(len(batch.events), np.uint64)
        for number in (numbers.roots & numbers.grows).nonzero()[0].tolist():
            seeds[number] = self._seed(batch.events[number])
        is_done, found, is_new = read_plain(numbers, digests, seeds, known, self._hasher, _HAS_COPIES)
        turns.append(found)
        rows = Listed(found.hashes, found.keys, found.afters)
        if not is_new.all():
            self._map.write(rows.take((~is_new).nonzero()[0]))
            rows = rows.take(is_new.nonzero()[0])
        self._let_go(self._map.add(rows), turns)
        return [] if is_done.all() else (~is_done).nonzero()[0].tolist()

    def _take_each(self, batch: Batch, digests: Blocks, numbers: Collection[int], turns: list[Turns]) -> None:
        """Take events one by one."""
        starts = [
            0,
            *accumulate(count if code & GROWS else 0 for code, count in zip(batch.codes, batch.counts, strict=True)),
        ]
        sought: set[int] = set()
        for number in numbers:
            sought.update(batch.events[number].hashes)
            if not batch.codes[number] & (ROOT | LOSES):
                sought.add(batch.parents[number])
        self._look_up(sought)
        for number in numbers:
            event = batch.events[number]
            if isinstance(event, KvRemoved):
                self._remove(event)
            elif event.tokens:
                self._store(event, digests[starts[number] : starts[number + 1]].tolist())
            else:
                self._store_known(event.hashes, _TIER_NUMBER[event.tier])
        rows, befores = self._rows, self._befores
        self._rows, self._befores = {}, {}
        olds = [hash for hash, before in befores.items() if before]
        if olds:
            was, now = _listed(olds, befores), _listed(olds, rows)
            is_same = was.keys == now.keys
            turns.append(Turns(was.hashes, was.keys, was.states, now.states * is_same))
            turns.append(Turns(now.hashes, now.keys, now.states * 0, now.states * ~is_same))
            self._map.write(now)
        news = [hash for hash, before in befores.items() if not before]
        if news:
            added = _listed(news, rows)
            turns.append(Turns(added.hashes, added.keys, added.states * 0, added.states))
            self._let_go(self._map.add(added), turns)

    def _look_up(self, hashes: Collection[int]) -> None:
        """Have the rows of these hashes among those that events change."""
        sought = np.array(array("Q", hashes))
        known = self._map.look_up(sought)
        found = known.is_known.nonzero()[0]
        keys, states = known.keys.take(found).tolist(), known.states.take(found).tolist()
        for hash, key, state in zip(sought.take(found).tolist(), keys, states, strict=True):
            self._rows[hash] = key << STATE_BITS | state

    def _let_go(self, gone: Listed, turns: list[Turns]) -> None:
        """Note rows that were let go; those that have just been changed were never held, as far as is told."""
        if not len(gone.hashes):
            return
        self._counts["let_go"] += len(gone.hashes)
        for hash in gone.hashes.tolist() if self._copies else ():
            self._forget_copies(hash)
        is_turned = np.zeros(len(gone.hashes), np.bool_)
        for number, turn in enumerate(turns):
            is_turned |= np.isin(gone.hashes, turn.hashes)
            turns[number] = turn._replace(afters=turn.afters * ~np.isin(turn.hashes, gone.hashes))
        others = gone.take((~is_turned).nonzero()[0])
        turns.append(Turns(others.hashes, others.keys, others.states, others.states * 0))

    def _changes(self, turns: list[Turns]) -> list[Change]:
        """Return what turns come to."""
        if not turns:
            return []
        _, keys, befores, afters = turns[0] if len(turns) == 1 else map(np.concatenate, zip(*turns, strict=True))
        changes: list[Change] = []
        if befores.any():
            changes += [Removed(mine, tier) for tier, mine in _by_tier(keys, befores & ~afters)]
            afters = afters & ~befores
        changes += [Stored(mine, tier, self._intake.block_size) for tier, mine in _by_tier(keys, afters)]
        return changes

    def _seed(self, event: KvStored | KvRemoved) -> int:
        """Return the key that the first blocks of prompts follow."""
        assert isinstance(event, KvStored)
        return self._hasher.seed(self._model, event.lora, event.block_size)

    def _store(self, event: KvStored, digests: list[int]) -> None:
        tier = _TIER_NUMBER[event.tier]
        parent = event.parent
        if parent is None:
            key = self._seed(event)
        else:
            value = self._rows.get(parent)
            if value is None:
                self._store_known(event.hashes, tier)
                self._orphans.wait(parent, Run(event.hashes, digests))
                return
            key = value >> STATE_BITS
        self._chain(event.hashes, digests, key, tier, 1 << tier, may_report=parent is None and tier == _GPU)
        if self._orphans.is_waiting:
            self._join(event.hashes)

    def _chain(
        self, hashes: list[int], digests: list[int], key: int, tier: int, bit: int, *, may_report: bool = False
    ) -> None:
        """Note a run that follows the key `key`.  bit: of its tier, 0 when only its keys are to be known."""
        rows, befores, factor = self._rows, self._befores, self._hasher.factor
        if len(hashes) > 1 and rows.keys().isdisjoint(hashes):
            befores.update(dict.fromkeys(hashes, 0))
            keys = self._hasher.step(key, digests)
            rows.update(zip(hashes, [key << STATE_BITS | bit for key in keys], strict=True))
            return
        for hash, digest in zip(hashes, digests, strict=True):
            key = (key * factor + digest) & _WORD
            value = rows.get(hash)
            if value is None:
                befores[hash] = 0
                rows[hash] = key << STATE_BITS | bit
                may_report = False
            elif value >> STATE_BITS != key:
                self._forget_copies(hash)
                befores.setdefault(hash, value)
                rows[hash] = key << STATE_BITS | bit
                may_report = False
            elif not value & bit:
                befores.setdefault(hash, value)
                rows[hash] = value | bit
                may_report = False
            elif not may_report:
                self._copy(hash, tier, 1)

    def _store_known(self, hashes: list[int], tier: int) -> None:
        """Note blocks by their hashes alone; those that are not known wait."""
        bit = 1 << tier
        for hash in hashes:
            value = self._rows.get(hash)
            if value is None:
                self._orphans.hold(hash, tier)
            elif value & bit:
                self._copy(hash, tier, 1)
            else:
                self._befores.setdefault(hash, value)
                self._rows[hash] = value | bit

    def _join(self, hashes: list[int]) -> None:
        """Note what waited for these blocks, which are known now, and what waited for that."""
        known = list(hashes)
        while known:
            hash = known.pop()
            for tier, count in self._orphans.claim(hash):
                value = self._rows[hash]
                if not value & 1 << tier:
                    self._befores.setdefault(hash, value)
                    self._rows[hash] = value | 1 << tier
                    self._counts["joined"] += 1
                    count -= 1
                if count:
                    self._copy(hash, tier, count)
            for run in self._orphans.children(hash):
                missing = [each for each in run.hashes if each not in self._rows]
                self._look_up(missing)
                self._chain(run.hashes, run.digests, self._rows[hash] >> STATE_BITS, 0, 0)
                known += run.hashes

    def _copy(self, hash: int, tier: int, count: int) -> None:
        """Count further copies of a block that is held."""
        place = hash << _TIER_BITS | tier
        copies = self._copies.get(place, 0)
        if not copies:
            if len(self._copies) >= self._max_copies:
                self._counts["uncounted"] += count
                return
            self._befores.setdefault(hash, self._rows[hash])
            self._rows[hash] |= _HAS_COPIES
        self._copies[place] = copies + count

    def _forget_copies(self, hash: int) -> None:
        if self._copies:
            for tier in range(len(TIERS)):
                self._copies.pop(hash << _TIER_BITS | tier, None)

    def _remove(self, event: KvRemoved) -> None:
        rows, tier = self._rows, _TIER_NUMBER[event.tier]
        bit = 1 << tier
        for hash in event.hashes:
            value = rows.get(hash)
            if value is None or not value & bit:
                if not self._orphans.release(hash, tier):
                    self._counts["unknown_removes"] += 1
                continue
            if value & _HAS_COPIES:
                place = hash << _TIER_BITS | tier
                copies = self._copies.get(place, 0)
                if copies:
                    if copies > 1:
                        self._copies[place] = copies - 1
                    else:
                        del self._copies[place]
                    continue
            self._befores.setdefault(hash, value)
            rows[hash] = value ^ bit

    def _clear(self) -> None:
        self._map.clear()
        self._orphans.clear()
        self._copies.clear()
        self._intake.clear()

    def gauges(self) -> LedgerGauges:
        """Return the size of the ledger and what it counted."""
        used = self._map.used_bytes + self._orphans.used_bytes + len(self._copies) * _COPY_BYTES
        return LedgerGauges(
            len(self._map),
            len(self._orphans),
            used,
            lost_orphans=self._orphans.let_go,
            other_groups=self._intake.other_groups,
            unreadable=self._intake.unreadable,
            **self._counts,
        )


def _by_tier(keys: Blocks, states: Marks) -> Iterator[tuple[Tier, bytes]]:
    """Return, of each tier in some state, the keys that have it in theirs."""
    if not len(states):
        return
    first = int(states[0])
    if (states == first).all():
        tiers = [(tier, keys) for number, tier in enumerate(TIERS) if first >> number & 1]
    else:
        found = [(tier, (states & (1 << number)) != 0) for number, tier in enumerate(TIERS)]
        tiers = [(tier, keys[is_there]) for tier, is_there in found if is_there.any()]
    for tier, mine in tiers:
        yield tier, mine.astype("<u8", copy=False).tobytes()


def _listed(hashes: list[int], values: dict[int, int]) -> Listed:
    """Return rows of these hashes."""
    found = [values[hash] for hash in hashes]
    keys = np.array(array("Q", [value >> STATE_BITS for value in found]))
    states = np.array([value & _STATE_MASK for value in found], np.uint16)
    return Listed(np.array(array("Q", hashes)), keys, states)
