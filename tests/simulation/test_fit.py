"""The coefficients of engines are found again from what a journal says of them."""

import msgspec
import numpy as np
import pytest

from bench.bars.twin_fit import fitted, journal_of, step_errors
from shoal.engine import EngineConfig, Profile, find_profile
from shoal.kernel import InvalidInput
from shoal.pool import Endpoint, EndpointState, Outcome, Request, Signals
from shoal.routing import Arrived, Ended, Forward, Recorded, events
from shoal.routing.journal import MAGIC, Opening, Step, encode
from shoal.simulation import Cluster, ClusterConfig, NodeConfig
from shoal.simulation.arrivals import Arrivals
from shoal.simulation.enginerun import EngineRun, Guide
from shoal.simulation.fit import fit, seconds_of
from shoal.simulation.observed import Seen, Served, observe
from shoal.simulation.recording import Recording
from shoal.simulation.workloads import MultiTurn

BASE = find_profile("h100-8b")
ADDRESS = "10.0.0.1:8000"


def slower() -> Profile:
    """Engines with half the compute, a third more of memory time, and a door."""
    return msgspec.structs.replace(
        BASE, flops_ratio=BASE.flops_ratio / 2, bytes_ratio=BASE.bytes_ratio * 0.75, overhead_s=0.004, request_s=0.006
    )


def written(steps: list[Step]) -> bytes:
    return MAGIC + b"".join([encode(Opening(0, "", False)), *map(encode, steps)])


def test_the_steps_of_engines_are_found_again() -> None:
    truth = slower()
    pool = observe(journal_of(truth, 5, 240))
    seen = list(pool.seen.values())
    assert all(served.is_clean and served.is_cached_told for each in seen for served in each.served)
    told: list[float] = []
    found = fit(seen, BASE, name="ours", progress=told.append)
    assert (found.profile.name, found.factors) == ("ours", {})
    assert found.e2e.median < 0.02
    assert max(map(abs, step_errors(found.profile, truth).values())) < 0.05
    assert found.fitted > found.held_out > 40
    assert told == sorted(told)
    assert 0 < told[-1] <= 1


def test_the_shortest_steps_are_found_of_engines_that_are_never_idle() -> None:
    """Everybody waits for some step in progress: what lies between tokens tells what a wait for one does not."""
    found, errors = fitted(1, 400)
    assert max(map(abs, errors.values())) < 0.01
    assert found.spread["overhead"] < 0.5


def test_gaps_lie_between_tokens_of_a_busy_engine_and_take_what_their_steps_take() -> None:
    truth = slower()
    for seen in observe(journal_of(truth, 6, 120)).seen.values():
        steps = EngineRun(seen.served, seen.block_size).steps(truth)
        sent_s = np.array([each.sent_s - seen.served[0].sent_s for each in seen.served])
        first_s = sent_s + np.array([each.ttft_s for each in seen.served])
        last_s = sent_s + np.array([each.total_s for each in seen.served])
        gaps = steps.gaps(first_s, last_s, coefficients(truth), 0.05)
        assert len(gaps.seen_s) > 50
        assert np.allclose(steps.terms(coefficients(truth), gaps).gaps @ coefficients(truth), gaps.seen_s)
        assert gaps.seen_s.min() > 0.05 - 1e-9


def test_a_model_engine_repeats_what_the_same_engine_did() -> None:
    truth = slower()
    for seen in observe(journal_of(truth, 6, 120)).seen.values():
        first_s, decode_s = EngineRun(seen.served, seen.block_size).times(truth, coefficients(truth))
        ttft_s = np.array([each.ttft_s for each in seen.served])
        total_s = np.array([each.total_s for each in seen.served])
        assert np.allclose(decode_s, total_s - ttft_s, rtol=1e-9, atol=1e-9)
        # Within the wait for a step, in whose place half of it is taken.
        assert np.abs(first_s - ttft_s).max() < 0.5
        assert np.abs(first_s.mean() / ttft_s.mean() - 1) < 0.10


def test_with_guidance_the_steps_of_a_wrong_model_are_about_those_that_were() -> None:
    truth = slower()
    wrong = msgspec.structs.replace(truth, flops_ratio=truth.flops_ratio * 1.7, bytes_ratio=truth.bytes_ratio * 1.7)
    for seen in observe(journal_of(truth, 6, 240)).seen.values():
        run = EngineRun(seen.served, seen.block_size)
        exact = run.steps(truth).terms(coefficients(truth))
        off = {}
        for name, guide in (("left alone", None), ("guided", Guide())):
            decode_s = run.steps(wrong, guide=guide).terms(coefficients(truth)).decode @ coefficients(truth)
            off[name] = np.abs(decode_s / (exact.decode @ coefficients(truth)) - 1).mean()
        assert off["guided"] < off["left alone"] / 3


def test_clocks_that_are_a_little_off_and_outliers_do_not_spoil_the_fit() -> None:
    """In the median of three journals: the shortest steps are a dozen times what first tokens are late by."""
    truth = slower()
    worst = []
    for seed in (5, 6, 7):
        seen = list(observe(journal_of(truth, seed, 240)).seen.values())
        rng = np.random.default_rng(1)
        for served in (served for each in seen for served in each.served):
            assert served.ttft_s is not None
            assert served.total_s is not None
            decode_s = (served.total_s - served.ttft_s) * rng.normal(1.0, 0.01)
            served.ttft_s = served.ttft_s * rng.normal(1.0, 0.01) + rng.gamma(2, 0.0005)
            if rng.random() < 0.03:
                served.ttft_s = 0.0
            served.total_s = served.ttft_s + decode_s
        worst.append(max(map(abs, step_errors(fit(seen, BASE).profile, truth).values())))
    assert np.median(worst) < 0.10


def test_an_endpoint_that_is_slower_than_its_like_is_named_with_how_much() -> None:
    truth = slower()
    nodes = tuple(
        NodeConfig(id=f"e{n}", engine=EngineConfig(profile=truth, slow_factor=1.0 + 0.3 * (n == 2))) for n in range(3)
    )
    config = ClusterConfig(nodes=nodes, seed=1)
    rng = np.random.default_rng(1)
    recording = Recording(config)
    Cluster(config, on_step=recording).run(Arrivals(rate_per_s=1.5).spread(MultiTurn(sessions=90).make(rng), rng))
    found = fit(list(observe(recording.files()).seen.values()), BASE)
    assert found.factors == {"e2": pytest.approx(1.3, rel=0.02)}
    assert max(map(abs, step_errors(found.profile, truth).values())) < 0.05


def coefficients(profile: Profile) -> np.ndarray:
    return np.array(list(seconds_of(profile).values()))


def test_too_few_requests_are_refused_with_what_is_needed() -> None:
    with pytest.raises(InvalidInput, match="at least 40"):
        fit(list(observe(journal_of(BASE, 1, 16)).seen.values()), BASE)


def test_the_time_in_the_queue_of_the_router_is_not_the_engines() -> None:
    seen = observed(Outcome(status=200, served_address=ADDRESS, ttft_s=1.5, duration_s=2.0, prompt_tokens=90,
                            cached_tokens=32, completion_tokens=11, engine_ttft_s=1.25))  # fmt: skip
    assert (seen.sent_s, seen.ttft_s, seen.total_s) == (101.0, pytest.approx(0.25), pytest.approx(0.75))
    assert (seen.prompt_tokens, seen.cached_tokens, seen.output_tokens, seen.is_clean) == (90, 32, 11, True)


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(status=200, served_address=ADDRESS, attempts=2, ttft_s=1.5, prompt_tokens=9, completion_tokens=3),
        Outcome(status=200, served_address=ADDRESS, ttft_s=1.5, prompt_tokens=9),
        Outcome(status=500, served_address=ADDRESS, ttft_s=1.5, prompt_tokens=9, completion_tokens=3),
        Outcome(status=200, served_address=ADDRESS, ttft_s=1.5, prompt_tokens=9, completion_tokens=3, is_cut=True),
    ],
)
def test_requests_that_did_not_go_straight_are_load_and_no_lesson(outcome: Outcome) -> None:
    assert observed(outcome).is_clean is False


def test_nothing_is_learned_from_an_engine_whose_cache_is_full() -> None:
    outcome = Outcome(status=200, served_address=ADDRESS, ttft_s=1.5, prompt_tokens=9, completion_tokens=3)
    assert observed(outcome).is_clean
    assert observed(outcome, Signals(kv_usage_ratio=0.95)).is_clean is False


def test_a_record_that_comes_with_the_end_teaches_as_one_that_comes_after_it() -> None:
    outcome = Outcome(status=200, served_address=ADDRESS, ttft_s=1.5, prompt_tokens=9, completion_tokens=3)
    seen = observed(outcome, comes_with_end=True)
    assert (seen.is_clean, seen.ttft_s, seen.output_tokens) == (True, pytest.approx(0.5), 3)


def observed(outcome: Outcome, signals: Signals | None = None, *, comes_with_end: bool = False) -> Served:
    """One request that arrived at 100 s, was sent a second later, and ended at 102 s."""
    steps = [
        Step(99.0, events.EndpointJoined(Endpoint(id="a", address=ADDRESS), EndpointState.READY), []),
        Step(99.5, events.LoadSeen("a", signals or Signals()), []),
        Step(100.0, Arrived(Request(id="r", prompt_tokens=80, is_streaming=True)), []),
        Step(101.0, events.Ticked(), [Forward("r", (ADDRESS,))]),
        *(
            [Step(102.0, Ended("r", outcome), [])]
            if comes_with_end
            else [Step(102.0, Ended("r"), []), Step(102.1, Recorded("r", outcome), [])]
        ),
    ]
    (served,) = observe([written(steps)]).seen["a"].served
    return served


def test_some_of_those_that_teach_are_held_out_where_all_later_ones_are_load() -> None:
    (seen, *_) = observe(journal_of(BASE, 1, 240)).seen.values()
    for each in seen.served[len(seen.served) // 2 :]:
        each.is_clean = False
    found = fit([seen], BASE)
    clean = len(seen.served) // 2
    assert (found.fitted, found.held_out) == (clean - int(clean * 0.3), int(clean * 0.3))


def test_nobody_held_out_is_refused_with_what_to_do() -> None:
    seen = list(observe(journal_of(BASE, 1, 240)).seen.values())
    with pytest.raises(InvalidInput, match="longer journal"):
        fit([few(each, place) for place in range(30) for each in seen], BASE)


def few(seen: Seen, place: int) -> Seen:
    """An endpoint with two of another one's requests."""
    part = Seen(seen.endpoint)
    part.served = seen.served[2 * (place % 3) : 2 * (place % 3) + 2]
    return part
