"""Arrivals come at the rate they are said to, in the clumps they are said to."""

from itertools import islice, pairwise

import msgspec
import numpy as np
import pytest

from shoal.simulation import Session
from shoal.simulation.arrivals import Arrivals

COUNT = 20_000


def times(arrivals: Arrivals, seed: int = 1) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return np.array(list(islice(arrivals.times(np.random.default_rng(seed)), COUNT)))


@pytest.mark.parametrize("kind", ["constant", "poisson", "gamma", "bursty", "diurnal"])
def test_the_mean_rate_is_what_was_asked_for(kind: str) -> None:
    arrivals = msgspec.convert({"kind": kind, "rate_per_s": 5.0, "period_s": 60.0, "burst_s": 2.0, "cv": 2.0}, Arrivals)
    at = times(arrivals)
    assert (np.diff(at) >= 0).all()
    assert at[0] > 0
    assert COUNT / at[-1] == pytest.approx(5.0, rel=0.06)


@pytest.mark.parametrize(("kind", "cv"), [("constant", 0.0), ("poisson", 1.0), ("gamma", 3.0)])
def test_gaps_vary_as_they_are_said_to(kind: str, cv: float) -> None:
    gaps = np.diff(times(msgspec.convert({"kind": kind, "rate_per_s": 5.0}, Arrivals)))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.15)


def test_bursts_hold_their_share_of_the_time_and_peak_times_the_rate() -> None:
    arrivals = Arrivals(kind="bursty", rate_per_s=10.0, peak=4.0, burst_s=50.0, burst_share=0.2)
    counts, _ = np.histogram(times(arrivals), np.arange(0, COUNT / 10.0, 5.0))
    busy = counts / 5.0 > 20
    assert busy.mean() == pytest.approx(0.2, abs=0.06)
    assert (counts[busy] / 5.0).mean() == pytest.approx(40.0, rel=0.1)
    assert (counts[~busy] / 5.0).mean() == pytest.approx(2.5, rel=0.3)


def test_bursts_that_are_all_of_the_load_leave_nothing_between_them() -> None:
    at = times(Arrivals(kind="bursty", rate_per_s=10.0, peak=5.0, burst_s=1.0, burst_share=0.2))
    assert max(b - a for a, b in pairwise(at.tolist())) > 4.0


def test_a_day_has_its_high_and_its_low() -> None:
    at = times(Arrivals(kind="diurnal", rate_per_s=10.0, swing=0.8, period_s=100.0)) % 100.0
    high, low = ((at > 15) & (at < 35)).sum(), ((at > 65) & (at < 85)).sum()
    assert high / low == pytest.approx(1.77 / 0.23, rel=0.15)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="peak x burst_share"):
        msgspec.convert({"kind": "bursty", "peak": 6, "burst_share": 0.5}, Arrivals)


def test_sessions_with_a_time_keep_it() -> None:
    sessions = [Session("a", lambda: iter(()), arrives_s=7.0), Session("b", lambda: iter(()))]
    first, second = Arrivals(kind="constant", rate_per_s=2.0).spread(sessions, np.random.default_rng(1))
    assert (first.arrives_s, second.arrives_s) == (7.0, 0.5)
    assert [each.arrives_s for each in Arrivals().spread(sessions, np.random.default_rng(1))] == [7.0, None]
