"""Predicted latency in the router: when it decides, what it learns from, and what it never reads."""

import numpy as np
import pytest

from bench.fleets import PREDICTING, sessions, ttft_errors, two_kinds
from shoal.latency.errors import MIN_RECORDS
from shoal.pool.outcome import Forecast
from shoal.routing import Account, Forward
from shoal.routing.config import load
from shoal.routing.events import EndpointLeft
from shoal.routing.journal import Opening, Step, encode, replay
from tests.routing.script import Pool, Sent

DECIDING = PREDICTING + "- type: latency-scorer\n- type: latency-slo-admitter\n"
LOW = """\
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: batch}
spec: {priority: -1}
"""
SPEED = {"e0": 4e-5, "e1": 4e-5, "e2": 8e-5, "e3": 8e-5}


def pool(config: str = DECIDING, seed: int = 1) -> Pool:
    made = Pool(0, config=config, seed=seed)
    for number in range(4):
        kind = "fast" if number < 2 else "slow"
        made.join(f"e{number}", f"10.0.0.{number}:8000", labels={"llm-d.ai/accelerator": kind})
    return made


def name_of(sent: Sent) -> str:
    return f"e{sent.target.split(':')[0][-1]}"


def ttft_of(sent: Sent, tokens: int, factor: float = 1.0) -> float:
    return factor * (0.02 + SPEED[name_of(sent)] * tokens)


def serve(made: Pool, count: int, *, start: int = 0, factor: float = 1.0, **fields: object) -> list[Account]:
    """Serve unique prompts one by one on engines whose ttft follows a law of the tokens."""
    chance = np.random.default_rng(7 + start)
    accounts = []
    for number in range(start, start + count):
        tokens = int(chance.integers(500, 6000))
        sent = made.send(f"unique {number}", tokens, **fields)
        ttft_s = ttft_of(sent, tokens, factor)
        made.now += ttft_s + 1.0
        accounts.append(
            sent.finish(
                ttft_s=ttft_s, duration_s=ttft_s + 1.0, prompt_tokens=tokens, cached_tokens=0, completion_tokens=101
            )
        )
        made.now += 0.01
    return accounts


def forecast(account: Account) -> Forecast:
    assert account.forecast is not None
    return account.forecast


def explained(made: Pool, sent: Sent) -> dict[str, object]:
    found = made.router.explanations.find(sent.request_id)
    assert found is not None
    return found


def test_nothing_is_predicted_unless_it_is_asked_for() -> None:
    account = Pool().send().finish()
    assert account.forecast is None


def test_predictions_are_made_and_compared_though_nothing_reads_them() -> None:
    made = pool(PREDICTING)
    accounts = serve(made, 120)
    last = forecast(accounts[-1])
    assert last.ttft_s == pytest.approx(accounts[-1].outcome.ttft_s, rel=0.15)
    assert last.tpot_s == pytest.approx(0.01, rel=0.3)
    assert {each.what for each in made.router.status().latency} == {"ttft", "tpot"}


def test_the_default_profile_decides_until_predictions_can_be_trusted() -> None:
    made = pool()
    first = made.send("first")
    assert explained(made, first)["profile"] == "default: predictions not trusted"
    serve(made, 160)
    later = made.send("later", 2000)
    assert explained(made, later)["profile"] == "default"
    assert name_of(later) in ("e0", "e1")
    assert any(each.is_trusted for each in made.router.status().latency if each.what == "ttft")


def test_bad_predictions_are_left_out_again() -> None:
    made = pool()
    serve(made, 160)
    chance = np.random.default_rng(1)
    for number in range(200):
        sent = made.send(f"noise {number}", 1000)
        made.now += 1.0
        sent.finish(ttft_s=float(10 ** chance.uniform(-2, 1)), prompt_tokens=1000, cached_tokens=0)
    assert explained(made, made.send("later"))["profile"] == "default: predictions not trusted"


def test_a_new_kind_goes_by_what_it_inherits_and_one_that_is_always_wrong_takes_trust_from_all() -> None:
    made = pool()
    serve(made, 160)
    made.join("e5", "10.0.0.5:8000", labels={"llm-d.ai/accelerator": "odd"})
    assert explained(made, made.send("beside a new kind"))["profile"] == "default"
    for name in ("e0", "e1", "e2", "e3"):
        made.feed(EndpointLeft(name))
    chance = np.random.default_rng(1)
    for number in range(4 * MIN_RECORDS):
        sent = made.send(f"noise {number}", 1000)
        assert name_of(sent) == "e5"
        made.now += 1.0
        sent.finish(ttft_s=float(10 ** chance.uniform(-2, 1)), prompt_tokens=1000, cached_tokens=0)
    made.join("e0", "10.0.0.0:8000", labels={"llm-d.ai/accelerator": "fast"})
    assert explained(made, made.send("beside a bad kind"))["profile"] == "default: predictions not trusted"
    made.feed(EndpointLeft("e5"))
    assert explained(made, made.send("without it"))["profile"] == "default"


def test_machines_that_carry_the_same_label_teach_each_other() -> None:
    made = pool(PREDICTING)
    serve(made, 200)
    made.join("e4", "10.0.0.4:8000", labels={"llm-d.ai/accelerator": "slow"})
    SPEED["e4"] = SPEED["e3"]
    sent = made.send("on a new machine", 4000)
    candidates = explained(made, sent)["candidates"]
    assert isinstance(candidates, list)
    of_new = next(each for each in candidates if each["id"] == "e4")
    assert of_new["predicted_ttft_s"] == pytest.approx(0.02 + 4000 * SPEED["e4"], rel=0.2)


def test_a_request_that_waited_in_our_queue_teaches_only_what_the_engine_took() -> None:
    made = pool(PREDICTING)
    serve(made, 120)
    before = made.router.status().latency[0].median_ratio
    for number in range(64):
        sent = made.send(f"held {number}", 1000)
        flight = made.router.flight(sent.request_id)
        assert flight is not None
        flight.arrived_at -= 30.0
        ttft_s = ttft_of(sent, 1000)
        sent.finish(
            ttft_s=30.0 + ttft_s, duration_s=31.0 + ttft_s, prompt_tokens=1000, cached_tokens=0, completion_tokens=101
        )
    assert made.router.status().latency[0].median_ratio < before + 0.1


def test_a_retried_a_plain_and_a_failed_request_teach_nothing() -> None:
    made = pool(PREDICTING)
    made.send("a").finish(attempts=2, ttft_s=9.0)
    made.send("c").finish(status=500, ttft_s=9.0)
    made.send("d").finish(ttft_s=None)
    assert made.router.status().latency == []


def test_a_follow_up_is_expected_to_find_its_history_where_it_was_answered() -> None:
    made = pool(PREDICTING)
    serve(made, 60)
    held: list[tuple[float, float]] = []
    for number in range(12):
        first = made.send(f"chat {number}", 2000, session_id=f"s{number}")
        made.now += 2.0
        first.finish(ttft_s=0.1, prompt_tokens=1900, cached_tokens=0, completion_tokens=400)
        made.now += 1.0
        follow = made.send(f"chat {number}", 2600, session_id=f"s{number}")
        flight = made.router.flight(follow.request_id)
        assert flight is not None
        assert flight.noted is not None
        if name_of(follow) == name_of(first):
            held.append((flight.noted.figures[1], 2600 * 0.95 - 2300))
            follow.finish(ttft_s=0.05, prompt_tokens=2470, cached_tokens=2296, completion_tokens=20)
        made.now += 1.0
    expected, real = held[-1]
    assert len(held) >= 8
    assert expected == pytest.approx(real, abs=80)


def test_low_priority_that_cannot_keep_its_slo_is_refused_and_the_same_at_normal_priority_is_not() -> None:
    made = pool(DECIDING + LOW)
    serve(made, 160)
    for number in range(4):
        made.load(f"e{number}", running=20.0, waiting=0.0, kv_usage_ratio=0.5)
    busy = [made.send(f"busy {number}", 5000) for number in range(40)]
    assert all(isinstance(each.command, Forward) for each in busy)
    asked = {"x-llm-d-slo-ttft-ms": "10"}
    shed = made.send("shed", 1000, objective="batch", headers=asked)
    assert shed.refused.refusal.reason.value == "rejected-not-admitted"
    assert isinstance(made.send("kept", 1000, headers=asked).command, Forward)
    assert isinstance(made.send("no slo", 1000, objective="batch").command, Forward)


def test_who_asked_for_the_strictest_tpot_is_forgotten_when_it_ends() -> None:
    made = pool()
    serve(made, 160)
    sent = made.send("strict", 1000, headers={"x-llm-d-slo-tpot-ms": "1"})
    forecasts = made.router._forecasts
    column = forecasts.strictest_tpot_slo_s()
    assert isinstance(column, np.ndarray)
    assert np.isfinite(column).sum() == 1
    sent.finish()
    assert forecasts.strictest_tpot_slo_s() == float("inf")


def test_a_reload_keeps_what_was_learned() -> None:
    made = pool()
    serve(made, 160)
    made.router._apply(load(DECIDING + "- type: queue-scorer\n", "reload"), made.now)
    assert explained(made, made.send("later"))["profile"] == "default"


def test_a_journal_with_predictions_replays_to_the_same_commands() -> None:
    steps: list[Step] = []

    class Recording(Pool):
        def feed(self, event: object) -> list[object]:  # type: ignore[override]
            commands = super().feed(event)
            steps.append(Step(self.now, event, commands))  # type: ignore[arg-type]
            return commands  # type: ignore[return-value]

    made = Recording(0, config=DECIDING, seed=5)
    for number in range(4):
        labels = {"llm-d.ai/accelerator": "fast" if number < 2 else "slow"}
        made.join(f"e{number}", f"10.0.0.{number}:8000", labels=labels)
    serve(made, 150)
    assert any(isinstance(each, Account) and forecast(each).is_trusted for step in steps for each in step.commands)
    encoded = [encode(step) for step in steps]
    assert encoded
    count, difference = replay(Opening(5, DECIDING, False), steps)
    assert difference is None
    assert count == len(steps)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_cold_fleet_of_two_kinds_is_predicted_within_three_hundred_requests(labelled: bool) -> None:
    cluster, accounts = two_kinds(DECIDING, 3, labelled=labelled)
    cluster.run(sessions(np.random.default_rng(3), 130, 4.0))
    errors = ttft_errors(accounts)
    assert len(errors) > 400
    assert np.median(errors[250:]) < 0.15


def test_no_decision_depends_on_how_long_an_answer_will_be() -> None:
    """Two worlds that differ in nothing but the lengths of answers: all is the same until an answer's end is told."""

    def decisions(factor: int) -> list[Forward]:
        made = pool()
        serve(made, 2 * MIN_RECORDS)
        sent = []
        for number in range(30):
            sent.append(made.send(f"open {number}", 500 + 100 * number, session_id=f"s{number % 5}"))
            made.now += 0.01
        ends = [each.finish(completion_tokens=10 * factor, duration_s=float(factor)) for each in sent[:1]]
        assert ends[0].outcome.completion_tokens == 10 * factor
        return [each.forward for each in sent]

    assert decisions(1) == decisions(100)
