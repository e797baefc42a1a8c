"""The laws of balance hold where the picker knows the caches too: who holds a prefix does not get everybody."""

import sys
from collections import Counter
from types import FrameType

import pytest

from shoal.pool import Endpoint, EndpointState, ServedModel
from shoal.pool.kvevents import KvState
from shoal.routing import Arrived, Ended, Forward, Ticked
from shoal.routing.events import (
    BlocksStored,
    EndpointChanged,
    EndpointJoined,
    Fetched,
    FetchFailed,
    KvStreamChanged,
    ModelsSeen,
    TokenKeys,
)
from tests.routing.script import Sent, blocks_of, request_of
from tests.routing.test_exact import CONFIG, SIZE, ExactPool, keys_of


def mixed(pool: ExactPool, name: str, head: str, head_tokens: int, tail: str, tail_tokens: int) -> Sent:
    """Send a prompt of two parts, of which the first is shared."""
    tokens = head_tokens + tail_tokens
    hashes = blocks_of(head, head_tokens) + blocks_of(tail, tail_tokens, after=head_tokens)
    pool.feed(Arrived(request_of(name, tokens), hashes))
    keys = keys_of(head, head_tokens) + keys_of(head + tail, tail_tokens)
    (forward,) = pool.feed(Fetched(name, tokens, (TokenKeys(SIZE, keys),)))
    assert isinstance(forward, Forward)
    return Sent(pool, name, forward)


def test_a_miss_goes_by_load_and_not_to_the_endpoint_with_the_smallest_index() -> None:
    pool = ExactPool(2)
    for number in range(50):
        pool.store("e1", f"document {number}", 1600)
    for number in range(40):
        sent = pool.place(f"busy {number}", f"unique {number}", 640)
        if sent.target == "10.0.0.1:8000":
            sent.finish(prompt_tokens=640, cached_tokens=0)
    misses = Counter(pool.place(f"miss {number}", f"new {number}", 640).target for number in range(10))
    assert misses["10.0.0.1:8000"] >= 9


def test_a_hot_prefix_that_nobody_holds_is_spread() -> None:
    pool = ExactPool(4)
    targets = Counter(pool.place(f"r{number}", "hot", 1536).target for number in range(48))
    assert max(targets.values()) / (48 / 4) < 1.3


def test_nobody_idles_while_the_one_holder_of_a_hot_prefix_is_busy() -> None:
    pool = ExactPool(4)
    pool.store("e2", "hot", 1536)
    targets = Counter(pool.place(f"r{number}", "hot", 1536).target for number in range(48))
    assert min(targets.values()) >= 6
    assert len(targets) == 4


def test_a_system_prompt_that_all_hold_gathers_nobody() -> None:
    pool = ExactPool(4)
    for number in range(4):
        pool.store(f"e{number}", "system", 6144)
    targets = Counter(mixed(pool, f"r{n}", "system", 6144, f"user {n}", 256).target for n in range(48))
    assert max(targets.values()) / (48 / 4) < 1.3


def test_load_counts_from_the_dispatch_on() -> None:
    pool = ExactPool(4)
    targets = Counter(pool.place(f"r{number}", f"long {number}", 32_000).target for number in range(64))
    assert max(targets.values()) <= 1.2 * 64 / 4
    assert min(targets.values()) >= 0.8 * 64 / 4


def test_every_decision_teaches_whatever_its_match_was() -> None:
    pool = ExactPool(4)
    first = pool.place("r1", "short", 64)
    first.finish(prompt_tokens=64, cached_tokens=0)
    assert pool.place("r2", "short", 64).target == first.target


def test_an_engine_that_fails_every_request_gets_almost_none_though_it_holds_the_prefix() -> None:
    pool = ExactPool(4)
    pool.store("e2", "agent", 3200)
    targets: Counter[str] = Counter()
    for number in range(100):
        sent = pool.place(f"r{number}", "agent", 3200)
        targets[sent.target] += 1
        is_bad = sent.target == "10.0.0.2:8000"
        sent.end()
        fields = {"status": 503, "is_upstream_failure": True} if is_bad else {"status": 200}
        sent.record(prompt_tokens=None if is_bad else 3200, **fields)
        pool.now += 0.01
    assert targets["10.0.0.2:8000"] <= 5


def test_histories_behind_one_system_prompt_each_return_to_their_own_engine() -> None:
    pool = ExactPool(4)
    first = {talk: mixed(pool, f"first {talk}", "system", 1600, f"history {talk}", 3200) for talk in range(8)}
    homes = {talk: sent.target for talk, sent in first.items()}
    assert len(set(homes.values())) == 4
    for talk, sent in first.items():
        name = f"e{sent.target.split(':')[0].rpartition('.')[2]}"
        keys = keys_of("system", 1600) + keys_of(f"systemhistory {talk}", 3200)
        pool.feed(BlocksStored(name, keys, block_size_tokens=SIZE))
        sent.finish(prompt_tokens=4800, cached_tokens=0)
    for talk in range(8):
        sent = mixed(pool, f"second {talk}", "system", 1600, f"history {talk}", 3200)
        assert sent.target == homes[talk]
        sent.finish(prompt_tokens=4800, cached_tokens=4784)


def test_pools_for_prefill_and_decode_with_the_same_prompt_keep_their_blocks_apart() -> None:
    pool = ExactPool(0, CONFIG)
    for role, number in (("prefill", 0), ("decode", 1)):
        name = f"{role}-0"
        pool.feed(EndpointJoined(Endpoint(id=name, address=f"10.1.{number}.0:8000", labels={"llm-d.ai/role": role})))
        pool.feed(ModelsSeen(name, (ServedModel(id="m"),)))
        pool.feed(EndpointChanged(name, EndpointState.READY))
        pool.store(name, f"own of {role}", SIZE)
        pool.feed(KvStreamChanged(name, KvState.FRESH))
    pool.store("prefill-0", "agent", 3200)
    pool.store("decode-0", "agent", 1600)
    sent = pool.place("r1", "agent", 3200)
    assert sent.target == "10.1.0.0:8000"
    candidates = pool.explained("r1")["candidates"]
    assert isinstance(candidates, list)
    assert {each["id"]: each["matched_tokens"] for each in candidates} == {"prefill-0": 3184, "decode-0": 1600}


def busy(pool: ExactPool) -> list[float]:
    """The requests that each endpoint is believed to work on."""
    return [each.inflight_requests for each in pool.router.status().endpoints]


@pytest.mark.parametrize("way", ["tokens", "no-tokens", "deadline", "no-caches"])
def test_a2_a_request_is_in_flight_from_its_dispatch_to_its_end_on_every_path(way: str) -> None:
    pool = ExactPool(3)
    if way == "no-caches":
        for number in range(3):
            pool.feed(KvStreamChanged(f"e{number}", KvState.STALE))
    answer = pool.ask("r1", "agent", 3200)
    if way == "tokens":
        (answer,) = pool.feed(Fetched("r1", 3200, (TokenKeys(SIZE, keys_of("agent", 3200)),)))
    elif way == "no-tokens":
        (answer,) = pool.feed(FetchFailed("r1"))
    elif way == "deadline":
        assert sum(busy(pool)) == 0
        pool.now += 1.0
        (answer,) = pool.feed(Ticked())
    assert isinstance(answer, Forward)
    assert sorted(busy(pool)) == [0, 0, 1]
    pool.feed(Ended("r1"))
    assert busy(pool) == [0, 0, 0]


def test_a11_all_endpoints_are_looked_at_without_asking_each() -> None:
    """What is counted is calls, so that a slow machine changes nothing."""
    calls = {size: calls_of_one_placement(size) for size in (20, 400)}
    assert calls[400] < calls[20] + 400


def calls_of_one_placement(endpoints: int) -> int:
    """How many functions are called to place a request whose prompt all hold to different depths."""
    pool = ExactPool(endpoints)
    for number in range(endpoints):
        pool.store(f"e{number}", "agent", 320 * (number % 4))
    pool.place("warm", "agent", 1600)
    pool.ask("r1", "agent", 1600)
    count = 0

    def note(frame: FrameType, what: str, of: object) -> None:
        nonlocal count
        count += what in ("call", "c_call")

    event = Fetched("r1", 1600, (TokenKeys(SIZE, keys_of("agent", 1600)),))
    sys.setprofile(note)
    try:
        pool.feed(event)
    finally:
        sys.setprofile(None)
    return count


def test_a12_load_releases_a_holder_without_any_threshold_to_set() -> None:
    pool = ExactPool(4, CONFIG)
    pool.store("e0", "agent", 1600)
    targets = Counter(pool.place(f"r{number}", "agent", 1600).target for number in range(64))
    assert len(targets) == 4
    assert max(targets.values()) <= 0.6 * 64
