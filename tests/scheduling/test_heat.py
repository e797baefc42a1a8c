import pytest

from shoal.scheduling.heat import APART_S, MAX_PREFIXES, WINDOW_S, Heat


def test_uses_that_come_apart_are_counted_after_the_first_one() -> None:
    heat = Heat()
    for at in range(5):
        heat.used(7, at * 2 * APART_S)
    assert heat.of(7) == pytest.approx(4, rel=0.05)
    assert heat.of(8) == 0.0


def test_a_crowd_that_comes_together_counts_once() -> None:
    heat = Heat()
    for at in range(16):
        heat.used(7, 100.0 + at * APART_S / 20)
    assert heat.of(7) == 0.0
    heat.used(7, 105.0)
    heat.used(7, 105.0)
    assert heat.of(7) == 1.0


def test_what_is_not_used_any_more_is_forgotten_by_and_by() -> None:
    heat = Heat()
    for at in range(20):
        heat.used(7, float(at))
    before = heat.of(7)
    heat.used(8, 19.0 + WINDOW_S)
    assert heat.of(7) == pytest.approx(before / 2.718, rel=0.01)


def test_no_more_prefixes_are_kept_than_fit_and_the_latest_stay() -> None:
    heat = Heat()
    for prefix in range(1, MAX_PREFIXES + 3):
        heat.used(prefix, 0.0)
        heat.used(1, 10.0)
    assert len(heat) == MAX_PREFIXES
    heat.used(2, 20.0)
    heat.used(MAX_PREFIXES + 2, 20.0)
    assert heat.of(2) == 0.0
    assert heat.of(MAX_PREFIXES + 2) == 1.0
