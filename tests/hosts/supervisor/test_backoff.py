"""Waits between the starts of a crashing child."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.hosts.supervisor.backoff import Backoff


def test_waits_double_from_a_fifth_of_a_second_to_ten_seconds() -> None:
    backoff = Backoff()
    assert [backoff.after_run(0.0) for _ in range(8)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_a_stable_minute_starts_again_at_the_shortest_wait() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.after_run(1.0)
    assert backoff.after_run(60.0) == 0.2
    assert backoff.after_run(59.9) == 0.4


@given(st.lists(st.floats(0, 1e4), max_size=50))
def test_a_wait_is_always_within_bounds(runs: list[float]) -> None:
    backoff = Backoff()
    assert all(0.2 <= backoff.after_run(run_s) <= 10.0 for run_s in runs)
