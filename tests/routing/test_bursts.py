"""Bursts: samples of one prompt share one prefill, and no endpoint gets more than its share."""

from collections import Counter

from shoal.routing import Arrived, Forward
from tests.routing.script import Pool, blocks_of, request_of

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: burst-prefix-cache-producer
  parameters: {%s}
- type: expected-wait-scorer
"""


def send(pool: Pool, name: str, prompt: str, tokens: int = 6400) -> str:
    (forward,) = pool.feed(Arrived(request_of(name, tokens), blocks_of(prompt, tokens)))
    assert isinstance(forward, Forward)
    return forward.endpoints[0]


def test_samples_of_one_prompt_share_a_prefill() -> None:
    pool = Pool(4, config=CONFIG % "")
    placed = {
        prompt: Counter(send(pool, f"{prompt} {n}", f"prompt {prompt}") for n in range(8)) for prompt in range(32)
    }
    assert all(len(targets) == 1 for targets in placed.values())
    total = sum(placed.values(), Counter[str]())
    assert max(total.values()) <= 256 / 4 + 8


def test_samples_that_come_in_turns_with_others_are_placed_together_too() -> None:
    pool = Pool(4, config=CONFIG % "")
    placed: dict[int, set[str]] = {}
    for n in range(8):
        for prompt in range(32):
            placed.setdefault(prompt, set()).add(send(pool, f"{prompt} {n}", f"prompt {prompt}"))
    assert sum(map(len, placed.values())) <= 32 + 3


def test_one_large_burst_is_spread_with_one_prefill_for_each_endpoint() -> None:
    pool = Pool(4, config=CONFIG % "")
    targets = Counter(send(pool, f"r{n}", "hot") for n in range(192))
    assert len(targets) == 4
    assert max(targets.values()) / (192 / 4) < 1.3


def test_a_limit_per_replica_holds() -> None:
    pool = Pool(4, config=CONFIG % "maxPerReplica: 3")
    targets = [send(pool, f"r{n}", "hot") for n in range(12)]
    assert set(Counter(targets).values()) == {3}


def test_prompts_that_share_little_are_no_burst() -> None:
    pool = Pool(4, config=CONFIG % "")
    head = blocks_of("system", 640)
    targets = Counter()
    for n in range(24):
        (forward,) = pool.feed(Arrived(request_of(f"r{n}", 6400), head + blocks_of(f"turn {n}", 5760, after=640)))
        assert isinstance(forward, Forward)
        targets[forward.endpoints[0]] += 1
    assert max(targets.values()) <= 8


def test_a_group_ends_when_nobody_came_for_the_window() -> None:
    pool = Pool(4, config=CONFIG % "windowDurationMs: 50, maxPerReplica: 2")
    first = [send(pool, f"r{n}", "hot") for n in range(2)]
    pool.now += 1.0
    # A new group would begin only for a cold prefix; this one is known, so the scores decide.
    assert first[0] == first[1]
    assert send(pool, "late", "hot") in {f"10.0.0.{n}:8000" for n in range(4)}
    assert len({send(pool, f"other {n}", "cold") for n in range(2)}) == 1
