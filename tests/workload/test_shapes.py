"""Each shape shares what it says it shares, and nothing else."""

from collections import Counter
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.workload import Plan, chat_body, hot, multi_turn, unique, zipf


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


def small_multi_turn(seed: int) -> Plan:
    return multi_turn(rng(seed), chats=9, turns=3, systems=4, system_chars=800)


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_bytes_in_every_shape(seed: int) -> None:
    for make in (hot, zipf, unique, multi_turn):
        first, second = make(rng(seed)), make(rng(seed))
        assert first == second
        assert chat_body(first.chats[-1], [], model="m") == chat_body(second.chats[-1], [], model="m")


def test_chats_share_the_system_prompts_evenly() -> None:
    counts = Counter(chat.system for chat in small_multi_turn(1).chats)
    assert sorted(counts.values()) == [2, 2, 2, 3]
    assert all(len(system) == 800 for system in counts)


def test_a_plan_counts_its_requests_over_all_turns() -> None:
    assert small_multi_turn(1).requests == 27
    assert hot(rng(), requests=11).requests == 11


def test_hot_requests_share_the_prompt_and_differ_in_the_question() -> None:
    plan = hot(rng(), requests=50, prompt_chars=6_000)
    assert len({chat.system for chat in plan.chats}) == 1
    assert len({chat.says for chat in plan.chats}) == 50


def test_zipf_asks_most_about_the_first_documents() -> None:
    plan = zipf(rng(), documents=40, requests=2_000, document_chars=100)
    counts = [count for _, count in Counter(chat.system for chat in plan.chats).most_common()]
    assert len(counts) <= 40
    assert counts[0] > 5 * counts[-1]
    assert 0.15 < counts[0] / 2_000 < 0.35


def test_unique_prompts_share_no_prefix_however_many() -> None:
    plan = unique(rng(), requests=300, prompt_chars=500)
    prompts = [chat.system + chat.says[0] for chat in plan.chats]
    assert {len(prompt) for prompt in prompts} == {500}
    assert len({prompt[:16] for prompt in prompts}) == 300
    assert all(a[:16] != b[:16] for a, b in combinations(prompts[:40], 2))


def test_large_unique_prompts_hold_their_long_part_once() -> None:
    plan = unique(rng(), requests=50, prompt_chars=400_000)
    assert all(chat.says[0] is plan.chats[0].says[0] for chat in plan.chats)
    assert 400_000 < len(chat_body(plan.chats[0], [], model="m")) < 401_000
