import numpy as np
import pytest

from shoal.pool import Signals
from shoal.scheduling.cache_scorers import ContextLengthAware, LoraAffinityScorer, NoHitLruScorer, PrefixCacheScorer
from tests.scheduling.script import NAN, decide, request, scheduler, view

RANGE = "llm-d.ai/context-length-range"


def test_prefix_scores_the_matched_share_of_the_prompt() -> None:
    scored = PrefixCacheScorer().score(request(1000), view(matched_tokens=[0, 500, 1200, NAN]))
    assert list(scored) == [0.0, 0.5, 1.0, 0.0]


def test_prefix_can_weigh_the_length_of_the_match() -> None:
    scorer = PrefixCacheScorer(match_length_weight=0.5, match_length_scale_tokens=1000)
    scored = scorer.score(request(2000), view(matched_tokens=[500, 1500]))
    assert list(scored) == pytest.approx([0.5 * 0.25 + 0.5 * 0.25, 0.5 * 1.0 + 0.5 * 0.75])


def test_a_prompt_of_unknown_size_matches_nowhere() -> None:
    assert list(PrefixCacheScorer().score(request(0), view(matched_tokens=[0, 0]))) == [0.0, 0.0]


def test_lora_prefers_a_loaded_adapter_then_a_free_slot_then_a_waiting_one() -> None:
    signals = [
        Signals(running_adapters=("m", "x"), max_adapters=2),
        Signals(running_adapters=("x",), max_adapters=2),
        Signals(running_adapters=("x", "y"), waiting_adapters=("m",), max_adapters=2),
        Signals(running_adapters=("x", "y"), max_adapters=2),
        Signals(),
        None,
    ]
    assert list(LoraAffinityScorer().score(request(), view(signals=signals))) == [1.0, 0.8, 0.6, 0.0, 0.0, 0.0]


def test_an_endpoint_without_signals_scores_like_the_worst_known() -> None:
    signals = [Signals(running_adapters=("m",), max_adapters=2), Signals(max_adapters=2), None]
    assert list(LoraAffinityScorer().score(request(), view(signals=signals))) == [1.0, 0.8, 0.8]


def test_cold_requests_go_round_the_least_recently_cold() -> None:
    made = scheduler(NoHitLruScorer())
    seen = view(matched_tokens=[0, 0, 0, 0])
    targets = []
    for _ in range(12):
        decision = decide(made, request(100), seen)
        made.dispatched(request(100), seen, decision, 0.0)
        targets.append(decision.chosen[0])
    assert sorted(targets[:4]) == ["e0", "e1", "e2", "e3"]
    assert targets[4:8] == targets[:4]
    assert targets[8:] == targets[:4]


def test_cold_ranks_run_from_1_to_0() -> None:
    scorer = NoHitLruScorer()
    made = scheduler(scorer)
    seen = view(matched_tokens=[0, 0, 0])
    for _ in range(3):
        made.dispatched(request(100), seen, decide(made, request(100), seen), 0.0)
    assert sorted(scorer.score(request(100), seen)) == [0.0, 0.5, 1.0]


def test_a_hit_anywhere_makes_it_neutral_and_teaches_nothing() -> None:
    scorer = NoHitLruScorer()
    made = scheduler(scorer)
    hit, cold = view(matched_tokens=[0, 64]), view(matched_tokens=[0, 0])
    made.dispatched(request(100), hit, decide(made, request(100), hit), 0.0)
    assert list(scorer.score(request(100), hit)) == [0.5, 0.5]
    assert list(scorer.score(request(100), cold)) == [1.0, 1.0]


def test_cold_memory_is_bounded_and_forgets_who_left() -> None:
    scorer = NoHitLruScorer(lru_size=2)
    made = scheduler(scorer)
    seen = view(matched_tokens=[0, 0, 0])
    for _ in range(3):
        made.dispatched(request(100), seen, decide(made, request(100), seen), 0.0)
    assert sorted(scorer.score(request(100), seen)) == [0.0, 0.5, 1.0]
    for left in ("e0", "e1", "e2"):
        made.endpoint_left(left)
    assert list(scorer.score(request(100), seen)) == [1.0, 1.0, 1.0]


def test_cold_memory_survives_a_reload() -> None:
    old, new = scheduler(NoHitLruScorer()), scheduler(NoHitLruScorer())
    seen = view(matched_tokens=[0, 0])
    first = decide(old, request(100), seen)
    old.dispatched(request(100), seen, first, 0.0)
    new.adopt(old)
    assert decide(new, request(100), seen).chosen[0] != first.chosen[0]


def test_prompts_go_to_the_tightest_range_that_holds_them() -> None:
    labels = [{RANGE: "0-4096"}, {RANGE: "0-131072"}, {RANGE: "8000-131072"}, {}, {RANGE: "many"}, {RANGE: "5-5"}]
    scored = ContextLengthAware().score(request(1000), view(labels=labels))
    width, room = 0.7 / (1 + 4096 / 10_000), 0.3 * (4096 - 1000) / 4096
    assert scored[0] == pytest.approx(0.3 + 0.7 * (width + room))
    assert scored[2] == pytest.approx(0.3 / (1 + 7000 / 1000))
    assert scored[0] > scored[1] > scored[2]
    assert list(scored[3:5]) == [0.5, 0.0]
    assert scored[5] == pytest.approx(0.3 / (1 + 995 / 1000))
    assert ContextLengthAware().score(request(5), view(labels=labels))[5] == 1.0


def test_ranges_can_filter() -> None:
    labels = [{RANGE: "0-4096"}, {RANGE: "0-131072"}, {}, {RANGE: "many"}]
    seen = view(labels=labels)
    strict = ContextLengthAware(enable_filtering=True)
    assert list(strict.keep(request(5000), seen)) == [False, True, True, False]
    assert list(strict.keep(request(5000), seen.keep(np.array([False, False, True, False])))) == [True]
    assert ContextLengthAware().keep(request(5000), seen).all()
