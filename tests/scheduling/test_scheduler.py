import numpy as np
import pytest

from shoal.pool import Decision, FleetView, Refusal, RefusalReason, Request
from shoal.scheduling.cache_scorers import PrefixCacheScorer
from shoal.scheduling.expected_wait import ExpectedWaitScorer
from shoal.scheduling.filters import LabelSelectorFilter
from shoal.scheduling.load_scorers import QueueScorer
from shoal.scheduling.pickers import MaxScorePicker, RandomPicker
from tests.scheduling.script import NAN, chain, decide, request, scheduler, view


class Wild:
    """Scores outside of 0 to 1."""

    type = "wild"

    def score(self, request: Request, view: FleetView) -> np.typing.NDArray[np.float64]:
        return np.array([-3.0, 7.0, NAN])


def test_a_decision_explains_itself() -> None:
    made = scheduler(QueueScorer(), PrefixCacheScorer(), weights=(2.0, 3.0))
    decision = decide(made, request(100), view(waiting=[0, 10, 5], matched_tokens=[0, 100, 0]))
    assert decision.profile == "test"
    assert decision.candidates == ("e0", "e1", "e2")
    assert [(column.name, column.weight) for column in decision.scores] == [("plugin0", 2.0), ("plugin1", 3.0)]
    assert list(decision.scores[0].values) == [1.0, 0.0, 0.5]
    assert list(decision.total) == [2.0, 3.0, 1.0]
    assert decision.chosen == ("e1", "e0", "e2")


def test_scores_are_clamped_and_the_unknown_is_0() -> None:
    decision = decide(scheduler(Wild()), request(), view(3))
    assert list(decision.scores[0].values) == [0.0, 1.0, 0.0]


def test_fallbacks_follow_the_choice_in_order_of_score() -> None:
    seen = view(waiting=[3, 1, 2, 0])
    assert decide(scheduler(QueueScorer()), request(), seen).chosen == ("e3", "e1", "e2")
    assert decide(scheduler(QueueScorer(), fallbacks=0), request(), seen).chosen == ("e3",)
    many = scheduler(QueueScorer(), picker=MaxScorePicker(max_num_of_endpoints=3), fallbacks=9)
    assert decide(many, request(), seen).chosen == ("e3", "e1", "e2", "e0")


def test_even_a_random_choice_has_the_best_as_fallbacks() -> None:
    made = scheduler(QueueScorer(), picker=RandomPicker())
    for _ in range(20):
        target, *rest = decide(made, request(), view(waiting=[3, 1, 2, 0])).chosen
        assert rest == [name for name in ("e3", "e1", "e2", "e0") if name != target][:2]


def test_filters_run_in_order_and_say_what_they_dropped() -> None:
    labels = [{"a": "1", "b": "1"}, {"a": "1"}, {"b": "1"}, {}]
    made = scheduler(LabelSelectorFilter(match_labels={"a": "1"}), LabelSelectorFilter(match_labels={"b": "1"}))
    decision = decide(made, request(), view(labels=labels))
    assert decision.dropped == (("plugin0", 2), ("plugin1", 1))
    assert decision.candidates == ("e0",)


def test_no_candidate_at_all_is_a_refusal() -> None:
    refusal = scheduler(QueueScorer()).schedule(request(), FleetView((), {}, ()), 0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.NO_ENDPOINTS


def test_the_unhealthy_are_filtered_before_the_pick_so_the_rest_stay_balanced() -> None:
    labels = [{"up": "1"}, {"up": "1"}, {}, {"up": "1"}]
    made = scheduler(LabelSelectorFilter(match_labels={"up": "1"}), ExpectedWaitScorer())
    counts = dict.fromkeys(("e0", "e1", "e2", "e3"), 0)
    for _ in range(600):
        counts[decide(made, request(), view(labels=labels, inflight_requests=[0] * 4)).chosen[0]] += 1
    assert counts["e2"] == 0
    assert min(counts["e0"], counts["e1"], counts["e3"]) > 140


def test_the_same_seed_decides_the_same() -> None:
    def run(seed: int) -> list[str]:
        made = scheduler(ExpectedWaitScorer(), seed=seed)
        return [decide(made, request(), view(8)).chosen[0] for _ in range(50)]

    assert run(3) == run(3)
    assert run(3) != run(4)


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_any_size_of_fleet_is_served(count: int) -> None:
    columns = {"waiting": [float(at) for at in range(count)], "matched_tokens": [0.0] * count}
    decision = decide(scheduler(QueueScorer(), PrefixCacheScorer()), request(10), view(**columns))
    assert decision.chosen[0] == "e0"
    assert len(decision.chosen) == min(3, count)


class Keeper:
    """Chooses the last endpoint, and notes what it is told."""

    type = "keeper"
    max_num_of_endpoints = 1

    def __init__(self) -> None:
        self.told: list[str] = []

    def score(self, request: Request, view: FleetView) -> np.typing.NDArray[np.float64]:
        return np.arange(len(view)) / len(view)

    def dispatched(self, request: Request, view: FleetView, decision: Decision, now: float) -> None:
        self.told.append(f"sent {request.id}: {view.chain()}")

    def released(self, request_id: str) -> None:
        self.told.append(f"over {request_id}")

    def endpoint_left(self, endpoint_id: str) -> None: ...


def test_who_keeps_account_is_told_of_every_beginning_and_every_end() -> None:
    keeper = Keeper()
    made = scheduler(keeper)
    seen = view(3, chain=chain("a"))
    made.dispatched(request(), seen, decide(made, request(), seen), 0.0)
    made.released("r")
    assert keeper.told == [f"sent r: {chain('a')}", "over r"]


def test_the_chain_of_a_prompt_ends_where_its_first_prompt_does_and_filters_keep_it() -> None:
    seen = view(2, chain=[(7, 64), (8, 128), (0, 192), (9, 256)])
    assert seen.chain() == seen.keep(np.array([True, False])).chain() == [(7, 64), (8, 128)]
    assert view(2).chain() == []
