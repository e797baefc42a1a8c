"""What metrics pages tell of an engine's speeds, and what they do not."""

import msgspec
import numpy as np
import pytest

from bench.bars.twin_fit import step_errors, unknown
from shoal.engine import Profile, find_profile
from shoal.kernel import InvalidInput
from shoal.simulation.scraped import fit_scrapes
from shoal.wire.engine_totals import Totals, read_totals
from tests.simulation.scrapes import EVERY_S
from tests.simulation.scrapes import scrapes as pages_of
from tests.simulation.sglang_scrapes import sglang_scrapes

BASE = find_profile("h100-8b")


def scrapes(profile: Profile, seed: int, count: int = 10) -> list[tuple[float, Totals]]:
    return [(at, read_totals(page)) for at, page in pages_of(profile, seed, count=count)]


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_the_speeds_of_an_engine_that_nobody_told_of_are_found(seed: int) -> None:
    truth = unknown(seed)
    found = fit_scrapes(scrapes(truth, seed), BASE, name="ours")
    errors = np.abs(list(step_errors(found.profile, truth).values()))
    assert np.median(errors) < 0.08
    assert errors.max() < 0.2
    assert np.abs(list(step_errors(BASE, truth).values())).max() > 2 * errors.max()
    assert found.profile.name == "ours"
    assert found.held_out == 2
    assert max(found.decode.median, found.prefill.median) < 0.06


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_the_speeds_of_an_engine_that_prefills_in_steps_of_their_own_are_found(seed: int) -> None:
    truth = unknown(seed)
    pages = [(at, read_totals(page)) for at, page in sglang_scrapes(truth, seed)]
    found = fit_scrapes(pages, BASE, name="ours")
    errors = np.abs(list(step_errors(found.profile, truth).values()))
    assert np.median(errors) < 0.08
    assert errors.max() < 0.2
    assert np.abs(list(step_errors(BASE, truth).values())).max() > 2 * errors.max()
    assert found.request_s == pytest.approx(0.004, rel=0.2)


def test_what_means_cannot_tell_is_kept() -> None:
    found = fit_scrapes(scrapes(unknown(2), 2), BASE)
    assert set(found.factors) == {"compute", "memory"}
    assert (found.profile.overhead_s, found.profile.sequence_s) == (BASE.overhead_s, BASE.sequence_s)
    assert found.profile.flops_per_pair == BASE.flops_per_pair


def test_two_scrapes_are_enough_and_say_that_nothing_was_held_out() -> None:
    first, *_, last = scrapes(unknown(2), 2, count=6)
    found = fit_scrapes([first, last], BASE)
    assert (found.windows, found.held_out) == (1, 0)
    assert np.median(np.abs(list(step_errors(found.profile, unknown(2)).values()))) < 0.1


def test_an_engine_that_began_anew_is_counted_from_there() -> None:
    before, after = scrapes(unknown(2), 2, count=6), scrapes(unknown(2), 3, count=6)
    moved = [(at + before[-1][0] + EVERY_S, page) for at, page in after]
    found = fit_scrapes([*before, *moved], BASE)
    assert found.windows == fit_scrapes(before, BASE).windows + fit_scrapes(after, BASE).windows
    assert np.median(np.abs(list(step_errors(found.profile, unknown(2)).values()))) < 0.1


def test_too_little_between_scrapes_is_refused_with_what_is_needed() -> None:
    pages = scrapes(BASE, 1)
    with pytest.raises(InvalidInput, match="at least two are needed, with 20 requests"):
        fit_scrapes(pages[:1], BASE)
    with pytest.raises(InvalidInput, match="1 scrapes with 0 finished"):
        fit_scrapes(pages[:1], BASE)
    with pytest.raises(InvalidInput, match="2 scrapes with 0 finished"):
        fit_scrapes([pages[3], (pages[3][0] + 60, pages[3][1])], BASE)


@pytest.mark.parametrize("idle", ["decode_s", "prefill_s"])
def test_scrapes_whose_sums_of_time_stay_at_nought_tell_nothing(idle: str) -> None:
    still = [(at, msgspec.structs.replace(totals, **{idle: 0.0})) for at, totals in scrapes(BASE, 1, count=4)]
    with pytest.raises(InvalidInput, match="whose prefill and decode took time"):
        fit_scrapes(still, BASE)
