import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.latency import Scale


def test_a_machine_that_becomes_three_times_as_slow_is_known_within_ten_records() -> None:
    scale, chance = Scale(), np.random.default_rng(1)
    for _ in range(50):
        scale.learn(0.1 * float(chance.lognormal(0, 0.1)), 0.1)
    assert scale.factor == pytest.approx(1.0, abs=0.1)
    for _ in range(10):
        scale.learn(0.3 * float(chance.lognormal(0, 0.1)), 0.1)
    assert scale.factor == pytest.approx(3.0, rel=0.15)


def test_a_few_stalls_do_not_make_a_machine_slow() -> None:
    scale, chance = Scale(), np.random.default_rng(1)
    for number in range(60):
        scale.learn(5.0 if number % 10 == 0 else 0.1 * float(chance.lognormal(0, 0.1)), 0.1)
    assert scale.factor == pytest.approx(1.0, abs=0.25)


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=60))
def test_no_history_gives_a_factor_that_is_not_positive_and_finite(history: list[tuple[float, float]]) -> None:
    scale = Scale()
    for seconds, by_law in history:
        scale.learn(seconds, by_law)
    assert 0.0 < scale.factor < 100.0
