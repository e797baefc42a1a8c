import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernel.spans import SHORTEST_S, count, quantile_s


def counted(times_s: list[float]) -> dict[int, int]:
    counts: dict[int, int] = {}
    count(times_s[:3], counts)
    count(times_s[3:], counts)
    return counts


@given(st.lists(st.floats(0.0, 3600.0), min_size=1, max_size=40), st.sampled_from([0.05, 0.5, 0.95, 1.0]))
def test_a_quantile_is_right_within_a_tenth(times_s: list[float], q: float) -> None:
    exact = next(each for place, each in enumerate(sorted(times_s), 1) if place >= q * len(times_s))
    found = quantile_s(counted(times_s), q)
    assert found is not None
    assert found == pytest.approx(exact, rel=0.1, abs=SHORTEST_S)


def test_nothing_counted_has_no_quantile() -> None:
    assert quantile_s({}, 0.5) is None
    assert quantile_s({3: 0}, 0.5) is None


def test_who_did_not_wait_waited_for_nothing() -> None:
    assert quantile_s(counted([0.0] * 19 + [4.0]), 0.95) == 0.0
    assert quantile_s(counted([0.0] * 18 + [4.0, 4.0]), 0.95) == pytest.approx(4.0, rel=0.1)
