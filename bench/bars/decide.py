"""What a decision costs and what the index holds: the router machine, called as a host calls it.

Times are CPU time of this thread, so that a busy machine does not count against the code.
"""

import os
import time
from collections.abc import Iterator
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from bench.bars.registry import Figure, bar
from bench.processes import rss_bytes
from shoal.kernel import Chance
from shoal.pool import (
    Decision,
    Endpoint,
    EndpointState,
    FleetView,
    Outcome,
    Refusal,
    Request,
    ServedModel,
    Signals,
)
from shoal.routing import Arrived, Ended, Forward, Recorded, Router
from shoal.routing.config import load
from shoal.routing.events import EndpointJoined, LoadSeen, ModelsSeen
from shoal.scheduling import Scheduler

MODEL = "bench-model"
_PROMPT_BLOCKS = 16
_BLOCK_BYTES = 256
_SHARED = 50
_BATCHES = 3

FIVE_SCORERS = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: running-requests-size-scorer
- type: active-request-scorer
- type: prefix-cache-scorer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
  - pluginRef: kv-cache-utilization-scorer
  - pluginRef: running-requests-size-scorer
  - pluginRef: active-request-scorer
  - pluginRef: prefix-cache-scorer
    weight: 3
"""


def router_of(endpoints: int, config: str = "") -> Router:
    """A router with so many ready endpoints of one model, each with a reading of its metrics."""
    router = Router(load(config, "bench"), Chance(1))
    rng = np.random.default_rng(1)
    for i in range(endpoints):
        id = f"10.{i >> 16}.{(i >> 8) & 255}.{i & 255}:8000"
        router.handle(EndpointJoined(Endpoint(id=id, address=id), EndpointState.READY), 0.0)
        router.handle(ModelsSeen(id, (ServedModel(id=MODEL, max_model_len=131_072),)), 0.0)
        router.handle(LoadSeen(id, reading(rng)), 0.0)
    return router


def reading(rng: np.random.Generator) -> Signals:
    return Signals(
        waiting=float(rng.integers(0, 5)),
        running=float(rng.integers(0, 30)),
        kv_usage_ratio=float(rng.random()),
        block_size_tokens=16,
        num_blocks=20_000,
    )


def arrivals(count: int, *, seed: int = 2, blocks: int = _PROMPT_BLOCKS, shared: int = _SHARED) -> Iterator[Arrived]:
    """Requests of which half begin with one of `shared` long prefixes (0: all are unique)."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(1, 2**63, (max(1, shared), blocks * 3 // 4), dtype=np.uint64)
    for i in range(count):
        own = rng.integers(1, 2**63, blocks, dtype=np.uint64)
        if shared and i % 2:
            own[: prefixes.shape[1]] = prefixes[rng.integers(shared)]
        request = Request(
            id=f"r{seed}-{i}",
            model=MODEL,
            is_streaming=True,
            prompt_bytes=blocks * _BLOCK_BYTES,
            prompt_tokens=blocks * _BLOCK_BYTES // 4,
            max_output_tokens=200,
        )
        yield Arrived(request, own.tobytes())


class DecisionTimes(NamedTuple):
    """CPU seconds, one per request.  decided: the scheduler's decision with the columns it asked for; handled: all of
    the router's `handle(Arrived)`, with the look-up in the index, the booking and the explanation."""

    decided: npt.NDArray[np.float64]
    handled: npt.NDArray[np.float64]


def decision_times(router: Router, count: int, *, seed: int = 2, inflight: int = 200) -> DecisionTimes:
    """Time `count` arrivals while about `inflight` earlier requests are in flight and engines are read as in a pool."""
    rng = np.random.default_rng(seed)
    ids = [endpoint.id for endpoint in router.status().endpoints]
    for id in ids:
        router.handle(LoadSeen(id, reading(rng)), 1_000.0 * seed)
    now = 1.0 + 1_000.0 * seed
    open_ids: list[str] = []
    times: list[int] = []
    decided: list[int] = []
    clock = time.thread_time_ns
    schedule = Scheduler.schedule

    def timed(self: Scheduler, request: Request, view: FleetView, now: float, priority: int = 0) -> Decision | Refusal:
        began = clock()
        decision = schedule(self, request, view, now, priority)
        decided.append(clock() - began)
        return decision

    for number, arrived in enumerate(arrivals(count + inflight, seed=seed)):
        now += 0.001
        router.handle(LoadSeen(ids[number % len(ids)], reading(rng)), now)
        with patch.object(Scheduler, "schedule", timed):
            began = clock()
            commands = router.handle(arrived, now)
            times.append(clock() - began)
        forward = commands[0]
        assert isinstance(forward, Forward)
        open_ids.append(arrived.request.id)
        if len(open_ids) > inflight:
            done = open_ids.pop(0)
            router.handle(Ended(done), now)
            outcome = Outcome(
                status=200, served_address=forward.endpoints[0], ttft_s=0.05, duration_s=0.5, prompt_tokens=1_000,
                cached_tokens=500, completion_tokens=50,
            )  # fmt: skip
            router.handle(Recorded(done, outcome), now)
    for id in open_ids:
        router.handle(Ended(id), now)
    return DecisionTimes(np.array(decided[inflight:]) / 1e9, np.array(times[inflight:]) / 1e9)


def _quantiles_us(endpoints: int, config: str, count: int) -> dict[str, float]:
    """p50 and p99 of the least disturbed of three batches: other work on the machine slows caches and clocks."""
    router = router_of(endpoints, config)
    batches = [decision_times(router, count, seed=seed) for seed in range(_BATCHES)]
    return {
        f"{what}_{name}_us": min(float(np.quantile(getattr(batch, what), q)) for batch in batches) * 1e6
        for what in DecisionTimes._fields
        for name, q in (("p50", 0.5), ("p99", 0.99))
    }


@bar("router.decide-1000", "all of a decision at 1,000 endpoints, default profile, p99", unit="us", at_most=1_000)
def _thousand(scale: float) -> Figure:
    seen = _quantiles_us(1_000, "", max(300, int(3_000 * scale)))
    return Figure(value=seen["handled_p99_us"], details=seen)


@bar("router.decide-100", "decision at 100 endpoints with 5 scorers, median", unit="us", at_most=100)
def _hundred(scale: float) -> Figure:
    count = max(300, int(3_000 * scale))
    seen = _quantiles_us(100, FIVE_SCORERS, count)
    return Figure(value=seen["decided_p50_us"], details={**seen, "default_profile": _quantiles_us(100, "", count)})


@bar("index.million", "index bytes over their budget after 1,000,000 unique prompts, memory flat", at_most=1.0)
def _million(scale: float) -> Figure:

    count = max(20_000, int(1_000_000 * scale))
    router = router_of(4)
    now, worst, marks = 1.0, 0.0, []
    for i, arrived in enumerate(arrivals(count, shared=0)):
        now += 0.001
        (forward,) = router.handle(arrived, now)
        assert isinstance(forward, Forward)
        router.handle(Ended(arrived.request.id), now)
        outcome = Outcome(status=200, served_address=forward.endpoints[0], ttft_s=0.05, duration_s=0.1)
        router.handle(Recorded(arrived.request.id, outcome), now)
        if i % (count // 20) == count // 20 - 1:
            status = router.status()
            worst = max(worst, status.index_bytes / status.index_budget_bytes)
            marks.append(rss_bytes(os.getpid()))
    status = router.status()
    growth = marks[-1] / marks[len(marks) // 2] - 1.0
    details = {
        "index_mb": status.index_bytes / 2**20,
        "budget_mb": status.index_budget_bytes / 2**20,
        "entries": status.index_entries,
        "rss_mb": [round(mark / 2**20, 1) for mark in marks],
        "second_half_growth": growth,
    }
    void = "" if status.index_entries else "nothing was indexed"
    return Figure(value=worst if growth < 0.05 else float("inf"), void=void, details=details)
