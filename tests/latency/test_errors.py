import numpy as np
import pytest

from shoal.latency import Errors
from shoal.latency.errors import MIN_RECORDS


def noted(errors: Errors, ratio: float, count: int, spread: float = 0.1) -> Errors:
    chance = np.random.default_rng(1)
    for _ in range(count):
        errors.note(1.0, ratio * float(chance.lognormal(0.0, spread)))
    return errors


def test_nothing_is_trusted_before_enough_was_seen() -> None:
    assert not noted(Errors(), 1.0, MIN_RECORDS - 1).is_trusted
    assert noted(Errors(), 1.0, MIN_RECORDS + 8).is_trusted


def test_trust_is_lost_while_predictions_are_bad_and_comes_back_when_they_are_good() -> None:
    errors = noted(Errors(), 1.0, 64)
    assert not noted(errors, 3.0, 64).is_trusted
    assert noted(errors, 1.0, 64).is_trusted


def test_the_report_is_of_the_last_outcomes() -> None:
    report = noted(noted(Errors(), 5.0, 64), 1.25, 64, spread=0.0).report()
    assert report.records == 128
    assert (report.mape, report.median_ratio) == pytest.approx((0.2, 0.2))


def test_nine_of_ten_stay_below_the_high_quantile() -> None:
    report = noted(Errors(), 1.0, 500, spread=0.5).report()
    assert 0.75 <= report.coverage_ratio <= 1.0


def test_what_is_no_time_is_not_counted() -> None:
    errors = Errors()
    for predicted, measured in ((0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)):
        errors.note(predicted, measured)
    assert errors.report().records == 0
