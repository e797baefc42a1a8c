"""Faults that other routers had, as scripts that feed one router: hot spots, leaks, cold endpoints."""

import time
from collections import Counter
from statistics import median

import numpy as np
import pytest

from shoal.pool import Api, Request
from shoal.routing import Arrived, Forward, Ticked
from shoal.routing.router import RECORD_TIMEOUT_S
from tests.routing.script import Pool, Sent, blocks_of

LLM_D_DEFAULT = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"


def arrive(pool: Pool, name: str, blocks: bytes, tokens: int) -> Sent:
    """Send a prompt of these very blocks."""
    request = Request(
        id=name, api=Api.CHAT, model="m", is_streaming=True, prompt_tokens=tokens, prompt_bytes=4 * tokens
    )
    (command,) = pool.feed(Arrived(request, blocks))
    return Sent(pool, name, command)


@pytest.mark.parametrize("config", ["", LLM_D_DEFAULT], ids=["no file", "a file without plugins"])
def test_the_default_configuration_spreads_a_hot_prompt(config: str) -> None:
    pool = Pool(config=config)
    pool.send("hot", 1536).finish(prompt_tokens=1536, cached_tokens=0)
    targets: Counter[str] = Counter()
    for _ in range(48):
        pool.now += 0.02
        targets[pool.send("hot", 1536).target] += 1
    assert max(targets.values()) / 12 < 1.3


def test_a_system_prompt_that_all_agents_share_does_not_gather_them_on_one_endpoint() -> None:
    """Who has the system prompt already takes more of the agents than one who has to compute it, for as much work."""
    pool = Pool()
    shared, own, asked = blocks_of("system", 6144), 512, 48
    for turn in range(8):
        arrive(pool, f"warm-{turn}", shared + blocks_of(f"warm {turn}", 256, 6144), 6400).finish(
            prompt_tokens=6400, cached_tokens=0, ttft_s=0.64, duration_s=1.0
        )
    (holder,) = [each.address for each in pool.router.status().endpoints if each.requests_total]
    targets = Counter(
        arrive(pool, f"agent-{turn}", shared + blocks_of(f"agent {turn}", own, 6144), 6144 + own).target
        for turn in range(asked)
    )
    work = {target: own * count + (0 if target == holder else 6144) for target, count in targets.items()}
    assert len(work) == 4
    assert max(work.values()) / (sum(work.values()) / 4) < 1.15
    assert max(targets.values()) / (asked / 4) < 1.7


def test_load_counts_from_the_dispatch_on_and_not_from_the_first_byte() -> None:
    pool = Pool()
    targets = Counter(pool.send(f"long {turn}", 32_000).target for turn in range(64))
    assert set(targets.values()) <= set(range(13, 20))


def test_fifty_misses_avoid_the_busy_endpoint_though_the_idle_one_holds_more() -> None:
    pool = Pool(2)
    busy, idle = "10.0.0.0:8000", "10.0.0.1:8000"
    held = [pool.send(f"unique {turn}", 2048) for turn in range(40)]
    for sent in held:
        if sent.target == idle:
            sent.finish(prompt_tokens=2048, cached_tokens=0)
    for turn in range(20):  # the idle one gets these, so its part of the index is the bigger one
        pool.send(f"more {turn}", 2048).finish(prompt_tokens=2048, cached_tokens=0)
    misses: Counter[str] = Counter()
    for turn in range(50):
        pool.now += 0.01
        sent = pool.send(f"miss {turn}", 2048)
        misses[sent.target] += 1
        sent.finish(prompt_tokens=2048, cached_tokens=0)
    assert misses[busy] <= 5


def decision_s(endpoints: int) -> float:
    """The median time of a decision."""
    pool = Pool(endpoints)
    for turn in range(200):
        pool.send(f"warm {turn % 50}", 640).finish(prompt_tokens=640, cached_tokens=0)
    taken = []
    for turn in range(200):
        began = time.perf_counter()
        pool.send(f"again {turn % 50}", 640)
        taken.append(time.perf_counter() - began)
    return median(taken)


def test_ten_times_the_endpoints_cost_much_less_than_ten_times_the_decision() -> None:
    assert decision_s(1000) < 5 * decision_s(100)


def test_an_endpoint_without_metrics_is_never_taken_for_an_idle_one() -> None:
    pool = Pool(3, config=LLM_D_DEFAULT + "plugins: [{type: queue-scorer}]\n")
    pool.load("e0", waiting=2, running=3)
    pool.load("e1", waiting=9, running=3)
    pool.load("e2", running=None)  # type: ignore[arg-type]
    targets = Counter(pool.send(f"u{turn}").target for turn in range(40))
    assert targets == {"10.0.0.0:8000": 40}


def test_metrics_that_are_stale_count_as_missing() -> None:
    pool = Pool(2, config=LLM_D_DEFAULT + "plugins: [{type: queue-scorer}]\n")
    pool.load("e0", waiting=0, running=0)
    pool.now += 3600.0
    pool.load("e1", waiting=5, running=5)
    targets = Counter(pool.send(f"u{turn}").target for turn in range(40))
    assert targets["10.0.0.0:8000"] < 40  # what it said an hour ago is no reason to prefer it


def test_a_cold_endpoint_that_joins_under_load_gets_some_traffic_and_not_all() -> None:
    pool = Pool(3)
    held = []
    for turn in range(60):
        sent = pool.send(f"w{turn}", 2048)
        if turn < 30:
            sent.finish(prompt_tokens=2048, cached_tokens=0, ttft_s=0.2, duration_s=2.0)
        else:
            held.append(sent)
        pool.now += 0.01
    pool.join("cold", "10.0.9.9:8000")
    burst = Counter(pool.send(f"b{turn}", 2048).target for turn in range(40))
    assert 1 <= burst["10.0.9.9:8000"] <= 10
    assert len(burst) == 4


def test_a_fleet_of_endpoints_that_never_showed_a_metric_is_routed() -> None:
    pool = Pool(3, config=LLM_D_DEFAULT + "plugins: [{type: queue-scorer}, {type: kv-cache-utilization-scorer}]\n")
    targets = Counter(pool.send(f"u{turn}").target for turn in range(60))
    assert len(targets) == 3


@pytest.mark.parametrize("seed", range(3))
def test_whatever_way_requests_end_nothing_of_them_stays(seed: int) -> None:
    pool, chance = Pool(), np.random.default_rng(seed)
    open_ones: list[Sent] = []
    for turn in range(8000):
        pool.now += 0.002
        sent = pool.send(f"p{turn}", int(chance.integers(0, 40)) * 64, model="m" if turn % 50 else "unknown")
        if isinstance(sent.command, Forward):
            open_ones.append(sent)
        if len(open_ones) > 60:
            end(open_ones.pop(int(chance.integers(len(open_ones)))), chance)
    for sent in open_ones:
        end(sent, chance)
    assert pool.router.status().inflight == 0
    pool.now += RECORD_TIMEOUT_S
    while pool.router.deadline() is not None:
        pool.feed(Ticked())
    status = pool.router.status()
    assert (status.inflight, status.unclosed) == (0, 0)
    assert {(e.inflight_requests, e.inflight_uncached_tokens) for e in status.endpoints} == {(0, 0)}
    assert pool.router.deadline() is None


def end(sent: Sent, chance: np.random.Generator) -> None:
    """End a request as traffic does: 30 % are left by their client, some break, some records are lost."""
    kind = chance.random()
    if kind < 0.3:
        sent.finish(is_client_gone=True, response_bytes=900)
    elif kind < 0.4:
        sent.finish(is_cut=True, is_upstream_failure=True, response_bytes=900)
    elif kind < 0.5:
        sent.end()  # its record never comes
    elif kind < 0.6:
        sent.record(status=500, is_upstream_failure=True)
        sent.end()
    else:
        sent.finish(prompt_tokens=700, cached_tokens=0, completion_tokens=20)
