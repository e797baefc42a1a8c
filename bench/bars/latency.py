"""What predicting latency costs and how wrong it is: the router alone, and a fleet of two kinds in virtual time.

Errors are the same on every machine; times are CPU time of this thread.
"""

import time

import numpy as np

from bench.bars.decide import MODEL, arrivals, reading, router_of
from bench.bars.registry import Figure, bar
from bench.fleets import PREDICTING, Floats, sessions, ttft_errors, two_kinds
from shoal.engine import PROFILES, EngineConfig
from shoal.pool import Outcome, ServedModel
from shoal.routing import Arrived, Ended, Forward, Recorded, Router
from shoal.routing.columns import Columns
from shoal.routing.events import LoadSeen, ModelsSeen
from shoal.simulation import NodeConfig
from shoal.simulation.loop import Rank

_COLD = 300
_SEEDS = (3, 5, 7)
DECIDING = PREDICTING + "- type: latency-scorer\n"


def _errors(
    seed: int, config: str = PREDICTING, rate: float = 4.0, *, count: int = 300, labelled: bool = True
) -> Floats:
    cluster, accounts = two_kinds(config, seed, labelled=labelled)
    cluster.run(sessions(np.random.default_rng(seed), count, rate))
    return ttft_errors(accounts)


@bar("latency.error", "ttft: median error, requests 300 to 600 after a cold start", at_most=0.15, part=4)
def _cold(scale: float) -> Figure:
    """The worst of light and heavy load, of seeds, and of who decides: the default profile, or the prediction."""
    found = {
        f"{name}, {rate:g}/s, seed {seed}": _errors(seed, config, rate)
        for name, config in (("default profile", PREDICTING), ("latency-scorer", DECIDING))
        for rate in (4.0, 8.0)
        for seed in _SEEDS[: max(1, round(scale * len(_SEEDS)))]
    }
    unlabelled = _errors(_SEEDS[0], labelled=False)
    medians = {name: float(np.median(errors[_COLD : 2 * _COLD])) for name, errors in found.items()}
    early = max(float(np.median(errors[100:_COLD])) for errors in found.values())
    details = {"requests_100_to_300": early, "no_labels": float(np.median(unlabelled[_COLD : 2 * _COLD])), **medians}
    return Figure(value=max(medians.values()), details=details)


@bar("latency.drift", "ttft: median error of requests 30 to 130 on a machine three times as slow", at_most=0.15, part=4)
def _drift(scale: float) -> Figure:
    found: dict[str, float] = {}
    for seed in _SEEDS[: max(1, round(scale * len(_SEEDS)))]:
        cluster, accounts = two_kinds(PREDICTING, seed)
        cluster.loop.at(60.0, Rank.WORLD, cluster.slow, "h100-1", 3.0)
        cluster.run(sessions(np.random.default_rng(seed), 700, 4.0))
        after = [each for each in accounts if each.endpoint_id == "h100-1" and each.arrived_at > 60.0]
        found[f"seed {seed}"] = float(np.median(ttft_errors(after)[30:130]))
    return Figure(value=max(found.values()), details=dict(found))


@bar("latency.new-model", "ttft: median error of requests 100 to 300 of a new model", at_most=0.15, part=4)
def _new_model(scale: float) -> Figure:
    """Four machines join with a model of 70B, which nothing was learned of."""
    found: dict[str, float] = {}
    large = EngineConfig(profile=PROFILES["h100-70b"])
    others = tuple(NodeConfig(id=f"large-{n}", engine=large, labels={"llm-d.ai/accelerator": "h100"}) for n in range(4))
    for seed in _SEEDS[: max(1, round(scale * len(_SEEDS)))]:
        cluster, accounts = two_kinds(PREDICTING, seed, others=others)
        for node in others:
            cluster.routers[0].handle(ModelsSeen(node.id, (ServedModel(id="large"),)), 0.0)
        rng = np.random.default_rng(seed)
        small = list(sessions(rng, 150, 4.0))
        new = [each._replace(arrives_s=(each.arrives_s or 0.0) + 40.0) for each in sessions(
            rng, 150, 2.0, start=1000, model="large")]  # fmt: skip
        cluster.run([*small, *new])
        of_new = [each for each in accounts if each.target_model == "large"]
        found[f"seed {seed}"] = float(np.median(ttft_errors(of_new)[100:300]))
    return Figure(value=max(found.values()), details=dict(found))


def _endpoint(number: int) -> str:
    return f"10.0.{number >> 8}.{number & 255}:8000"


def warm_router(endpoints: int, config: str, count: int) -> tuple[Router, list[Arrived], float]:
    """A router that has seen `count` streams on so many endpoints, what may arrive next, and the time."""
    router = router_of(endpoints, config)
    rng = np.random.default_rng(4)
    now = 1.0
    for number, arrived in enumerate(arrivals(count, seed=5)):
        now += 0.01
        router.handle(LoadSeen(_endpoint(number % endpoints), reading(rng)), now)
        (forward,) = router.handle(arrived, now)
        assert isinstance(forward, Forward)
        ttft_s = 0.02 + arrived.request.prompt_tokens * 4e-5 * float(rng.lognormal(0.0, 0.05))
        router.handle(Ended(arrived.request.id), now)
        outcome = Outcome(
            status=200, served_address=forward.endpoints[0], ttft_s=ttft_s, duration_s=ttft_s + 1.0,
            prompt_tokens=arrived.request.prompt_tokens, cached_tokens=0, completion_tokens=60,
        )  # fmt: skip
        router.handle(Recorded(arrived.request.id, outcome), now)
    return router, list(arrivals(400, seed=6)), now


@bar("latency.predict-100", "predicting a request for 100 endpoints, all figures included, median", unit="us",
     at_most=100, part=4)  # fmt: skip
def _predict(scale: float) -> Figure:
    router, following, now = warm_router(100, PREDICTING, 2_000)
    rng = np.random.default_rng(8)
    spent: list[int] = []
    make = Columns.prediction

    def timed(self: Columns, forecasts: object) -> object:
        began = time.thread_time_ns()
        made = make(self, forecasts)  # type: ignore[arg-type]
        spent.append(time.thread_time_ns() - began)
        return made

    learned: list[int] = []
    setattr(Columns, "prediction", timed)  # noqa: B010
    try:
        for number, arrived in enumerate(following * max(1, round(3 * scale))):
            now += 0.01
            router.handle(LoadSeen(_endpoint(number % 100), reading(rng)), now)
            request = arrived.request
            forward = router.handle(arrived, now)[0]
            assert isinstance(forward, Forward)
            router.handle(Ended(request.id), now)
            outcome = Outcome(
                status=200, served_address=forward.endpoints[0], ttft_s=0.06, duration_s=1.0, prompt_tokens=1_000,
                cached_tokens=0, completion_tokens=60,
            )  # fmt: skip
            began = time.thread_time_ns()
            router.handle(Recorded(request.id, outcome), now)
            learned.append(time.thread_time_ns() - began)
    finally:
        setattr(Columns, "prediction", make)  # noqa: B010
    times, records = np.array(spent) / 1e3, np.array(learned) / 1e3
    details = {
        "p99_us": float(np.quantile(times, 0.99)),
        "record_p50_us": float(np.median(records)),
        "record_p99_us": float(np.quantile(records, 0.99)),
        "longest_record_us": float(records.max()),
        "model": MODEL,
    }
    return Figure(value=float(np.median(times)), details=details)


@bar("latency.stall", "longest CPU time of a step that learns, p99", unit="ms", at_most=5, part=4)
def _stall(scale: float) -> Figure:
    """Learning is a few small array operations a record, so no step waits for a fit."""
    figure = _predict(scale)
    return Figure(value=float(figure.details["record_p99_us"]) / 1e3, details=figure.details)
