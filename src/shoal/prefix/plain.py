"""The plain events of a batch, all at once: new blocks behind known ones, known blocks that come to a tier or leave it.

Owns which events are plain and what they come to.  Everything else, such as a second copy or an unknown parent, is done
one by one by `ledger`.  Plain events share no block with others, so their order among each other is free.
"""

from typing import NamedTuple

import numpy as np

from shoal.prefix.hashing import Blocks
from shoal.prefix.hashmap import Flags, Known, Marks, Rows
from shoal.prefix.intake import GROWS, LOSES, ROOT, Batch
from shoal.prefix.tokens import MAX_STEPS, TokenHasher

_NOBODY = -1
_TIERS_MASK = ROOT - 1


class Turns(NamedTuple):
    """What became of blocks.  befores, afters: their states, 0 for one that is held nowhere."""

    hashes: Blocks
    keys: Blocks
    befores: Marks
    afters: Marks

    def take(self, places: Rows) -> "Turns":
        """Return some of them."""
        hashes, keys, befores, afters = self
        return Turns(hashes.take(places), keys.take(places), befores.take(places), afters.take(places))


class Numbers(NamedTuple):
    """A batch in columns: of each event, and below of each block.

    counts, starts: its blocks, and the number of the first.  parents: 0 where there is none.  roots: whether it stores
    the beginning of a prompt.  bits: of its tier in a state.  grows: whether it has tokens.  loses: whether it removes.
    owners: the event of each block.
    """

    counts: Rows
    starts: Rows
    parents: Blocks
    roots: Flags
    bits: Marks
    grows: Flags
    loses: Flags
    hashes: Blocks
    owners: Rows


def numbers_of(batch: Batch) -> Numbers:
    """Return a batch that has events in columns."""
    counts, codes = np.array(batch.counts), np.array(batch.codes)
    return Numbers(
        counts,
        counts.cumsum() - counts,
        np.array(batch.parents),
        (codes & ROOT) != 0,
        (codes & _TIERS_MASK).astype(np.uint16),
        (codes & GROWS) != 0,
        (codes & LOSES) != 0,
        np.array(batch.hashes),
        np.repeat(np.arange(len(counts)), counts),
    )


def read_plain(
    numbers: Numbers, digests: Blocks, seeds: Blocks, known: Known, hasher: TokenHasher, copies_bit: int
) -> tuple[Flags, Turns, Flags]:
    """Return which events are plain, what becomes of their blocks, and which of these are new.

    digests: of the blocks that come with tokens.  seeds: of each event, the key before its first block where it has no
    parent.  known: of the blocks and, behind them, of the parents.  copies_bit: a state that a remove does not end.
    """
    owners, count = numbers.owners, len(numbers.hashes)
    bits, grows = numbers.bits.take(owners), numbers.grows.take(owners)
    befores = known.states[:count]
    # With tokens they are new.  Others are known, and on that tier exactly if they lose it, without a second copy.
    is_plain = known.is_known[:count] != grows
    if not grows.all():
        loses = numbers.loses.take(owners)
        is_plain &= grows | (((befores & bits) != 0) == loses)
        is_plain &= ~loses | ((befores & np.uint16(copies_bit)) == 0)
    order = numbers.hashes.argsort()
    ordered = numbers.hashes.take(order)
    is_twice = (ordered[1:] == ordered[:-1]).nonzero()[0]
    if len(is_twice):
        is_plain[order.take(is_twice)] = is_plain[order.take(is_twice + 1)] = False
    is_done = np.logical_and.reduceat(is_plain, numbers.starts)
    is_done &= numbers.counts <= MAX_STEPS
    keys = known.keys[:count]
    if len(digests) == count:
        keys = _keys(numbers, digests, np.arange(count), seeds, known, _Sorted(order, ordered), is_done, hasher)
    elif len(digests):
        new = grows.nonzero()[0]
        keys[new] = _keys(numbers, digests, new, seeds, known, _Sorted(order, ordered), is_done, hasher)
    turns = Turns(numbers.hashes, keys, befores, befores ^ bits)
    if is_done.all():
        return is_done, turns, grows
    mine = is_done.take(owners).nonzero()[0]
    return is_done, turns.take(mine), grows.take(mine)


class _Sorted(NamedTuple):
    """The hashes of a batch in order, and the block that each is of."""

    blocks: Rows
    hashes: Blocks

    def find(self, sought: Blocks) -> Rows:
        """Return a block of each of these hashes, -1 where there is none."""
        places = np.minimum(self.hashes.searchsorted(sought), len(self.hashes) - 1)
        return np.where(self.hashes.take(places) == sought, self.blocks.take(places), _NOBODY)


def _keys(
    numbers: Numbers,
    digests: Blocks,
    new: Rows,
    seeds: Blocks,
    known: Known,
    blocks: _Sorted,
    is_done: Flags,
    hasher: TokenHasher,
) -> Blocks:
    """Return the keys of the blocks `new`, right where `is_done` says so, which loses events with unknown parents.

    The key of a block is that of the block before its event, times a power of A, and what the event adds.  So where
    parents are of the same batch, events behind events are resolved in a few rounds: after each the one that an event
    waits for is twice as far back.
    """
    owners = numbers.owners.take(new)
    steps = np.minimum(new - numbers.starts.take(owners), MAX_STEPS - 1)  # longer events are not done here
    powers = hasher.powers.take(steps)
    sums = np.add.accumulate(digests * hasher.inverse_powers.take(steps))
    firsts = (steps == 0).nonzero()[0]
    before = np.zeros(len(numbers.counts), np.uint64)  # the sum over all events before each
    before[owners.take(firsts[1:])] = sums.take(firsts[1:] - 1)
    sums -= before.take(owners)

    count = len(numbers.hashes)
    parents = blocks.find(numbers.parents)
    places = np.full(count, _NOBODY)  # of each block among the new ones
    places[new] = np.arange(len(new))
    has_parent = numbers.grows & ~numbers.roots
    is_here = has_parent & (parents != _NOBODY)
    is_done[is_here] &= is_done.take(numbers.owners.take(parents[is_here]))
    at = np.where(is_here & (parents < numbers.starts), places.take(parents), _NOBODY)
    is_behind = at != _NOBODY
    is_done &= ~has_parent | is_behind | known.is_known[count:]
    starts = np.where(numbers.roots, seeds, known.keys[count:])
    behind = is_behind.nonzero()[0]
    at = at.take(behind)
    waits_for = np.full(len(starts), _NOBODY)
    waits_for[behind] = owners.take(at)
    factors = np.zeros(len(starts), np.uint64)
    factors[behind] = powers.take(at)
    starts[behind] = powers.take(at) * sums.take(at)
    while len(behind):
        others = waits_for.take(behind)
        starts[behind] += factors.take(behind) * starts.take(others)
        factors[behind] *= factors.take(others)
        is_done[behind] &= is_done.take(others)
        waits_for[behind] = waits_for.take(others)
        behind = behind[waits_for.take(behind) != _NOBODY]
    sums += starts.take(owners)
    sums *= powers
    return sums
