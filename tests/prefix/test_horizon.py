"""How far back an endpoint remembers, and what its answers teach."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.prefix import UNLIMITED, EstimatedIndex, capacity_blocks
from shoal.prefix.horizon import Horizon


def test_the_default_capacity_errs_large() -> None:
    assert capacity_blocks(num_blocks=4000, block_size_tokens=16) == 1500
    assert capacity_blocks(num_blocks=0, block_size_tokens=16) > 0


@given(st.integers(16, 400), st.lists(st.integers(0, 60), max_size=200))
def test_a_horizon_lies_where_a_capacity_of_blocks_came_since(capacity: int, sizes: list[int]) -> None:
    horizon = Horizon(0, 0)
    horizon.set_limit(capacity)
    for clock, blocks in enumerate(sizes, 1):
        horizon.advance(clock, blocks)
    came_since = sum(sizes[max(horizon.stamp - 1, 0) :])
    assert horizon.stamp == 0 or came_since >= capacity
    assert came_since <= capacity + capacity // 16 + 60


@given(st.lists(st.integers(0, 3000), max_size=200), st.integers(0, 200))
def test_an_age_is_never_more_than_came_since(sizes: list[int], stamp: int) -> None:
    horizon = Horizon(0, 0)
    for clock, blocks in enumerate(sizes, 1):
        horizon.advance(clock, blocks)
    assert 0 <= horizon.age(stamp) <= sum(sizes[stamp:])


def shortfall(horizon: Horizon, age: int) -> None:
    horizon.learn(expected=40, cached=0, age=age)


@pytest.fixture
def horizon() -> Horizon:
    made = Horizon(0, 0)
    made.set_limit(4000)
    for clock in range(1, 101):
        made.advance(clock, 100)
    return made


def test_one_shortfall_teaches_nothing_and_the_second_does(horizon: Horizon) -> None:
    shortfall(horizon, 1600)
    assert horizon.capacity == 4000
    shortfall(horizon, 1600)
    assert 3500 < horizon.capacity < 4000


def test_a_shortfall_on_a_block_used_just_now_says_nothing_of_the_capacity(horizon: Horizon) -> None:
    for _ in range(10):
        shortfall(horizon, 100)
    assert horizon.capacity == 4000


def test_a_difference_of_block_sizes_is_no_shortfall(horizon: Horizon) -> None:
    for _ in range(10):
        assert not horizon.learn(expected=40, cached=35, age=1600)
    assert horizon.capacity == 4000


def test_many_shortfalls_lead_to_the_size_they_show_and_no_lower(horizon: Horizon) -> None:
    for _ in range(200):
        shortfall(horizon, 1600)
    assert 1600 <= horizon.capacity < 2000
    for _ in range(200):
        shortfall(horizon, 600)
    assert horizon.capacity == 1000


def test_confirmed_old_blocks_raise_it_slowly_and_surprises_faster_up_to_the_limit(horizon: Horizon) -> None:
    for _ in range(200):
        shortfall(horizon, 1600)
    low = horizon.capacity
    horizon.learn(expected=40, cached=40, age=low // 2)
    slow = horizon.capacity
    horizon.learn(expected=0, cached=40, age=0)
    fast = horizon.capacity
    assert 0 < slow - low < fast - slow
    for _ in range(50):
        horizon.learn(expected=0, cached=40, age=0)
    assert horizon.capacity == 4000


def test_a_learnt_capacity_survives_the_next_reading_of_the_same_limit(horizon: Horizon) -> None:
    for _ in range(20):
        shortfall(horizon, 1600)
    learnt = horizon.capacity
    horizon.set_limit(4000)
    assert horizon.capacity == learnt
    horizon.set_limit(1100)
    assert horizon.capacity == 1100


def test_an_unknown_capacity_has_no_limit_until_answers_show_one() -> None:
    horizon = Horizon(0, 0)
    for clock in range(1, 101):
        horizon.advance(clock, 100)
    assert horizon.capacity == UNLIMITED
    assert horizon.stamp == 0
    for _ in range(100):
        shortfall(horizon, 3000)
    assert 3000 <= horizon.capacity < 4500


@pytest.mark.parametrize("announced", [1500, None])
def test_the_assumed_size_comes_near_the_real_one_of_an_engine(announced: int | None) -> None:
    """An engine with room for 600 blocks, of 2,700 in use; a third of the answers would be wrong without learning."""
    rng = np.random.default_rng(0)
    index = EstimatedIndex(1 << 20)
    slot = index.open_slot()
    index.set_capacity(slot, announced)
    prompts = rng.integers(1, 2**63, (300, 9), dtype=np.uint64)
    cache: OrderedDict[int, None] = OrderedDict()
    wrong = 0
    for turn in range(2000):
        blocks = prompts[int(rng.integers(300))]
        chain = blocks.tolist()
        cached = next((depth for depth, block in enumerate(chain) if block not in cache), len(chain))
        for block in reversed(chain):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > 600:
            cache.popitem(last=False)
        expectation = index.expect(index.match(blocks), slot)
        wrong += turn >= 1000 and expectation.blocks > cached + 1
        index.add(slot, blocks)
        index.correct(expectation, cached_tokens=cached * 64, prompt_tokens=len(chain) * 64)
    assert 450 <= index.capacity(slot) <= 900
    assert wrong < 150
