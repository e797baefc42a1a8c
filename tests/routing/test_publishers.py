"""Exact caches by rows of the fleet: what all endpoints save at once is what each saves alone."""

from typing import cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.pool import Endpoint
from shoal.pool.kvevents import KvState, Tier
from shoal.routing.events import BlocksCleared, BlocksStored, KvStreamChanged, TokenKeys
from shoal.routing.exact import ExactCaches
from shoal.routing.fetches import PromptKeys
from shoal.routing.fleet import Member
from shoal.scheduling.exact_producers import PrecisePrefixCacheProducer
from tests.routing.test_exact import SIZE, ExactPool, keys_of

TOKENS = 640
stored = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(0, 2),
        st.sampled_from([Tier.GPU, Tier.CPU, Tier.SHARED]),
        st.integers(0, TOKENS // SIZE),
        st.sampled_from([SIZE, 2 * SIZE]),
    ),
    max_size=20,
)


class _Row:
    """A member of a fleet, as far as caches look at it."""

    def __init__(self, name: str) -> None:
        self.endpoint = Endpoint(id=name, address=f"{name}:1")


def rows_of(count: int) -> list[Member]:
    return [cast(Member, _Row(f"e{number}")) for number in range(count)]


@given(stored, st.sets(st.integers(0, 5)), st.sampled_from([TOKENS, TOKENS - 1, TOKENS + 5, 3 * SIZE]))
@settings(deadline=None)
def test_what_all_save_at_once_is_what_each_saves_alone(
    history: list[tuple[int, int, Tier, int, int]], fresh: set[int], prompt_tokens: int
) -> None:
    caches = ExactCaches(PrecisePrefixCacheProducer(), lambda name: "other" if name == "e5" else "m")
    rows = rows_of(6)
    keys = {size: np.frombuffer(keys_of("agent", TOKENS), "<u8")[: TOKENS // size] + size for size in (SIZE, 2 * SIZE)}
    for number, rank, tier, blocks, size in history:
        caches.stored(BlocksStored(f"e{number}", keys[size][:blocks].tobytes(), tier, size, rank))
    for number in fresh:
        caches.changed(KvStreamChanged(f"e{number}", KvState.FRESH))
    by_size = tuple(TokenKeys(size, each[: prompt_tokens // size].tobytes()) for size, each in keys.items())
    held = caches.match(PromptKeys("m", by_size), prompt_tokens, 1.0)
    s_per_token = np.linspace(1e-6, 1e-3, 6)
    alone = [held.worth(row, s) for row, s in zip(rows, s_per_token.tolist(), strict=True)]
    expected = [np.nan if worth is None else worth for worth in alone]
    np.testing.assert_allclose(held.worths(rows, s_per_token), expected, atol=1e-9)
    known, sizes = caches.wanted(rows, np.arange(6))
    assert bool(sizes) == bool(known)


def test_an_endpoint_that_begins_anew_with_other_blocks_is_asked_for_those_only() -> None:
    pool = ExactPool(1)
    pool.feed(BlocksCleared("e0", 0))
    pool.feed(BlocksStored("e0", keys_of("large", 2 * SIZE), Tier.GPU, 2 * SIZE))
    fetch = pool.ask("r1", "agent", 320)
    assert not hasattr(fetch, "endpoints")
    assert fetch.block_sizes == (2 * SIZE,)  # type: ignore[union-attr]


def test_ranks_that_have_blocks_of_several_sizes_are_all_asked_for() -> None:
    pool = ExactPool(2)
    pool.feed(BlocksStored("e1", keys_of("large", 2 * SIZE), Tier.GPU, 2 * SIZE, 1))
    assert pool.ask("r1", "agent", 320).block_sizes == (SIZE, 2 * SIZE)  # type: ignore[union-attr]


def test_rows_that_change_are_laid_out_anew() -> None:
    caches = ExactCaches(PrecisePrefixCacheProducer(), lambda _: "m")
    two, three = rows_of(2), rows_of(3)
    caches.stored(BlocksStored("e2", keys_of("agent", SIZE), Tier.GPU, SIZE))
    caches.changed(KvStreamChanged("e2", KvState.FRESH))
    assert caches.wanted(two, np.arange(2)) == ("", ())
    assert caches.wanted(three, np.arange(3)) == ("e2", (SIZE,))
    caches.changed(KvStreamChanged("e2", KvState.STALE))
    assert caches.wanted(three, np.arange(3)) == ("", ())
    caches.changed(KvStreamChanged("e2", KvState.FRESH))
    assert caches.wanted(three, np.arange(2)) == ("", ())
    caches.left("e2")
    assert caches.wanted(three, np.arange(3)) == ("", ())
