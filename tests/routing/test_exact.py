"""The router with exact caches: events in, tokens fetched, exact matches where they can be trusted."""

from typing import Any

import numpy as np
import pytest

from shoal.pool import EndpointState, RefusalReason, Request, ServedModel
from shoal.pool.kvevents import KvState, Tier
from shoal.routing import Account, Arrived, Command, Ended, Forward, Refuse, Ticked
from shoal.routing.agreement import ALARM_AFTER
from shoal.routing.commands import Fetch
from shoal.routing.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Configured,
    EndpointChanged,
    EndpointLeft,
    Fetched,
    FetchFailed,
    KvStreamChanged,
    ModelsSeen,
    TokenKeys,
)
from shoal.routing.journal import MAGIC, Opening, Step, encode, read, replay
from shoal.scheduling import Scheduler
from tests.routing.script import Pool, Sent, blocks_of, request_of

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
- type: expected-wait-scorer
"""
BY_NAME = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: approx-prefix-cache-producer
- type: precise-prefix-cache-producer
  name: kv
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: "NAME"}
"""
SIZE = 16


def keys_of(text: str, tokens: int) -> bytes:
    seed = sum(ord(letter) * 31**place for place, letter in enumerate(text)) % 2**61
    return np.array([(seed * 7_919 + n * 104_729) % 2**63 + 1 for n in range(tokens // SIZE)], "<u8").tobytes()


class ExactPool(Pool):
    """A pool whose engines all publish, and have stored one block each."""

    def __init__(self, endpoints: int = 4, config: str = CONFIG) -> None:
        super().__init__(endpoints, config=config)
        for number in range(endpoints):
            self.store(f"e{number}", f"own block of {number}", SIZE)
            self.feed(KvStreamChanged(f"e{number}", KvState.FRESH))

    def store(self, endpoint: str, prompt: str, tokens: int, tier: Tier = Tier.GPU, rank: int = 0) -> None:
        self.feed(BlocksStored(endpoint, keys_of(prompt, tokens), tier, SIZE, rank))

    def ask(self, name: str, prompt: str, tokens: int) -> Fetch | Forward:
        (command,) = self.feed(Arrived(request_of(name, tokens), blocks_of("estimate of " + prompt, tokens)))
        assert isinstance(command, Fetch | Forward)
        return command

    def place(self, name: str, prompt: str, tokens: int) -> Sent:
        fetch = self.ask(name, prompt, tokens)
        assert isinstance(fetch, Fetch)
        assert fetch.block_sizes == (SIZE,)
        (forward,) = self.feed(Fetched(name, tokens, (TokenKeys(SIZE, keys_of(prompt, tokens)),)))
        return Sent(self, name, forward)

    def explained(self, name: str) -> dict[str, object]:
        found = self.router.explanations.find(name)
        assert found is not None
        return found


def test_a_prompt_goes_to_the_engine_that_said_it_has_it() -> None:
    pool = ExactPool()
    pool.store("e2", "agent", 3200)
    assert pool.place("r1", "agent", 3200).target == "10.0.0.2:8000"
    found = pool.explained("r1")
    assert found["is_exact"]
    assert found["predicted_cached_tokens"] == 3184


def test_the_estimate_is_not_believed_where_events_say_otherwise() -> None:
    pool = ExactPool(2)
    first = pool.place("r1", "agent", 3200)
    first.finish(prompt_tokens=3200, cached_tokens=0)
    pool.now += 10.0
    pool.feed(Ticked())
    other = "e1" if first.target == "10.0.0.0:8000" else "e0"
    pool.store(other, "agent", 3200)
    assert pool.place("r2", "agent", 3200).target != first.target


def conditional(pool: ExactPool, name: str, prompt: str) -> Command:
    """Ask for "agent", but only where it is held."""
    request = request_of(name, 3200, headers={"prefer": "if-available"})
    (fetch,) = pool.feed(Arrived(request, blocks_of("estimate of " + prompt, 3200)))
    assert isinstance(fetch, Fetch)
    (command,) = pool.feed(Fetched(name, 3200, (TokenKeys(SIZE, keys_of(prompt, 3200)),)))
    return command


def test_a_conditional_request_goes_by_the_exact_index_where_that_is_configured() -> None:
    pool = ExactPool()
    pool.place("r1", "agent", 3200).finish(prompt_tokens=3200)
    pool.now += 10.0
    pool.feed(Ticked())
    # The estimate has it, the events never confirmed it.
    refused = conditional(pool, "r2", "agent")
    assert isinstance(refused, Refuse)
    assert refused.refusal.reason is RefusalReason.PRECONDITION_FAILED
    # The estimate has never heard of it, the events have.
    pool.store("e3", "another", 3200)
    found = conditional(pool, "r3", "another")
    assert isinstance(found, Forward)
    assert found.endpoints == ("10.0.0.3:8000",)


def test_blocks_that_were_sent_are_believed_until_their_time_is_over() -> None:
    pool = ExactPool()
    first = pool.place("r1", "agent", 3200)
    assert pool.place("r2", "agent", 3200).target == first.target
    first.finish(prompt_tokens=3200)
    pool.feed(Ended("r2"))
    pool.now += 1.0
    pool.place("r3", "agent", 3200)
    assert pool.explained("r3")["predicted_cached_tokens"] == 3184
    pool.feed(Ended("r3"))
    pool.now += 5.0
    pool.feed(Ticked())
    pool.place("r4", "agent", 3200)
    assert pool.explained("r4")["predicted_cached_tokens"] == 0


def test_a_prompt_that_never_reached_the_engine_is_not_believed_there() -> None:
    pool = ExactPool(2)
    first = pool.place("r1", "agent", 3200)
    first.finish(status=503, served_address=first.target, is_upstream_failure=True, prompt_tokens=None)
    pool.place("r2", "agent", 3200)
    assert pool.explained("r2")["predicted_cached_tokens"] == 0


def test_removed_and_cleared_blocks_count_no_more() -> None:
    pool = ExactPool()
    pool.store("e2", "agent", 3200)
    pool.feed(BlocksRemoved("e2", keys_of("agent", 3200)[800:]))
    pool.place("r1", "agent", 3200)
    assert pool.explained("r1")["predicted_cached_tokens"] == 1600
    pool = ExactPool()
    pool.store("e2", "agent", 3200)
    pool.feed(BlocksCleared("e2"))
    pool.place("r1", "agent", 3200)
    assert pool.explained("r1")["predicted_cached_tokens"] == 0


def test_an_endpoint_that_left_and_came_back_holds_nothing() -> None:
    pool = ExactPool(2)
    pool.store("e1", "agent", 3200)
    pool.feed(EndpointLeft("e1"))
    pool.join("e1", "10.0.0.1:8000")
    pool.store("e1", "another", 160)
    pool.feed(KvStreamChanged("e1", KvState.FRESH))
    pool.place("r1", "agent", 3200)
    assert pool.explained("r1")["predicted_cached_tokens"] == 0


def test_a_slower_tier_is_worth_its_prefill_less_its_loading() -> None:
    pool = ExactPool(2)
    pool.store("e0", "agent", 3200, Tier.CPU)
    pool.store("e1", "agent", 1600)
    assert pool.place("r1", "agent", 3200).target == "10.0.0.0:8000"
    assert pool.explained("r1")["predicted_cached_tokens"] == 3184
    config = CONFIG.replace("-producer\n", "-producer\n  parameters: {cpuLoadSPerToken: 1.0}\n", 1)
    pool = ExactPool(2, config)
    pool.store("e0", "agent", 3200, Tier.CPU)
    pool.store("e1", "agent", 1600)
    assert pool.place("r1", "agent", 3200).target == "10.0.0.1:8000"


def test_weights_of_tiers_in_the_file_replace_the_seconds() -> None:
    weights = "-producer\n  parameters: {indexerConfig: {kvCacheBackendConfigs: [{name: cpu, weight: 0.25}]}}\n"
    pool = ExactPool(2, CONFIG.replace("-producer\n", weights, 1))
    pool.store("e0", "agent", 3200, Tier.CPU)
    pool.store("e1", "agent", 1600)
    assert pool.place("r1", "agent", 3200).target == "10.0.0.1:8000"


def test_ranks_of_one_endpoint_are_not_added_up() -> None:
    pool = ExactPool(2)
    pool.store("e0", "agent", 1600, rank=1)
    pool.feed(BlocksStored("e0", keys_of("agent", 3200)[800:], Tier.GPU, SIZE, 2))
    pool.place("r1", "agent", 3200)
    assert pool.explained("r1")["predicted_cached_tokens"] == 1600


def test_tokens_that_come_too_late_or_not_at_all_leave_the_estimate() -> None:
    pool = ExactPool()
    assert isinstance(pool.ask("r1", "agent", 3200), Fetch)
    due = pool.router.deadline()
    assert due is not None
    pool.now = due
    (forward,) = pool.feed(Ticked())
    assert isinstance(forward, Forward)
    assert pool.feed(Fetched("r1", 3200, (TokenKeys(SIZE, keys_of("agent", 3200)),))) == []
    assert not pool.explained("r1")["is_exact"]
    assert isinstance(pool.ask("r2", "other", 3200), Fetch)
    (forward,) = pool.feed(FetchFailed("r2", "busy"))
    assert isinstance(forward, Forward)


def test_a_client_that_leaves_while_its_tokens_are_made_leaves_nothing() -> None:
    pool = ExactPool()
    pool.ask("r1", "agent", 3200)
    assert pool.feed(Ended("r1")) == []
    assert pool.feed(Fetched("r1", 3200, ())) == []
    assert pool.router.deadline() is None
    assert pool.router.status().inflight == 0


def test_nobody_is_asked_for_tokens_while_no_cache_is_known() -> None:
    pool = ExactPool(2)
    for name in ("e0", "e1"):
        pool.feed(KvStreamChanged(name, KvState.STALE))
    assert isinstance(pool.ask("r1", "agent", 3200), Forward)


def test_an_endpoint_without_fresh_events_goes_by_the_estimate() -> None:
    pool = ExactPool(2)
    pool.feed(KvStreamChanged("e1", KvState.STALE))
    pool.feed(KvStreamChanged("e0", KvState.STALE))
    first = pool.ask("r1", "agent", 3200)
    assert isinstance(first, Forward)
    Sent(pool, "r1", first).finish(prompt_tokens=3200, cached_tokens=0)
    holder = next(name for name in ("e0", "e1") if f"10.0.0.{name[1]}:8000" == first.endpoints[0])
    other = "e1" if holder == "e0" else "e0"
    pool.feed(KvStreamChanged(other, KvState.FRESH))
    assert pool.place("r2", "agent", 3200).target == first.endpoints[0]


def test_what_was_predicted_is_accounted_for() -> None:
    pool = ExactPool()
    pool.store("e2", "agent", 3200)
    closed = pool.place("r1", "agent", 3200).finish(prompt_tokens=3200, cached_tokens=3184)
    assert isinstance(closed, Account)
    assert closed.predicted_cached_tokens == 3184


@pytest.mark.parametrize("plugin", ["prefix-cache-scorer", "prefix-cache-affinity-filter"])
def test_a_plugin_reads_the_producer_that_it_names(plugin: str) -> None:
    for producer, holder in (("approx-prefix-cache-producer", "estimated"), ("kv", "exact"), ("", "exact")):
        pool = ExactPool(2, BY_NAME.replace("NAME", producer).replace("prefix-cache-scorer", plugin))
        for name in ("e0", "e1"):
            pool.feed(KvStreamChanged(name, KvState.STALE))
        sent = pool.ask("r1", "agent", 3200)
        assert isinstance(sent, Forward)
        Sent(pool, "r1", sent).finish(prompt_tokens=3200, cached_tokens=0)
        other = "e1" if sent.endpoints[0] == "10.0.0.0:8000" else "e0"
        for name in ("e0", "e1"):
            pool.feed(KvStreamChanged(name, KvState.FRESH))
        pool.store(other, "agent", 3200)
        is_estimate = pool.place("r2", "agent", 3200).target == sent.endpoints[0]
        assert is_estimate == (holder == "estimated")


OLD = """
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-scorer
  parameters:
    speculativeIndexing: true
    indexerConfig: {kvCacheBackendConfigs: [{name: cpu, weight: 0.5}]}
    kvEventsConfig: {topicFilter: "kv@"}
- type: single-profile-handler
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: precise-prefix-cache-scorer, weight: 2}
  - {pluginRef: max-score-picker}
"""


def test_the_old_wrapper_of_the_exact_index_keeps_it_and_scores_by_it() -> None:
    pool = ExactPool(3, OLD)
    pool.store("e1", "agent", 3200)
    pool.store("e2", "agent", 3200, Tier.CPU)
    assert pool.place("r1", "agent", 3200).target == "10.0.0.1:8000"
    found = pool.explained("r1")
    assert found["predicted_cached_tokens"] == 3184
    candidates = found["candidates"]
    assert isinstance(candidates, list)
    assert {each["id"]: each["matched_tokens"] for each in candidates} == {"e0": 0, "e1": 3184, "e2": 1592}


def test_events_that_promise_what_the_engine_never_finds_are_said_aloud() -> None:
    pool = ExactPool(2)
    for number in range(25):
        pool.store("e0", f"agent {number}", 3200)
        pool.place(f"r{number}", f"agent {number}", 3200).finish(prompt_tokens=3200, cached_tokens=0)
    assert any("e0 promise blocks" in warning for warning in pool.router.status().warnings)
    pool.feed(KvStreamChanged("e0", KvState.STALE))
    assert not pool.router.status().warnings


def test_engines_that_go_by_another_name_are_left_to_the_estimate() -> None:
    pool = ExactPool(2)
    listed = {"e0": ("m", "a"), "e1": ("m",)}
    for name, models in listed.items():
        pool.feed(ModelsSeen(name, tuple(ServedModel(id=model) for model in models)))
    pool.router.handle(EndpointChanged("e0", EndpointState.DRAINING), pool.now)
    sent = Sent(pool, "r1", _answer(pool, "r1"))
    assert sent.target == "10.0.0.1:8000"
    sent.finish(prompt_tokens=3200, cached_tokens=0)
    pool.now += 60.0
    pool.feed(Ticked())
    pool.feed(EndpointChanged("e0", EndpointState.READY))
    # The keys are made with the name of e0, so that of e1 they say nothing: not even that it has nothing.
    again = Sent(pool, "r2", _answer(pool, "r2"))
    assert again.target == "10.0.0.1:8000"
    assert not pool.explained("r2")["is_exact"]


def _answer(pool: ExactPool, name: str) -> Forward:
    """Answer the question for tokens as an engine does: with keys that depend on the model's name."""
    fetch = pool.ask(name, "agent", 3200)
    assert isinstance(fetch, Fetch)
    assert fetch.model == ("a" if name == "r2" else "m")
    (forward,) = pool.feed(Fetched(name, 3200, (TokenKeys(SIZE, keys_of(f"agent to {fetch.model}", 3200)),)))
    assert isinstance(forward, Forward)
    return forward


@pytest.mark.parametrize("where", ["schedule", "dispatched"])
def test_a_fault_with_one_late_request_costs_no_other_its_answer(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ExactPool(2)
    names = ["r1", "r2", "r3"]
    for name in names:
        assert isinstance(pool.ask(name, name, 3200), Fetch)
    kept = getattr(Scheduler, where)

    def fails(self: Scheduler, asked: Request, *rest: Any) -> Any:
        if asked.id == "r2":
            raise RuntimeError("a plugin's fault")
        return kept(self, asked, *rest)

    monkeypatch.setattr(Scheduler, where, fails)
    pool.now += 60.0
    commands = pool.feed(Ticked())
    assert [(type(each), each.request_id) for each in commands if isinstance(each, Forward | Refuse)] == [
        (Forward, "r1"),
        (Refuse, "r2"),
        (Forward, "r3"),
    ]
    assert pool.router.status().inflight == 2


def test_what_was_warned_of_is_forgotten_with_the_caches() -> None:
    pool = ExactPool(1)
    for number in range(ALARM_AFTER):
        pool.place(f"r{number}", f"prompt {number}", 3200).finish(prompt_tokens=9, cached_tokens=0)
    assert pool.router.status().warnings
    pool.feed(Configured(""))
    assert not pool.router.status().warnings


def test_a_journal_of_a_pool_that_knows_its_caches_replays() -> None:
    steps: list[Step] = []

    class Recording(ExactPool):
        def feed(self, event: object) -> list[Command]:
            commands = super().feed(event)
            steps.append(Step(self.now, event, commands))  # type: ignore[arg-type]
            return commands

    pool = Recording(4)
    for number in range(40):
        pool.now += 0.3
        if number % 5 == 4:
            fetch = pool.ask(f"r{number}", f"p{number % 3}", 3200)
            assert isinstance(fetch, Fetch)
            pool.feed(FetchFailed(f"r{number}", "timeout"))
            continue
        sent = pool.place(f"r{number}", f"p{number % 3}", 3200)
        pool.store(f"e{number % 4}", f"p{number % 3}", 1600, Tier.CPU if number % 2 else Tier.GPU, rank=number % 3)
        if number % 2:
            sent.finish(prompt_tokens=3200, cached_tokens=0)
        if number % 7 == 6:
            pool.feed(BlocksRemoved("e1", keys_of("p1", 320)))
            pool.feed(BlocksCleared("e2", 1))
            pool.feed(KvStreamChanged("e3", KvState.STALE if number % 2 else KvState.FRESH))
    pool.ask("late", "p1", 3200)
    pool.now += 60.0
    pool.feed(Ticked())
    data = MAGIC + encode(Opening(1, CONFIG, False)) + b"".join(encode(step) for step in steps)
    count, difference = replay(*read(data))
    assert difference is None
    assert count == len(steps)
