"""Regret: what a policy's run costs above the best one that is known for the same arrivals."""

import math

import pytest

from shoal.simulation.regret import NEVER_S, REFERENCE, Scale, waits, with_regret
from tests.report.runs import made


def test_a_cost_is_the_mean_of_both_quantiles_over_the_lowest() -> None:
    runs = [made("a"), made("b", slower=2.0)]
    scale = Scale.of(runs)
    # Each has one request that failed, which counts as one that never got a token.
    assert waits(runs[0], 61)[-1] == NEVER_S
    assert scale.cost(waits(runs[0], 61)) == 1.0
    assert scale.cost(waits(runs[1], 61)) == pytest.approx(2.0)


def test_requests_that_were_not_sent_count_as_those_that_failed() -> None:
    run = made("a")
    assert (waits(run, 61) == NEVER_S).sum() == 1
    assert (waits(run, 70) == NEVER_S).sum() == 10
    # Of 61 requests less than a twentieth failed, of 70 more.
    scale = Scale.of([run])
    assert scale.cost(waits(run, 61)) == 1.0
    assert scale.cost(waits(run, 70)) > 1e6


def test_the_reference_is_the_best_of_the_search_and_of_every_policy() -> None:
    found = made(REFERENCE, slower=0.5)
    judged = with_regret([made("a"), made("b", slower=2.0), found])
    assert [run.result.regret_ratio for run in judged] == pytest.approx([1.0, 3.0, 0.0])
    assert judged[2].requests is found.requests
    judged = with_regret([made("a"), made("b", slower=2.0), made(REFERENCE, slower=3.0)])
    assert [run.result.regret_ratio for run in judged] == pytest.approx([0.0, 1.0, 0.0])
    assert judged[2].policy == REFERENCE
    assert judged[2].result.ttft_p95_s == judged[0].result.ttft_p95_s


def test_each_load_and_seed_has_a_reference_of_its_own_and_those_cut_short_have_none() -> None:
    runs = [made("a", 1), made("a", 2), made(REFERENCE, 1, slower=0.5), made(REFERENCE, 2, slower=0.5, is_partial=True)]
    regrets = [run.result.regret_ratio for run in with_regret(runs)]
    assert regrets[0] == pytest.approx(1.0)
    assert regrets[1] is None
    assert regrets[3] is None
    assert not math.isnan(regrets[2] or 0.0)
