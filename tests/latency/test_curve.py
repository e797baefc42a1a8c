import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.latency import TTFT, Curve, Figure

COUNT = len(Figure)
Floats = npt.NDArray[np.float64]
LAW: Floats = np.array([0.008, 0.04, 0.01, 0.03, 0.005, 0.0, 0.0, 0.0, 0.0])


def drawn(chance: np.random.Generator) -> Floats:
    return np.array([1.0, *chance.uniform(0.05, 4.0, 4), *chance.uniform(0, 1, 4)])


def taught(curve: Curve, law: Floats, records: int, seed: int = 1, noise: float = 0.05) -> Curve:
    chance = np.random.default_rng(seed)
    for _ in range(records):
        figures = drawn(chance)
        curve.learn(figures, float(figures @ law) * float(chance.lognormal(0.0, noise)))
    return curve


def error(curve: Curve, law: Floats) -> float:
    chance = np.random.default_rng(99)
    samples = [drawn(chance) for _ in range(200)]
    return float(np.median([abs(curve.predict(each) / float(each @ law) - 1.0) for each in samples]))


def test_a_law_is_learned_within_a_hundred_records() -> None:
    assert error(Curve(TTFT), LAW) > 0.1
    assert error(taught(Curve(TTFT), LAW, 100), LAW) < 0.02


def test_a_change_of_the_law_is_followed() -> None:
    curve = taught(Curve(TTFT), LAW, 400)
    changed = LAW * np.array([1, 2, 2, 2, 1, 1, 1, 1, 1])
    taught(curve, changed, 80, seed=2)
    assert error(curve, changed) < 0.05


def test_another_model_begins_from_what_was_learned_of_the_first() -> None:
    parent = taught(Curve(TTFT), LAW, 200)
    other = LAW * np.array([2.0, 0.9, 0.9, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert error(Curve(TTFT, parent), other) < error(Curve(TTFT), other)
    assert error(taught(Curve(TTFT, parent), other, 40), other) < 0.08


def test_a_stalled_request_changes_little() -> None:
    curve = taught(Curve(TTFT), LAW, 200)
    before = error(curve, LAW)
    curve.learn(drawn(np.random.default_rng(5)), 600.0)
    assert error(curve, LAW) < before + 0.1


def test_what_never_varied_does_not_become_uncertain_by_forgetting() -> None:
    curve, chance = Curve(TTFT), np.random.default_rng(3)
    for _ in range(5_000):
        figures = drawn(chance)
        figures[5:] = 0.0
        curve.learn(figures, float(figures @ LAW))
    figures = drawn(chance)
    figures[5:] = 1.0
    assert curve.predict(figures) == pytest.approx(float(figures @ LAW), rel=0.3)


@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(), min_size=COUNT, max_size=COUNT),
            st.floats(),
        ),
        max_size=30,
    )
)
def test_no_history_gives_a_prediction_that_is_not_positive_and_finite(
    history: list[tuple[list[float], float]],
) -> None:
    curve = Curve(TTFT)
    for figures, seconds in history:
        curve.learn(np.clip(np.array(figures), 0.0, 1e6), seconds)
    predicted = curve.predict(np.ones(COUNT))
    assert 0.0 < predicted < float("inf")
    assert (curve.coefficients >= 0.0).all()
