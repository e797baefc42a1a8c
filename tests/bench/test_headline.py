"""The two figures of the field: how they are judged, and the first of them in a short form."""

from collections.abc import Iterator

import pytest

from bench.bars import headline
from bench.bars.headline import Served, first, judged
from shoal.simulation import Sample


def sample(session: str, arrived_s: float, ttft_s: float, duration_s: float) -> Sample:
    return Sample(arrived_s, ttft_s, 0.01, duration_s, 1000, 0, 10, "e0", "", is_failed=False, session=session)


def test_agents_that_begin_and_finish_while_the_pool_is_full_are_counted() -> None:
    found = judged(2.0, [[
        sample("early", 10.0, 9.0, 5.0),
        sample("early", 280.0, 9.0, 30.0),
        sample("whole", 330.0, 0.1, 5.0),
        sample("whole", 350.0, 0.3, 5.0),
        sample("late", 890.0, 0.2, 5.0),
        sample("late", 898.0, 0.2, 9.0),
        sample("after", 901.0, 7.0, 5.0),
    ]])  # fmt: skip
    # Begun: whole, late; finished: early, whole.
    assert found.kept_ratio == 1.0
    assert found.ttft_p50_s == 0.2
    assert found.requests_per_s == 4 / 600


def test_a_pool_in_which_agents_pile_up_keeps_few() -> None:
    samples = [sample(f"a{n}", 400.0 + n, 1.0, 9.0 + 49.0 * n) for n in range(20)]
    assert judged(1.0, [samples]).kept_ratio == 10 / 20


@pytest.mark.parametrize("edge", [0, 1, 7, 8, 23, 40])
def test_the_lowest_load_that_is_too_much_is_found(edge: int) -> None:
    assert first(lambda step: step >= edge, 0) == edge


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A span of two minutes."""
    monkeypatch.setattr(headline, "_SPAN_S", 120.0)
    monkeypatch.setattr(headline, "_FULL_S", 40.0)
    headline.served.cache_clear()
    yield
    headline.served.cache_clear()


@pytest.mark.usefixtures("short")
def test_where_agents_pile_up_behind_round_robin_the_default_profile_answers_far_sooner_and_keeps_up() -> None:
    plain, ours = (headline.served(router, (1,), 14) for router in (headline._ROUND_ROBIN, ""))
    assert plain.kept_ratio < ours.kept_ratio
    assert ours.ttft_p50_s < 0.6 * plain.ttft_p50_s
    assert ours.requests_per_s > 1.1 * plain.requests_per_s


def test_loads_are_searched_for_where_round_robin_saturates_and_for_as_late_first_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def served(router: str, seeds: tuple[int, ...], step: int) -> Served:
        assert seeds == (101, 102)
        is_plain = bool(router)
        return Served(
            float(step),
            1.0 - step / (60 if is_plain else 300),
            step,
            0.1 + step * is_plain,
            step / (1 + 2 * (not is_plain)),
        )

    monkeypatch.setattr(headline, "served", served)
    headline.saturated.cache_clear()
    ttft, throughput = headline._ttft(0.7), headline._throughput(0.7)
    headline.saturated.cache_clear()
    # Round-robin keeps less than 0.9 from step 7 on, where its p95 is 7 s; the default's is that at step 21.
    assert ttft.value == pytest.approx(0.1 / 7.1)
    assert throughput.value == pytest.approx(3.0)
