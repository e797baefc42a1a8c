"""How fast something drains, as it is told to those who are turned away: measured, and honest after a silence."""

import pytest

from shoal.flow.drain import MAX_WAIT_S, WINDOW_S, DrainRate


def rate_of(every_s: float, count: int) -> tuple[DrainRate, float]:
    """One that has gone every so many seconds, and when the last one went."""
    rate = DrainRate()
    for number in range(count):
        rate.left(number * every_s)
    return rate, (count - 1) * every_s


@pytest.mark.parametrize("every_s", [0.01, 0.1, 1.0, 5.0, 30.0, 90.0])
def test_the_rate_is_how_often_requests_went(every_s: float) -> None:
    rate, now = rate_of(every_s, 200)
    for after_s in (0.0, 0.5 * every_s, 0.99 * every_s):
        assert rate.per_s(now + after_s) == pytest.approx(1.0 / every_s, rel=0.35)


def test_nothing_is_known_before_the_first_one_has_gone() -> None:
    assert DrainRate().per_s(5.0) == 0.0
    assert DrainRate().wait_s(3, 5.0) is None


def test_where_nothing_goes_any_more_the_wait_grows_to_its_bound() -> None:
    rate, now = rate_of(0.1, 200)
    waits = [rate.wait_s(0, now + after_s) or 0.0 for after_s in (0.0, 10.0, 60.0, 600.0, 6000.0)]
    assert waits == sorted(waits)
    assert waits[0] == pytest.approx(0.1, rel=0.2)
    assert waits[-1] == MAX_WAIT_S


def test_of_a_silence_in_which_nobody_waited_a_window_counts() -> None:
    rate, now = rate_of(0.1, 200)
    rate.woke(now + 1000.0)
    assert rate.per_s(now + 1000.0) == pytest.approx(rate_of(0.1, 200)[0].per_s(now + WINDOW_S))
    assert rate.per_s(now + 1000.0) > 2.0


def test_a_short_silence_counts_as_it_is() -> None:
    rate, now = rate_of(0.1, 200)
    before = rate.per_s(now + 5.0)
    rate.woke(now + 5.0)
    assert rate.per_s(now + 5.0) == before
