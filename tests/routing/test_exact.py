"""The router with exact caches: events in, tokens fetched, exact matches where they can be trusted."""

import numpy as np

from shoal.pool.kvevents import KvState, Tier
from shoal.routing import Account, Arrived, Ended, Forward, Ticked
from shoal.routing.commands import Fetch
from shoal.routing.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EndpointLeft,
    Fetched,
    FetchFailed,
    KvStreamChanged,
    TokenKeys,
)
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


def test_a_scorer_that_names_the_estimate_reads_the_estimate() -> None:
    for producer, holder in (("approx-prefix-cache-producer", "estimated"), ("kv", "exact"), ("", "exact")):
        pool = ExactPool(2, BY_NAME.replace("NAME", producer))
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


def test_events_that_promise_what_the_engine_never_finds_are_said_aloud() -> None:
    pool = ExactPool(2)
    for number in range(25):
        pool.store("e0", f"agent {number}", 3200)
        pool.place(f"r{number}", f"agent {number}", 3200).finish(prompt_tokens=3200, cached_tokens=0)
    assert any("e0 promise blocks" in warning for warning in pool.router.status().warnings)
    pool.feed(KvStreamChanged("e0", KvState.STALE))
    assert not pool.router.status().warnings
