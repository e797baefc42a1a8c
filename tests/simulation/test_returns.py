"""What it is worth, in virtual time, to say that one will be back: the prefix is there, and nobody pays for it."""

from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest

from shoal.engine import PROFILES, EngineConfig
from shoal.simulation import Cluster, ClusterConfig, NodeConfig, Prompt, Session, Turn

TRUSTING = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nagents: {trust_hints: true}\n"
HISTORY, STRANGER = 2_000, 2_400
TOOL_S, EVERY_S = 15.0, 0.4
"""How long a tool takes; how often a stranger's prompt comes, of which in that time three caches' worth do."""


class Run(NamedTuple):
    """kept_ratio: of the agents' histories that were still cached.  agents_ttft_s: mean of their later turns;
    strangers_ttft_s: of the others."""

    kept_ratio: float
    agents_ttft_s: float
    strangers_ttft_s: float
    spared: int


def agent(number: int, every_s: float, *, is_hinting: bool) -> Session:
    """Two turns with a tool between them."""
    history = Prompt.empty(0).extend(1_000 + number, HISTORY)
    turns = (Turn(history, 16), Turn(history.extend(5_000 + number, 200), 16, think_s=TOOL_S))
    headers = {"x-shoal-returns-within-ms": "20000"} if is_hinting else {}
    return Session(f"agent-{number}", partial(iter, turns), 5.0 + every_s * number, headers=headers)


def stranger(number: int, every_s: float) -> Session:
    prompt = Prompt.empty(0).extend(10_000 + number, STRANGER)
    return Session(f"stranger-{number}", partial(iter, (Turn(prompt, 16),)), every_s * number)


@cache
def run(seed: int, *, is_hinting: bool, agents: int = 20, every_s: float = EVERY_S) -> Run:
    """So many agents begin one after the other over two minutes."""
    engine = EngineConfig(profile=PROFILES["tiny"])
    nodes = tuple(NodeConfig(id=f"e{number}", engine=engine) for number in range(2))
    cluster = Cluster(ClusterConfig(nodes=nodes, router=TRUSTING, seed=seed))
    sessions = [agent(number, 120.0 / agents, is_hinting=is_hinting) for number in range(agents)]
    cluster.run([*sessions, *(stranger(number, every_s) for number in range(int(140.0 / every_s)))])
    later = [each for each in cluster.samples if each.session.startswith("agent") and each.prompt_tokens > HISTORY]
    others = [each.ttft_s for each in cluster.samples if each.session.startswith("stranger")]
    return Run(
        float(np.mean([each.cached_tokens for each in later])) / HISTORY,
        float(np.mean([each.ttft_s for each in later])),
        float(np.mean(others)),
        cluster.routers[0].status().returns.spared,
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_history_of_a_session_that_will_be_back_is_still_cached_when_it_is(seed: int) -> None:
    said, silent = run(seed, is_hinting=True), run(seed, is_hinting=False)
    assert (silent.spared, said.spared > 0) == (0, True)
    assert silent.kept_ratio < 0.3
    assert said.kept_ratio > 0.9
    assert said.agents_ttft_s < 0.3 * silent.agents_ttft_s


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_strangers_pay_nothing_for_it(seed: int) -> None:
    said, silent = run(seed, is_hinting=True), run(seed, is_hinting=False)
    assert said.strangers_ttft_s < 1.02 * silent.strangers_ttft_s


def test_where_caches_are_too_small_for_all_who_come_back_nobody_steps_aside_for_long() -> None:
    said, silent = run(1, is_hinting=True, every_s=0.18), run(1, is_hinting=False, every_s=0.18)
    assert said.kept_ratio < 0.3
    assert 0 < said.spared < 200
    assert said.agents_ttft_s < 1.05 * silent.agents_ttft_s
    assert said.strangers_ttft_s < 1.15 * silent.strangers_ttft_s
