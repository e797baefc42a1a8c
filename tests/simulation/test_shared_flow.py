"""Flow control of two pickers over the same engines, in virtual time: shares, budgets and limits hold over both."""

import functools
from collections import Counter

import pytest

from bench.crowds import Tenant, tokens_between, traffic
from shoal.engine import PROFILES, EngineConfig
from shoal.routing import Command, Ended, Event, Forward
from shoal.routing.commands import Hold
from shoal.simulation import Cluster, ClusterConfig, NodeConfig
from tests.routing.flowscript import LLM_D, POOL

HEAD = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nflow: {enabled: true, trust_headers: true}\n"
# What two of the engines serve of such requests, in tokens per second.
CAPACITY_TOKENS_PER_S = 14_000.0
ENGINES = 2
SILENCE_S = 1e9


class Pair:
    """A run of two pickers.  most: requests that one engine had at a time.  sent_at, held: by picker, who waited."""

    def __init__(self, config: str, tenants: list[Tenant], duration_s: float, gossip_s: float = 0.005) -> None:
        engine = EngineConfig(profile=PROFILES["tiny"], max_num_batched_tokens=512)
        nodes = tuple(NodeConfig(id=f"e{number}", engine=engine) for number in range(ENGINES))
        settings = ClusterConfig(nodes=nodes, router=config, routers=2, gossip_s=gossip_s, seed=3)
        self._at: dict[str, str] = {}
        self._now = Counter[str]()
        self.most = 0
        self.sent_at: tuple[list[float], list[float]] = ([], [])
        self.held = [0, 0]
        self.cluster = Cluster(settings, on_step=self._watch)
        self.cluster.run(traffic(tenants, duration_s, seed=5))
        # What was last said is heard, too.
        self.cluster.loop.run(lambda: False)

    def _watch(self, number: int, now: float, event: Event, commands: list[Command]) -> None:
        if isinstance(event, Ended) and event.request_id in self._at:
            self._now[self._at.pop(event.request_id)] -= 1
        for command in commands:
            self.held[number] += isinstance(command, Hold)
            if isinstance(command, Forward):
                place = self._at[command.request_id] = command.endpoints[0]
                self._now[place] += 1
                self.most = max(self.most, self._now[place])
                self.sent_at[number].append(now)

    def tokens(self, begin_s: float, end_s: float) -> dict[str, float]:
        return tokens_between(self.cluster.samples, begin_s, end_s)


def flood(name: str, share: float) -> Tenant:
    """A tenant that wants a share of all that the engines can do."""
    return Tenant(name, share * CAPACITY_TOKENS_PER_S / 800, 600, 200)


@functools.cache
def crowd() -> Pair:
    return Pair(HEAD + "tenants: {a: {weight: 3}, b: {weight: 1}}\n", [flood("a", 1.2), flood("b", 1.2)], 25.0)


def test_shares_of_tenants_hold_over_both() -> None:
    tokens = crowd().tokens(5.0, 25.0)
    assert tokens["a"] / sum(tokens.values()) == pytest.approx(0.75, rel=0.05)


def test_no_picker_is_kept_from_the_engines_by_the_other() -> None:
    sent = [sum(5.0 < at < 25.0 for at in each) for each in crowd().sent_at]
    assert min(crowd().held) > 100
    assert min(sent) > 0.25 * sum(sent)


def test_nothing_is_left_anywhere() -> None:
    for router in crowd().cluster.routers:
        status = router.status()
        assert (status.inflight, status.unclosed, status.flow.requests, status.flow.open_charges) == (0, 0, 0, 0)
        assert status.peers.bookings == 0


def test_what_one_has_sent_fills_the_engine_for_the_other() -> None:
    config = (
        f"{LLM_D}plugins:\n- type: concurrency-detector\n  parameters: {{maxConcurrency: 4}}\n"
        "- type: static-usage-limit-policy\n"
        "flowControl:\n  saturationDetector: {pluginRef: concurrency-detector}\n"
        f"  usageLimitPolicyPluginRef: static-usage-limit-policy\n{POOL}flow: {{enabled: true}}\n"
    )
    # One that is sent in the same instant by both may be beyond the limit, no more.
    assert Pair(config, [flood("a", 1.5)], 10.0).most <= 5
    assert Pair(config, [flood("a", 1.5)], 10.0, SILENCE_S).most == 8


def test_a_budget_holds_over_both_together() -> None:
    limit, end_s = 60_000, 60.0
    config = HEAD + f"tenants: {{a: {{tokens_per_min: {limit}}}}}\n"
    pair = Pair(config, [flood("a", 0.8), flood("b", 0.1)], end_s)
    used = Counter[str]()
    for sample in pair.cluster.samples:
        if not sample.is_failed:
            used[sample.tenant] += sample.prompt_tokens + sample.output_tokens
    # A full bucket at the beginning, and what comes in by the minute; the last ones owe a little.
    allowed = limit * (1.0 + end_s / 60.0)
    assert 0.9 * allowed < used["a"] < 1.02 * allowed
    refused = Counter(sample.tenant for sample in pair.cluster.samples if sample.is_failed)
    assert refused["a"] > 100
    assert refused["b"] == 0
    for router in pair.cluster.routers:
        assert router._admission is not None
        _, left = router._admission._charges.budgets.left("a", pair.cluster.loop.now)
        assert left is not None
        assert left <= limit / 2
