"""Policies side by side: the statistics are those of a textbook, and chance alone is no difference."""

import math

import msgspec
import pytest

from shoal.report.comparison import compare, interval, t_95, told
from tests.report.runs import made


def test_the_interval_of_a_mean_is_students() -> None:
    # 95 % interval of the mean of (1, 2, 3, 4): 2.5 +- 3.182 * 1.29099 / 2.
    mean, half = interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    assert half == pytest.approx(3.1824 * 1.290994 / 2, rel=1e-4)
    assert math.isnan(interval([1.0])[1])


@pytest.mark.parametrize(("count", "t"), [(2, 12.706), (10, 2.262), (11, 2.2281), (21, 2.0860), (101, 1.9840)])
def test_students_t_is_that_of_the_tables(count: int, t: float) -> None:
    assert t_95(count) == pytest.approx(t, abs=2e-3)


def test_changes_are_taken_seed_by_seed() -> None:
    runs = [made("a", seed) for seed in (1, 2, 3)] + [made("b", seed, slower=1.1) for seed in (1, 2, 3)]
    first, second = compare(runs)
    assert math.isnan(first.cells["ttft_p50"].change)
    cell = second.cells["ttft_p50"]
    # Seeds differ by much more than a tenth; the pairs do not.
    assert cell.change == pytest.approx(0.1)
    assert cell.change_half < 1e-6
    assert cell.half > 10 * cell.change_half
    assert cell.is_clear
    assert not second.cells["tpot_p50"].is_clear


def test_one_seed_is_never_a_clear_difference() -> None:
    _, second = compare([made("a"), made("b", slower=3.0)])
    assert second.cells["ttft_p50"].change == pytest.approx(2.0)
    assert not second.cells["ttft_p50"].is_clear


def test_policies_are_compared_at_the_same_load_and_partial_runs_left_out() -> None:
    runs = [made("a", 1, 2.0), made("b", 1, 2.0, slower=2.0), made("a", 1, 4.0), made("b", 1, 4.0, is_partial=True)]
    rows = compare(runs)
    assert [(row.policy, row.load) for row in rows] == [("a", 2.0), ("b", 2.0), ("a", 4.0)]
    assert rows[1].cells["ttft_p50"].change == pytest.approx(1.0)
    assert len(compare([made("a", is_partial=True)])) == 1
    assert compare([]) == []


def test_what_was_handed_over_is_told_where_engines_prefill_for_others() -> None:
    plain = made()
    assert "handed" not in {figure.key for figure in told([plain])}
    split = plain._replace(result=msgspec.structs.replace(plain.result, prefilled_elsewhere=plain.result.requests // 2))
    assert "handed" in {figure.key for figure in told([plain, split])}
    (row,) = compare([split])
    assert row.cells["handed"].mean == pytest.approx(100 * (plain.result.requests // 2) / plain.result.requests)
