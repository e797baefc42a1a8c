"""The bars that are behaviours and not speeds, in short forms: what must hold on any machine, however busy."""

import pytest

from bench.bars.books import GAUGES
from bench.bars.registry import BARS, Figure

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def measured(id: str, scale: float) -> Figure:
    from bench.bars.__main__ import main

    main(["--list"])
    return BARS[id].measure(scale)


def test_no_stream_of_many_passes_unrouted_or_fails() -> None:
    figure = measured("router.streams-5000", 0.04)
    assert (figure.details["failed"], figure.details["unrouted"]) == (0, 0.0), figure.details
    assert figure.details["open_at_once"] >= 200


def test_every_gauge_of_work_in_flight_returns_to_zero_after_cancels() -> None:
    figure = measured("books.cancel", 0.01)
    assert figure.value == 0.0, figure.details
    assert figure.void == ""
    assert all(figure.details["most"][name] > 0 for name in GAUGES)
    assert figure.details["errors"]["left"] > 100


def test_a_killed_engine_costs_only_its_running_streams_and_returns() -> None:
    figure = measured("kill.engine", 0.3)
    assert figure.value == 0.0, figure.details


def test_a_killed_picker_costs_no_request() -> None:
    figure = measured("kill.picker", 0.3)
    assert figure.details["errors"] == {}, figure.details
    assert figure.details["back_after_s"] < 30.0


def test_load_stays_even_after_the_picker_restarts() -> None:
    figure = measured("restart.imbalance", 0.3)
    assert figure.value < 1.5, figure.details


def test_the_journal_of_a_live_run_replays() -> None:
    figure = measured("router.journal-replay", 0.2)
    assert (figure.value, figure.void) == (0.0, ""), figure.details


def test_two_pickers_find_in_caches_what_one_finds() -> None:
    figure = measured("share.hit-ratio", 0.2)
    # Two that say nothing to each other lose 14 points; where engines run late, lateness alone makes a few.
    assert figure.value < (10.0 if figure.void else 5.0), (figure.void, figure.details)


def test_one_of_two_pickers_that_is_killed_leaves_nothing_in_flight_and_loses_no_request() -> None:
    figure = measured("share.restart", 0.3)
    assert (figure.details["left_in_flight"], figure.details["errors"]) == (0.0, {}), figure.details


@pytest.mark.parametrize("id", ["router.disconnect", "direct.disconnect"])
def test_an_engine_hears_of_a_client_that_leaves_at_any_moment_of_its_answer(id: str) -> None:
    figure = measured(id, 0.2)
    assert figure.void == ""
    assert len(figure.details["slowest_ms"]) == 4
    # The answers would go on for two minutes; a busy machine may take a while to pass an end on.
    assert 0.0 < figure.value < 20.0, figure.details


def test_the_demo_is_timed_to_its_end() -> None:
    from bench.bars.demo import seconds

    figure = seconds(0.25, chats=4)
    assert figure.details["status"] == 0, figure.why
    assert 1.0 < figure.value < 200.0


def test_a_demo_that_fails_took_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.bars import demo

    monkeypatch.setattr(demo.sys, "executable", "/bin/false")
    figure = demo.seconds(0.25, chats=4)
    assert figure.value == float("inf")
    assert figure.details["status"] == 1
