"""What flow control promises: who waits for whom, by how much, and what it costs.

All but the cost is in virtual time, the same on every machine: four small embedded engines, and tenants that send more
than they can serve.
"""

import functools
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from bench.bars.decide import MODEL, arrivals, router_of
from bench.bars.registry import Figure, bar
from bench.crowds import Tenant, run, tokens_between, ttft_s
from shoal.flow import BandPolicy, Queue, QueuePolicy, Ticket
from shoal.flow.fairness import TokenFairness
from shoal.flow.ordering import TurnAwareOrdering
from shoal.pool import Outcome, Signals
from shoal.routing import Ended, Forward, Recorded, Router
from shoal.routing.admission import Admission
from shoal.routing.events import LoadSeen
from shoal.simulation.results import Sample

POOL = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nflow: {enabled: true, trust_headers: true}\n"
TWO_BANDS = POOL + "tenants: {chat: {priority: 10}, batch: {priority: -10}}\n"
# What the four engines serve of the mixture below when everything is sent to them at once, in tokens per second.
CAPACITY_TOKENS_PER_S = 28_000.0
CHAT = Tenant("chat", 0.3 * CAPACITY_TOKENS_PER_S / 1_600, 1_500, 100)
BATCH = Tenant("batch", 1.2 * CAPACITY_TOKENS_PER_S / 800, 600, 200)
_ENGINES, _PROFILE = 4, "tiny"
_QUEUED = 10_000


class _Crowd(NamedTuple):
    """Figures of a window.  ttft_s: p99 of chat."""

    ttft_s: float
    tokens_per_s: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.tokens_per_s.values())


@functools.cache
def _crowd(tenants: tuple[Tenant, ...], config: str, scale: float) -> _Crowd:
    begin_s, end_s = 15.0, 15.0 + max(20.0, 45.0 * scale)
    samples = run(list(tenants), end_s, config=config, engines=_ENGINES, profile=_PROFILE, step_tokens=512).samples
    tokens = tokens_between(samples, begin_s, end_s)
    span_s = end_s - begin_s
    return _Crowd(ttft_s(samples, "chat", 99, begin_s, end_s), {name: value / span_s for name, value in tokens.items()})


@bar("flow.interactive", "interactive ttft p99 at 150 % load over what it is alone", at_most=1.5, part=4)
def _interactive(scale: float) -> Figure:
    alone, managed = _crowd((CHAT,), "", scale), _crowd((CHAT, BATCH), TWO_BANDS, scale)
    unmanaged = _crowd((CHAT, BATCH), "", scale)
    details = {"alone_s": alone.ttft_s, "managed_s": managed.ttft_s, "unmanaged_s": unmanaged.ttft_s}
    return Figure(value=managed.ttft_s / alone.ttft_s, details=details)


@bar("flow.throughput", "tokens of the managed pool at 150 % load over the unmanaged one's", at_least=0.95, part=4)
def _throughput(scale: float) -> Figure:
    managed, unmanaged = _crowd((CHAT, BATCH), TWO_BANDS, scale), _crowd((CHAT, BATCH), "", scale)
    details = {"managed": managed.tokens_per_s, "unmanaged": unmanaged.tokens_per_s}
    return Figure(value=managed.total / unmanaged.total, details=details)


@bar("flow.minimum-share", "tokens of the low band while the high one alone is 150 %, over all", at_least=0.09, part=4)
def _minimum_share(scale: float) -> Figure:
    """The minimum share is 10 %; requests under way at the edges of the window are the difference."""
    flood = Tenant("chat", 1.5 * CAPACITY_TOKENS_PER_S / 1_600, 1_500, 100)
    seen = _crowd((flood, BATCH), TWO_BANDS, scale)
    return Figure(value=seen.tokens_per_s.get("batch", 0.0) / seen.total, details=seen.tokens_per_s)


@bar(
    "flow.fair-shares", "furthest token share from its weight, one tenant with 10 x the requests", at_most=0.05, part=4
)
def _fair_shares(scale: float) -> Figure:
    per_s = 0.4 * CAPACITY_TOKENS_PER_S / 800
    quiet = [Tenant(name, per_s, 600, 200) for name in ("a", "b", "c")]
    loud = Tenant("loud", 10 * per_s, 600, 200)
    weights = {"a": 1.0, "b": 1.0, "c": 1.0, "loud": 1.0}
    seen = _crowd((*quiet, loud), POOL, min(scale, 0.5))
    shares = {name: seen.tokens_per_s.get(name, 0.0) / seen.total for name in weights}
    fair = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    return Figure(value=max(abs(shares[name] / fair[name] - 1.0) for name in weights), details=shares)


@bar("flow.burst", "wait of one high request behind 200 low ones, in service times", at_most=1.0, part=4)
def _burst(scale: float) -> Figure:
    low = Tenant("batch", 0, 600, 200, burst=200)
    high = Tenant("chat", 0, 600, 200, begins_s=0.05, burst=1)
    cluster = run([low, high], 1.0, config=TWO_BANDS, engines=_ENGINES, profile=_PROFILE, step_tokens=512)
    (urgent,) = [sample for sample in cluster.samples if sample.tenant == "chat"]
    alone = run([high], 1.0, engines=_ENGINES, profile=_PROFILE, step_tokens=512).samples[0]
    last_s = max(_ended(sample) for sample in cluster.samples)
    details = {"ttft_s": urgent.ttft_s, "ttft_alone_s": alone.ttft_s, "service_s": alone.duration_s, "all_s": last_s}
    return Figure(value=(urgent.ttft_s - alone.ttft_s) / alone.duration_s, details=details)


def _ended(sample: Sample) -> float:
    return sample.arrived_s + sample.duration_s


@bar("flow.queue", "CPU of the queue, one in and one out, 10,000 waiting", unit="us", at_most=30, part=4)
def _queue(scale: float) -> Figure:
    """The queue alone: 100 tenants in three bands, with what each request is charged."""
    band = BandPolicy(TokenFairness(), TurnAwareOrdering())
    queue = Queue(QueuePolicy(band, band))
    count = max(2_000, int(10_000 * scale))

    def ticket(number: int) -> Ticket:
        return Ticket(
            f"r{number}", tenant_id=f"t{number % 100}", priority=number % 3, work_tokens=900.0, ttl_s=60.0,
            arrived_at=number * 1e-3,
        )  # fmt: skip

    for number in range(_QUEUED):
        queue.offer(ticket(number), 0.0)
    lane, spent = queue.lane(""), []
    clock = time.thread_time_ns
    for number in range(_QUEUED, _QUEUED + count):
        now, came = number * 1e-3, ticket(number)
        began = clock()
        assert not queue.offer(came, now)
        first = lane.first(now)
        assert first is not None
        goes = lane.next(first, now, is_held_back=False)
        assert goes is not None
        queue.went(goes, 1_000.0, now)
        spent.append(clock() - began)
    assert len(queue) == _QUEUED
    return Figure(value=float(np.median(spent)) / 1e3)


@bar("flow.cost", "CPU of the whole gate for one that waits, 10,000 waiting", unit="us", at_most=30, part=4)
def _cost(scale: float) -> Figure:
    count = max(1_000, int(4_000 * scale))
    config = (
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: concurrency-detector\n"
        "flowControl:\n  defaultPriorityBand: {maxRequests: 100k}\n"
        "  saturationDetector: {pluginRef: concurrency-detector}\n---\n" + POOL
    )
    seen = [_added_us(router_of(4, config), count, seed) for seed in (3, 4, 5)]
    own = _Watch.own_us()
    return Figure(value=min(seen) - own, details={"batches": seen, "of_which_the_watch": own})


class _Watch:
    """Time in the gate, without what it calls the router for: choosing an endpoint costs the same without a queue."""

    def __init__(self) -> None:
        self.spent_ns = 0
        self._depth = 0

    def inside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            if self._depth:
                return call(*given)
            self._depth += 1
            began = time.thread_time_ns()
            try:
                return call(*given)
            finally:
                self.spent_ns += time.thread_time_ns() - began
                self._depth -= 1

        return timed

    def outside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return call(*given)
            finally:
                self.spent_ns -= (time.thread_time_ns() - began) if self._depth else 0

        return timed

    @classmethod
    def own_us(cls) -> float:
        """What it takes itself for what it counts of one request: a call of the router among six of the gate."""
        watch, spent = cls(), []
        sends = watch.outside(_nothing)
        calls = [watch.inside(_nothing)] * 5 + [watch.inside(lambda *given: sends(*given))]
        for _ in range(5_000):
            watch.spent_ns = 0
            for call in calls:
                call(1, 2, 3)
            spent.append(watch.spent_ns)
        return float(np.median(spent)) / 1e3


def _nothing(*given: object) -> None:
    pass


def _added_us(router: Router, count: int, seed: int) -> float:
    """Microseconds in the gate for one request's arrival and another one's end, of which the first in line profits."""
    crowd = arrivals(_QUEUED + count + 400, seed=seed, shared=0)
    flying: deque[Forward] = deque()
    now = 1_000.0 * seed
    for endpoint in router.status().endpoints:
        # By now nothing that others may have sent there is left.
        router.handle(LoadSeen(endpoint.id, Signals(waiting=0, running=0)), now)
    while len(flying) < 400:
        (forward,) = router.handle(next(crowd), now)
        assert isinstance(forward, Forward)
        flying.append(forward)
    for _ in range(_QUEUED):
        router.handle(next(crowd), now)
    watch, spent = _Watch(), []
    with ExitStack() as stack:
        for name in ("admit", "after", "recorded", "closed", "left"):
            stack.enter_context(patch.object(Admission, name, watch.inside(getattr(Admission, name))))
        for name in ("send", "refuse"):
            stack.enter_context(patch.object(Router, name, watch.outside(getattr(Router, name))))
        for arrived in crowd:
            now += 1e-4
            done, watch.spent_ns = flying.popleft(), 0
            outcome = Outcome(
                status=200, served_address=done.endpoints[0], ttft_s=0.05, duration_s=0.5, prompt_tokens=1_000,
                cached_tokens=0, completion_tokens=50,
            )  # fmt: skip
            commands = router.handle(arrived, now)
            commands += router.handle(Ended(done.request_id), now)
            commands += router.handle(Recorded(done.request_id, outcome), now)
            spent.append(watch.spent_ns)
            flying += [each for each in commands if isinstance(each, Forward)]
    assert len(flying) == 400
    assert router.status().flow.requests == _QUEUED
    return float(np.median(spent)) / 1e3


@bar("flow.idle", "wake-ups of a pool in which nobody waits", at_most=0, part=4)
def _idle(scale: float) -> Figure:
    router = router_of(4, POOL)
    (forward,) = router.handle(next(arrivals(1)), 1.0)
    assert isinstance(forward, Forward)
    router.handle(Ended(forward.request_id), 2.0)
    router.handle(Recorded(forward.request_id, Outcome(status=200, served_address=forward.endpoints[0])), 2.0)
    return Figure(value=float(router.deadline() is not None), details={"model": MODEL})
