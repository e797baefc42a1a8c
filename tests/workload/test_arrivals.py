"""Arrivals are ascending and come at the asked rate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.workload import poisson_arrivals


@given(seed=st.integers(0, 2**32), rate=st.floats(0.01, 1_000.0))
def test_arrivals_ascend_from_zero(seed: int, rate: float) -> None:
    times = poisson_arrivals(np.random.default_rng(seed), count=50, rate_per_s=rate)
    assert times[0] >= 0.0
    assert bool(np.all(np.diff(times) >= 0.0))


def test_arrivals_keep_the_rate_on_average() -> None:
    times = poisson_arrivals(np.random.default_rng(5), count=20_000, rate_per_s=8.0)
    assert 20_000 / times[-1] == pytest.approx(8.0, rel=0.05)


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        poisson_arrivals(np.random.default_rng(1), count=1, rate_per_s=0.0)
