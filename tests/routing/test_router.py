from collections import Counter

import pytest

from shoal.kernel import ClockWentBack
from shoal.pool import Endpoint, EndpointState, Outcome, RefusalReason, ServedModel
from shoal.routing import Account, Arrived, Configured, Ended, Recorded, Ticked
from shoal.routing.events import EndpointChanged, EndpointJoined, EndpointLeft, ModelsSeen
from shoal.routing.router import RECORD_TIMEOUT_S
from shoal.scheduling.baselines_costs import DynamoCostScorer
from tests.routing.script import Pool


def test_time_that_goes_back_is_an_error_of_the_host() -> None:
    pool = Pool()
    pool.now = 50.0
    with pytest.raises(ClockWentBack):
        pool.feed(Ticked())


def test_a_repeated_prompt_returns_to_the_endpoint_that_holds_it() -> None:
    pool = Pool()
    first = pool.send("agent", 6400)
    first.finish(prompt_tokens=6400, cached_tokens=0)
    for _ in range(5):
        again = pool.send("agent", 6400)
        assert again.target == first.target
        again.finish(prompt_tokens=6400, cached_tokens=6336)


def test_a_hot_prefix_spreads_when_its_holder_is_busy() -> None:
    pool = Pool()
    targets = Counter(pool.send("hot", 1536).target for _ in range(48))
    assert max(targets.values()) / (48 / 4) < 1.3


def test_a_miss_goes_by_load_and_never_by_who_holds_most() -> None:
    pool = Pool(2)
    busy = pool.send("first", 640).target
    for number in range(40):
        sent = pool.send(f"unique {number}", 640)
        if sent.target != busy:
            sent.finish()
    misses = Counter(pool.send(f"miss {number}", 640).target for number in range(10))
    assert misses[busy] <= 1


def test_requests_without_any_prompt_are_spread_and_not_sent_to_the_first() -> None:
    pool = Pool()
    targets = Counter(pool.send("", 0).target for _ in range(40))
    assert len(targets) == 4
    assert max(targets.values()) <= 12


def test_the_forward_names_fallbacks_after_the_target_and_none_when_retries_are_refused() -> None:
    pool = Pool()
    endpoints = pool.send().forward.endpoints
    assert len(endpoints) == len(set(endpoints)) == 3
    assert len(pool.send(retry_allowed=False).forward.endpoints) == 1


def test_an_unknown_model_is_404_with_near_names() -> None:
    pool = Pool(model="llama-3-8b")
    refusal = pool.send(model="llama-3-8").refused.refusal
    assert refusal.reason is RefusalReason.MODEL_NOT_FOUND
    assert "llama-3-8b" in refusal.message


def test_a_request_goes_only_to_endpoints_that_serve_its_model() -> None:
    pool = Pool(2, model="a")
    pool.join("x", "10.0.1.1:8000", ("b", "b-lora"))
    assert {pool.send(model="b").target for _ in range(5)} == {"10.0.1.1:8000"}
    assert {pool.send(model="b-lora").target for _ in range(5)} == {"10.0.1.1:8000"}
    assert "10.0.1.1:8000" not in {pool.send(model="a").target for _ in range(20)}


def test_no_ready_endpoint_is_503_and_a_loading_one_joins_when_it_is_ready() -> None:
    pool = Pool(1)
    pool.feed(EndpointChanged("e0", EndpointState.LOADING))
    refusal = pool.send().refused.refusal
    assert refusal.reason is RefusalReason.NO_ENDPOINTS
    assert refusal.message == "No endpoint is ready for the model `m`: 1 of 1 still loading."
    pool.feed(EndpointChanged("e0", EndpointState.READY))
    assert pool.send().target == "10.0.0.0:8000"


def test_a_draining_endpoint_gets_nothing_new_and_keeps_what_it_has() -> None:
    pool = Pool(2)
    pool.send()
    pool.feed(EndpointChanged("e0", EndpointState.DRAINING))
    assert {pool.send().target for _ in range(8)} == {"10.0.0.1:8000"}
    assert sum(e.inflight_requests for e in pool.router.status().endpoints) == 9


def test_the_subset_of_a_gateway_is_obeyed_and_an_empty_one_is_503() -> None:
    pool = Pool()
    assert {pool.send(subset=("10.0.0.2:1",)).target for _ in range(5)} == {"10.0.0.2:8000"}
    assert pool.send(subset=()).refused.refusal.reason is RefusalReason.NO_ENDPOINTS


def test_an_endpoint_that_only_fails_is_ejected_and_returns_through_one_probe() -> None:
    pool = Pool(2)
    bad = "10.0.0.0:8000"
    for number in range(20):
        sent = pool.send(f"w{number}")
        sent.finish(is_upstream_failure=sent.target == bad, status=500 if sent.target == bad else 200)
    assert {pool.send(f"u{number}").target for number in range(20)} == {"10.0.0.1:8000"}
    pool.now += 100.0
    probes = [sent for sent in (pool.send(f"v{number}") for number in range(20)) if sent.target == bad]
    assert len(probes) == 1
    probes[0].finish()
    assert bad in {pool.send(f"x{number}").target for number in range(20)}


def test_four_hundreds_of_an_engine_never_count_as_its_failure() -> None:
    pool = Pool(1)
    for _ in range(100):
        pool.send().finish(status=400)
    assert pool.router.status().endpoints[0].state is EndpointState.READY
    assert pool.router.status().endpoints[0].failures_total == 0


def test_with_one_of_four_ejected_the_rest_stay_balanced() -> None:
    pool = Pool()
    for number in range(60):
        sent = pool.send(f"w{number}")
        is_bad = sent.target == "10.0.0.0:8000"
        sent.finish(is_upstream_failure=is_bad, status=503 if is_bad else 200)
    targets = Counter(pool.send(f"u{number}").target for number in range(30))
    assert set(targets) == {"10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"}
    assert max(targets.values()) <= 13


def test_when_every_endpoint_is_ejected_all_are_offered_again() -> None:
    pool = Pool(2)
    for _ in range(20):
        pool.send().finish(is_upstream_failure=True, status=503)
    assert pool.send().target


def test_a_request_that_a_retry_saved_charges_the_endpoint_that_failed() -> None:
    pool = Pool(2)
    sent = pool.send("p", 6400)
    fallback = sent.forward.endpoints[1]
    account = sent.finish(served_address=fallback, attempts=2, prompt_tokens=6400, cached_tokens=0)
    assert account.is_moved
    failures = {e.address: e.failures_total for e in pool.router.status().endpoints}
    assert failures == {sent.target: 1, fallback: 0}
    assert pool.send("p", 6400).target == fallback


def test_a_dead_endpoint_gets_no_credit_for_a_prompt_it_never_prefilled() -> None:
    pool = Pool(2)
    sent = pool.send("p", 64000)
    sent.finish(is_upstream_failure=True, status=503, ttft_s=None)
    targets = {pool.send("p", 64000).target}
    assert pool.router.explanations.find("r2")["candidates"][0]["matched_tokens"] == 0  # type: ignore[index]
    assert targets


def test_every_request_is_closed_once_whatever_the_order_of_end_and_record() -> None:
    pool = Pool()
    sent = pool.send()
    assert sent.record() == []
    (account,) = sent.end()
    assert isinstance(account, Account)
    assert sent.end() == []
    assert sent.record() == []
    status = pool.router.status()
    assert (status.inflight, status.unclosed) == (0, 0)


def test_an_end_that_says_what_came_of_the_request_is_its_record_as_well() -> None:
    pool = Pool()
    sent = pool.send()
    outcome = Outcome(status=200, served_address=sent.target, ttft_s=0.05, duration_s=0.2, prompt_tokens=7)
    (account,) = pool.feed(Ended(sent.request_id, outcome))
    assert isinstance(account, Account)
    assert account.is_recorded
    assert account.outcome.prompt_tokens == 7
    assert pool.feed(Ended(sent.request_id, outcome)) == []
    assert sent.record() == []
    status = pool.router.status()
    assert (status.inflight, status.unclosed) == (0, 0)
    assert pool.router.deadline() is None


def test_an_end_that_brings_nothing_new_leaves_the_record_as_it_came() -> None:
    pool = Pool()
    sent = pool.send()
    sent.record(prompt_tokens=7)
    (account,) = pool.feed(Ended(sent.request_id, Outcome(status=500)))
    assert isinstance(account, Account)
    assert (account.outcome.status, account.outcome.prompt_tokens) == (200, 7)


def test_a_record_that_never_comes_expires() -> None:
    pool = Pool()
    pool.send().end()
    assert pool.router.deadline() == pool.now + RECORD_TIMEOUT_S
    pool.now += RECORD_TIMEOUT_S
    (account,) = pool.feed(Ticked())
    assert isinstance(account, Account)
    assert not account.is_recorded
    assert pool.router.deadline() is None
    assert pool.router.status().unclosed == 0


def test_an_endpoint_that_leaves_takes_its_books_and_its_prefixes_along() -> None:
    pool = Pool(2)
    sent = pool.send("p", 6400)
    gone = "e0" if sent.target.startswith("10.0.0.0") else "e1"
    pool.feed(EndpointLeft(gone))
    sent.finish()
    assert pool.send("p", 6400).target != sent.target
    assert len(pool.router.status().endpoints) == 1


def test_partial_tokens_of_a_cancelled_stream_are_counted_and_marked() -> None:
    pool = Pool()
    for _ in range(20):
        pool.send().finish(completion_tokens=100, prompt_tokens=640, response_bytes=25_000)
    account = pool.send().finish(is_client_gone=True, response_bytes=5_000)
    assert account.outcome.is_estimated
    assert account.outcome.completion_tokens == pytest.approx(20, abs=4)


def test_load_after_a_restart_starts_from_what_the_engines_report() -> None:
    pool = Pool(2)
    pool.load("e0", running=40, waiting=20)
    pool.load("e1", running=0, waiting=0)
    assert Counter(pool.send(f"u{number}").target for number in range(10))["10.0.0.1:8000"] >= 9


def test_an_alias_is_routed_like_its_model_and_the_body_is_told() -> None:
    config = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\naliases: {gpt-4: m}\n"
    pool = Pool(config=config)
    assert pool.send(model="gpt-4").forward.model == "m"
    assert pool.send(model="m").forward.model == ""
    assert {model.id for model in pool.router.models()} == {"m", "gpt-4"}


def test_a_reload_keeps_index_and_books() -> None:
    pool = Pool()
    sent = pool.send("agent", 6400)
    pool.feed(Configured("apiVersion: shoal.dev/v1alpha1\nkind: Pool\nusage: inject\n"))
    assert pool.router.status().inflight == 1
    sent.finish(prompt_tokens=6400, cached_tokens=0)
    assert pool.send("agent", 6400).target == sent.target


def test_the_explanation_names_candidates_scores_and_what_came_of_it() -> None:
    pool = Pool()
    sent = pool.send("p", 640, client_id="mine")
    sent.finish(prompt_tokens=700, cached_tokens=0, completion_tokens=3)
    found = pool.router.explanations.find("mine")
    assert found is not None
    assert found["request_id"] == sent.request_id
    assert [candidate["id"] for candidate in found["candidates"]] == ["e0", "e1", "e2", "e3"]
    assert found["served"] == found["chosen"][0]
    assert found["reported_prompt_tokens"] == 700


def test_same_seed_and_events_give_the_same_commands() -> None:
    def run() -> list[object]:
        pool = Pool(seed=5)
        out: list[object] = []
        for number in range(60):
            sent = pool.send(f"p{number % 7}", 640 + 64 * (number % 5))
            out.append(sent.command)
            if number % 2:
                out.append(sent.finish())
            pool.now += 0.01
        return out

    assert run() == run()


def test_arrived_without_blocks_is_still_load_tracked() -> None:
    pool = Pool(1)
    sent = pool.send("", 0)
    assert isinstance(sent.command, object)
    assert pool.router.status().endpoints[0].inflight_requests == 1
    assert Arrived is not None


def test_a_prompt_that_the_engine_refused_earns_it_no_credit() -> None:
    pool = Pool(1)
    pool.send("long", 64_000).finish(status=400, prompt_tokens=None)
    pool.send("long", 64_000)
    explained = pool.router.explanations.find("r2")
    assert explained is not None
    assert explained["candidates"][0]["matched_tokens"] == 0


def test_a_gateway_that_tells_no_first_byte_still_teaches_where_a_prompt_is() -> None:
    pool = Pool(2)
    first = pool.send("agent", 6400)
    first.finish(ttft_s=None)
    assert pool.send("agent", 6400).target == first.target
    explained = pool.router.explanations.find("r2")
    assert explained is not None
    assert max(candidate["matched_tokens"] for candidate in explained["candidates"]) > 6000


def test_a_prompt_goes_to_an_engine_whose_context_holds_it() -> None:
    pool = Pool(0)
    for name, length in (("small", 4_096), ("large", 131_072)):
        pool.feed(EndpointJoined(Endpoint(id=name, address=f"{name}:1")))
        pool.feed(ModelsSeen(name, (ServedModel(id="m", max_model_len=length),)))
        pool.feed(EndpointChanged(name, EndpointState.READY))
    long = [pool.send(f"long {number}", 20_000) for number in range(6)]
    assert {sent.target for sent in long} == {"large:1"}
    for sent in long:
        sent.finish()
    assert {pool.send(f"short {number}", 640).target for number in range(20)} == {"large:1", "small:1"}
    assert pool.send("longer than any", 400_000).target


def test_records_of_unknown_requests_are_counted_and_dropped() -> None:
    pool = Pool(1)
    assert pool.feed(Recorded("never seen", Outcome(status=200))) == []
    assert pool.feed(Ended("nor this", Outcome(status=200))) == []
    assert pool.feed(Ended("nor that, of which nothing is told")) == []
    assert pool.router.status().orphan_records == 2


def test_an_engine_that_was_started_anew_is_offered_at_once_and_holds_nothing() -> None:
    pool = Pool(2)
    pool.load("e0", prefix_query_tokens=5000, running=0, waiting=0)
    for number in range(20):
        sent = pool.send(f"w{number}")
        is_dead = sent.target == "10.0.0.0:8000"
        sent.finish(is_upstream_failure=is_dead, status=503 if is_dead else 200)
    assert {pool.send(f"u{number}").target for number in range(8)} == {"10.0.0.1:8000"}
    pool.load("e0", prefix_query_tokens=10, running=0, waiting=0)
    assert "10.0.0.0:8000" in {pool.send(f"v{number}").target for number in range(8)}


def profile_of(plugin: str) -> str:
    return f"apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{{type: {plugin}}}]\n"


def test_plugins_are_given_the_prompts_hashes_and_the_tokens_that_each_covers() -> None:
    pool = Pool(4, config=profile_of("sglang-cache-aware-scorer"))
    first = pool.send("p", 2_000).target
    # The tree is told of 31 blocks of 64 tokens; the next cold prompt goes to an empty tree, the known one back.
    assert pool.send("q", 2_000).target != first
    assert {pool.send("p", 2_000).target for _ in range(10)} == {first}


def test_plugins_are_told_when_a_request_is_over_however_it_ends() -> None:
    pool = Pool(2, config=profile_of("dynamo-cost-scorer"))
    (plugin,) = (named.plugin for named in pool.router._scheduler.policy.profile.scorers)
    assert isinstance(plugin, DynamoCostScorer)
    sent = [pool.send(f"p{number}", 640) for number in range(6)]
    in_use = plugin._in_use
    assert in_use.at("e0") == in_use.at("e1") == 3 * 640
    sent[0].finish()
    sent[1].end()
    sent[1].end()
    assert in_use.at("e0") + in_use.at("e1") == 4 * 640
    for each in sent:
        each.end()
    assert in_use.at("e0") == in_use.at("e1") == 0
