from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernel import Chance
from shoal.scheduling.pickers import (
    MaxScorePicker,
    PowerOfTwoPicker,
    RandomPicker,
    RoundRobinPicker,
    SoftmaxPicker,
    WeightedRandomPicker,
    best,
)
from tests.scheduling.script import decide, request, scheduler, view


def stream(seed: int = 1) -> np.random.Generator:
    return Chance(seed).stream("test")


def picks(picker: Any, totals: list[float], times: int = 2000) -> Counter[int]:
    chance = stream()
    return Counter(picker.pick(np.array(totals), chance)[0] for _ in range(times))


def test_max_score_picks_the_highest_in_order() -> None:
    assert MaxScorePicker(max_num_of_endpoints=3).pick(np.array([0.1, 0.9, 0.5, 0.7]), stream()) == [1, 3, 2]


def test_max_score_breaks_ties_by_chance_and_not_by_list_order() -> None:
    counts = picks(MaxScorePicker(), [0.5, 0.2, 0.5, 0.5])
    assert counts[1] == 0
    assert min(counts[0], counts[2], counts[3]) > 500


def test_random_ignores_the_scores() -> None:
    assert min(picks(RandomPicker(), [9.0, 0.0, 0.0]).values()) > 500
    assert sorted(RandomPicker(max_num_of_endpoints=9).pick(np.zeros(4), stream())) == [0, 1, 2, 3]


def test_weighted_random_picks_in_proportion_to_the_totals() -> None:
    counts = picks(WeightedRandomPicker(), [3.0, 1.0, 0.0], 4000)
    assert 2.5 < counts[0] / counts[1] < 3.5
    assert counts[2] == 0


def test_weighted_random_is_uniform_when_all_totals_are_0() -> None:
    assert min(picks(WeightedRandomPicker(), [0.0, 0.0, 0.0]).values()) > 500


def test_weighted_random_tells_tiny_totals_apart() -> None:
    assert picks(WeightedRandomPicker(), [3e-9, 1e-12], 500)[0] > 450


def test_power_of_two_takes_the_better_of_two_drawn() -> None:
    # Of four, the best is drawn with three of six pairs, the worst wins none.
    counts = picks(PowerOfTwoPicker(), [0.1, 0.9, 0.5, 0.7], 6000)
    assert counts[0] == 0
    assert [counts[position] / 1000 for position in (1, 3, 2)] == pytest.approx([3.0, 2.0, 1.0], abs=0.2)


def test_power_of_two_leaves_equal_ones_to_chance_and_takes_who_is_alone() -> None:
    assert min(picks(PowerOfTwoPicker(), [0.5, 0.5, 0.5]).values()) > 500
    assert PowerOfTwoPicker(max_num_of_endpoints=3).pick(np.array([0.3]), stream()) == [0]
    assert len(set(PowerOfTwoPicker(max_num_of_endpoints=3).pick(np.zeros(4), stream()))) == 2


def test_softmax_draws_in_proportion_to_the_exponential_of_the_place_in_the_range() -> None:
    # On the scale of the range the totals are 0, 0.5 and 1; at temperature 0.5 the odds are 1 : e : e ** 2.
    counts = picks(SoftmaxPicker(temperature=0.5), [2.0, 3.0, 4.0], 6000)
    odds = np.exp([0.0, 1.0, 2.0])
    assert [counts[position] / 6000 for position in range(3)] == pytest.approx(odds / odds.sum(), abs=0.025)


def test_softmax_at_0_takes_the_highest_and_leaves_equal_ones_to_chance() -> None:
    counts = picks(SoftmaxPicker(), [0.5, 0.2, 0.5])
    assert counts[1] == 0
    assert min(counts[0], counts[2]) > 800
    assert min(picks(SoftmaxPicker(temperature=1.0), [0.2, 0.2, 0.2]).values()) > 500
    assert sorted(SoftmaxPicker(temperature=2.0, max_num_of_endpoints=3).pick(np.arange(3.0), stream())) == [0, 1, 2]
    with pytest.raises(ValueError, match="temperature"):
        SoftmaxPicker(temperature=-1)


def test_round_robin_takes_turns() -> None:
    made = scheduler(picker=RoundRobinPicker())
    seen = view(3)
    targets = []
    for _ in range(6):
        decision = decide(made, request(), seen)
        made.dispatched(request(), seen, decision, 0.0)
        targets.append(decision.chosen[0])
    assert targets == ["e0", "e1", "e2"] * 2


@pytest.mark.parametrize("cls", [MaxScorePicker, RandomPicker, WeightedRandomPicker, RoundRobinPicker])
def test_a_picker_must_pick_something(cls: Any) -> None:
    with pytest.raises(ValueError, match="maxNumOfEndpoints"):
        cls(max_num_of_endpoints=0)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.integers(1, 15), st.integers(0, 99))
def test_every_picker_picks_distinct_positions(totals: list[float], count: int, seed: int) -> None:
    for cls in (MaxScorePicker, RandomPicker, WeightedRandomPicker, RoundRobinPicker):
        picked = cls(max_num_of_endpoints=count).pick(np.array(totals), stream(seed))
        assert len(picked) == len(set(picked)) == min(count, len(totals))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 15))
def test_best_is_in_descending_order_without_those_taken(totals: list[int], count: int) -> None:
    column = np.array(totals, np.float64)
    chosen = best(column, count, stream(), [0])
    assert 0 not in chosen
    assert [totals[at] for at in chosen] == sorted(totals[1:], reverse=True)[:count]
