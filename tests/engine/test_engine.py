"""The engine machine: batching, chunks, prefix reuse, preemption, aborts, time."""

import msgspec
import pytest

from shoal.engine import (
    Aborted,
    EngineConfig,
    PaceChanged,
    Refuse,
    Submitted,
    Ticked,
)
from shoal.engine.commands import ConfirmReset
from shoal.engine.events import CacheReset
from shoal.kernel import ClockWentBack
from tests.engine.virtual_time import VirtualTime, request


def small(**changes: object) -> EngineConfig:
    """A tiny engine with 4-token blocks."""
    fields: dict[str, object] = {"block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    return EngineConfig(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_request_gets_its_first_token_at_the_end_of_prefill_and_one_a_step_after_it() -> None:
    time = VirtualTime(small())
    time.send(request("a", prompt=10, output=3))
    counts = []
    while time.step():
        counts.append(time.tokens.get("a", 0))
    assert counts == [1, 2, 3]
    done = time.finished["a"]
    assert (done.reason, done.output_tokens, done.prompt_tokens) == ("length", 3, 10)
    assert done.first_token_at is not None
    assert 0 < done.first_token_at < done.finished_at


def test_a_long_prefill_is_cut_into_chunks_of_the_token_budget() -> None:
    time = VirtualTime(small())
    time.send(request("a", prompt=100, output=1))
    time.run()
    assert time.steps == 4, "32 + 32 + 32 + 4"


def test_running_requests_decode_while_another_prefills() -> None:
    time = VirtualTime(small())
    time.send(request("a", prompt=4, output=50))
    time.step()
    time.send(request("b", prompt=100, output=1))
    before = time.tokens["a"]
    while "b" not in time.finished:
        time.step()
    assert time.tokens["a"] - before == 5, "the step under way, then 31 prompt tokens of b beside each token of a"


def test_a_step_takes_longer_with_more_prefill_in_it() -> None:
    time = VirtualTime(small())
    time.send(request("a", prompt=32, output=2))
    time.step()
    prefill_s = time.now
    time.step()
    assert prefill_s == pytest.approx(0.0032 + 0.001)
    assert time.now - prefill_s == pytest.approx(0.004)


def test_requests_wait_in_order_of_arrival_when_the_batch_is_full() -> None:
    time = VirtualTime(small(max_num_seqs=1))
    for name in "abc":
        time.send(request(name, prompt=4, output=2))
    assert (time.engine.num_running, time.engine.num_waiting) == (1, 2)
    time.run()
    assert list(time.finished) == ["a", "b", "c"]


def test_a_lower_priority_value_goes_first_only_with_priority_scheduling() -> None:
    for is_priority, expected in ((False, ["a", "b", "c"]), (True, ["a", "c", "b"])):
        time = VirtualTime(small(max_num_seqs=1, is_priority_scheduling=is_priority))
        for name, priority in (("a", 10), ("b", 10), ("c", -5)):
            time.send(Submitted(request_id=name, prompt_tokens=4, output_tokens=2, priority=priority))
        time.run()
        assert list(time.finished) == expected


def test_a_second_request_reuses_the_whole_blocks_of_a_shared_prefix() -> None:
    time = VirtualTime(small())
    time.send(request("a", prompt=22, output=2, prefix=20))
    time.run()
    time.send(request("b", prompt=23, output=2, prefix=20))
    time.run()
    assert time.finished["a"].cached_tokens == 0
    assert time.finished["b"].cached_tokens == 20
    counters = time.engine.counters
    assert (counters.prefix_queries, counters.prefix_hits) == (45, 20)
    assert (counters.prompt, counters.cached, counters.generation) == (45, 20, 4)


def test_an_identical_prompt_still_computes_its_last_block() -> None:
    time = VirtualTime(small())
    for name in ("a", "b"):
        time.send(request(name, prompt=24, output=1, prefix=24))
        time.run()
    assert time.finished["b"].cached_tokens == 20


def test_two_equal_prompts_of_one_step_share_their_blocks() -> None:
    time = VirtualTime(small())
    time.send(request("warm", prompt=1, output=1))
    time.send(request("a", prompt=12, output=4, prefix=12))
    time.send(request("b", prompt=13, output=4, prefix=12))
    time.run()
    assert time.finished["b"].cached_tokens == 12


def test_the_next_turn_of_a_chat_reuses_the_answer_of_the_last_one() -> None:
    time = VirtualTime(small())
    time.send(request("a", prompt=8, output=9, prefix=17))
    time.run()
    time.send(request("b", prompt=30, output=1, prefix=17))
    time.run()
    assert time.finished["b"].cached_tokens == 16


def test_usage_counts_blocks_of_running_requests_not_reusable_ones() -> None:
    time = VirtualTime(small())
    time.send(request("a", prompt=16, output=4))
    assert time.engine.pool.usage_ratio == pytest.approx(4 / 64)
    time.run()
    assert time.engine.pool.usage_ratio == 0.0
    assert time.engine.pool.num_cached == 4


def test_the_last_running_request_is_preempted_when_blocks_run_out_and_still_finishes() -> None:
    time = VirtualTime(small(num_blocks=12))
    time.send(request("a", prompt=16, output=24))
    time.send(request("b", prompt=16, output=24))
    time.run()
    assert time.engine.counters.preemptions > 0
    assert time.finished["a"].preemptions == 0
    assert time.finished["b"].preemptions > 0
    assert time.tokens == {"a": 24, "b": 24}
    assert time.engine.counters.prompt == 32, "a recomputed prompt is counted once"


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    time = VirtualTime(small(num_blocks=4))
    (refusal,) = time.send(request("a", prompt=16, output=2))
    assert isinstance(refusal, Refuse)
    assert "16 prompt and 2 output tokens do not fit 16" in refusal.message
    assert time.engine.deadline() is None


def test_a_request_id_in_use_is_refused() -> None:
    time = VirtualTime(small())
    assert time.send(request("a", prompt=4, output=2)) == []
    assert isinstance(time.send(request("a", prompt=4, output=2))[0], Refuse)


def test_an_abort_frees_its_blocks_at_once_running_or_waiting() -> None:
    time = VirtualTime(small(max_num_seqs=1))
    time.send(request("a", prompt=8, output=9))
    time.send(request("b", prompt=8, output=9))
    time.step()
    for name in ("b", "a"):
        time.send(Aborted(request_id=name))
        assert time.finished[name].reason == "abort"
    engine = time.engine
    assert (engine.num_running, engine.num_waiting, engine.pool.num_held) == (0, 0, 0)
    time.run()
    assert time.tokens == {"a": 1}
    assert time.send(Aborted(request_id="a")) == []


def test_a_prefill_only_request_finishes_without_a_token() -> None:
    time = VirtualTime(small())
    time.send(request("a", prompt=10, output=0))
    time.run()
    assert time.tokens == {}
    assert (time.finished["a"].reason, time.finished["a"].output_tokens) == ("stop", 0)


def test_an_answer_shorter_than_its_limit_ends_with_stop() -> None:
    time = VirtualTime(small())
    time.send(Submitted(request_id="a", prompt_tokens=3, output_tokens=2, max_tokens=9))
    time.run()
    assert time.finished["a"].reason == "stop"


def test_adapters_beyond_the_slots_are_deferred_and_others_overtake_them() -> None:
    time = VirtualTime(small(max_loras=1))
    time.send(request("a", prompt=4, output=4, adapter="x"))
    time.send(request("b", prompt=4, output=4, adapter="y"))
    time.send(request("c", prompt=4, output=1, adapter="x"))
    time.step()
    assert time.engine.num_deferred == 1
    assert time.engine.adapters() == (("x",), ("y",))
    time.run()
    assert list(time.finished) == ["c", "a", "b"]


def test_the_cache_is_dropped_only_when_nobody_holds_a_block() -> None:
    time = VirtualTime(small())
    time.send(request("a", prompt=16, output=2, prefix=16))
    assert time.send(CacheReset()) == [ConfirmReset(is_done=False)]
    time.run()
    assert time.send(CacheReset()) == [ConfirmReset(is_done=True)]
    time.send(request("b", prompt=17, output=1, prefix=16))
    time.run()
    assert time.finished["b"].cached_tokens == 0


def test_a_slow_factor_stretches_the_next_step() -> None:
    time = VirtualTime(small(slow_factor=10.0))
    time.send(request("a", prompt=1, output=2))
    time.step()
    assert time.now == pytest.approx(0.04)
    time.send(PaceChanged(slow_factor=1.0))
    time.step()
    assert time.now == pytest.approx(0.08), "the step under way keeps its pace"


def test_a_late_tick_does_not_add_up_unless_it_is_very_late() -> None:
    time = VirtualTime(small())
    time.send(request("a", prompt=1, output=9))
    deadline = time.engine.deadline()
    assert deadline == pytest.approx(0.004)
    time.now = 0.005
    time.send(Ticked())
    assert time.engine.deadline() == pytest.approx(0.008)
    time.now = 1.0
    time.send(Ticked())
    assert time.engine.deadline() == pytest.approx(1.004)


def test_an_early_tick_does_nothing_and_time_never_goes_back() -> None:
    time = VirtualTime(small())
    time.send(request("a", prompt=1, output=2))
    time.now = 0.001
    assert time.send(Ticked()) == []
    time.now = 0.0005
    with pytest.raises(ClockWentBack):
        time.send(Ticked())


def test_of_a_prompt_that_another_engine_prefilled_only_the_end_is_computed() -> None:
    time = VirtualTime(small())
    time.send(msgspec.structs.replace(request("a", prompt=100, output=2), received_tokens=100))
    time.step()
    done_at = time.now
    time.run()
    assert time.finished["a"].cached_tokens == 96
    alone = VirtualTime(small())
    alone.send(request("a", prompt=4, output=2))
    alone.step()
    assert done_at == pytest.approx(alone.now, rel=0.01)
    # Its blocks can be found by others now.
    assert time.engine.held_tokens(request("a", prompt=100, output=0).block_hashes) == 100


def test_what_another_engine_sent_is_computed_when_its_blocks_were_lost() -> None:
    time = VirtualTime(small(num_blocks=16))
    time.send(request("a", prompt=24, output=30))
    time.step()
    time.send(msgspec.structs.replace(request("b", prompt=24, output=10), received_tokens=24))
    time.run()
    assert time.finished["b"].preemptions >= 1
    assert time.finished["b"].output_tokens == 10
