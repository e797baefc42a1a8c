import pytest

from shoal.flow.recent import MAX_TENANTS, WINDOW_S, BandRecord, Recent
from shoal.kernel.spans import quantile_s


def test_tokens_are_told_per_second_by_band_and_tenant() -> None:
    recent = Recent()
    recent.used(0, "a", 3.0, tokens=900.0, computed=600.0, now=100.0)
    recent.used(0, "b", 1.0, tokens=200.0, computed=200.0, now=105.0)
    recent.used(7, "a", 2.0, tokens=50.0, computed=50.0, now=110.0)
    bands = recent.bands(110.0)
    assert list(bands) == [0, 7]
    assert bands[0].total == (110.0, 80.0)
    assert bands[0].tenants == {"a": (90.0, 60.0), "b": (20.0, 20.0)}
    assert bands[0].weights == {"a": 3.0, "b": 1.0}
    assert bands[7].tenants == {"a": (5.0, 5.0)}


def test_figures_are_of_one_window_to_two_and_older_ones_are_forgotten() -> None:
    recent = Recent()
    recent.used(0, "old", 1.0, 600.0, 600.0, now=0.0)
    recent.waited(0, 2.0, now=0.0)
    recent.used(0, "new", 1.0, 600.0, 600.0, now=WINDOW_S + 10.0)
    both = recent.bands(WINDOW_S + 10.0)[0]
    assert set(both.tenants) == {"old", "new"}
    assert both.total.tokens_per_s == pytest.approx(1200.0 / (WINDOW_S + 10.0))
    later = recent.bands(2 * WINDOW_S + 10.0)[0]
    assert set(later.tenants) == {"new"}
    assert not later.waits
    assert recent.bands(9 * WINDOW_S) == {}


def test_waits_are_counted_by_band() -> None:
    recent = Recent()
    for _ in range(90):
        recent.waited(0, 0.0, now=1.0)
    for _ in range(10):
        recent.waited(0, 8.0, now=2.0)
    recent.waited(5, 0.1, now=3.0)
    bands = recent.bands(3.0)
    assert quantile_s(bands[0].waits, 0.5) == 0.0
    assert quantile_s(bands[0].waits, 0.95) == pytest.approx(8.0, rel=0.1)
    assert quantile_s(bands[5].waits, 0.95) == pytest.approx(0.1, rel=0.1)


def test_many_tenants_cost_no_more_than_so_much_and_still_count_in_the_total() -> None:
    recent = Recent()
    for number in range(MAX_TENANTS + 50):
        recent.used(0, f"t{number}", 1.0, 10.0, 10.0, now=1.0)
    band: BandRecord = recent.bands(11.0)[0]
    assert len(band.tenants) == MAX_TENANTS
    assert band.total.tokens_per_s == pytest.approx(MAX_TENANTS + 50)
