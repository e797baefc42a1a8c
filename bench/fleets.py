"""A fleet of two kinds of machine in virtual time with agent-like sessions: what predictions are tried on.

Owns the fleet and the sessions; the clock, the engines and the router are the twin's.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.engine import PROFILES, EngineConfig
from shoal.routing import Account, Command, Event
from shoal.simulation import Cluster, ClusterConfig, NodeConfig, Prompt, Session, Turn

Floats = npt.NDArray[np.float64]
KIND_LABEL = "llm-d.ai/accelerator"
PREDICTING = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: predicted-latency-producer
"""


def sessions(
    rng: np.random.Generator, count: int, per_s: float, *, start: int = 0, model: str = "m"
) -> Iterator[Session]:
    """Sessions that begin at random times, of one to seven turns behind one of six system prompts of 2,048 tokens.

    What is said and answered has log-normal lengths around 600 and 150 tokens; about 2 s are thought between turns.
    """
    base = Prompt.empty(start + 1)
    systems = [base.extend(100 + number, 2048) for number in range(6)]
    at = 0.0
    for number in range(start, start + count):
        at += float(rng.exponential(1.0 / per_s))
        turns = [
            (float(rng.exponential(2.0)), _length(rng, 600, 16_000), _length(rng, 150, 1_500))
            for _ in range(int(rng.integers(1, 8)))
        ]
        plan = _Plan(number, systems[int(rng.integers(6))], tuple(turns))
        yield Session(f"s{number}", plan.turns, arrives_s=at, model=model)


class _Plan(NamedTuple):
    """lengths: seconds before each turn, tokens said, tokens answered."""

    number: int
    system: Prompt
    lengths: tuple[tuple[float, int, int], ...]

    def turns(self) -> Iterator[Turn]:
        prompt = self.system
        for place, (think_s, said, answered) in enumerate(self.lengths):
            content = 10_000 + 100 * self.number + 2 * place
            asked, prompt = prompt.grow((content, said), (content + 1, answered))
            yield Turn(asked, answered, think_s if place else 0.0, whole=prompt)


def _length(rng: np.random.Generator, median: float, most: int) -> int:
    return int(min(max(16.0, float(rng.lognormal(np.log(median), 0.9))), most))


def two_kinds(
    config: str, seed: int, *, labelled: bool = True, each: int = 4, others: tuple[NodeConfig, ...] = ()
) -> tuple[Cluster, list[Account]]:
    """A cold pool of `each` H100 and as many TPU v6e with the same model of 8B, and what its router accounts for."""
    nodes = tuple(
        NodeConfig(
            id=f"{kind}-{number}",
            engine=EngineConfig(profile=PROFILES[profile]),
            labels={KIND_LABEL: kind} if labelled else {},
        )
        for kind, profile in (("h100", "h100-8b"), ("v6e", "tpu-v6e-8b"))
        for number in range(each)
    )
    cluster = Cluster(ClusterConfig(nodes=nodes + others, router=config, seed=seed, scrape_s=0.2))
    accounts: list[Account] = []
    router = cluster.routers[0]
    handle = router.handle

    def watched(event: Event, now: float) -> list[Command]:
        commands = handle(event, now)
        accounts.extend([command for command in commands if isinstance(command, Account)])
        return commands

    setattr(router, "handle", watched)  # noqa: B010 (mypy knows no other way to replace a method)
    return cluster, accounts


def ttft_errors(accounts: Iterable[Account]) -> Floats:
    """|predicted - measured| / measured of each request's ttft, in the order of arrival."""
    found = [
        abs(account.forecast.ttft_s / account.outcome.ttft_s - 1.0)
        for account in sorted(accounts, key=lambda each: each.arrived_at)
        if account.forecast is not None and account.outcome.ttft_s
    ]
    return np.array(found)
