"""`shoal twin fit` on engines whose coefficients it does not know: how near the step times are that it finds.

A pool in virtual time has engines that are up to twice as fast or as slow in each coefficient as those it begins from,
serves chats from quiet to busy, and writes a journal; the fit reads the journal alone.
"""

import msgspec
import numpy as np

from bench.bars.registry import Figure, bar
from shoal.engine import EngineConfig, Profile, find_profile
from shoal.engine.steptime import StepTime
from shoal.simulation import Cluster, ClusterConfig, NodeConfig
from shoal.simulation.arrivals import Arrivals
from shoal.simulation.fit import Fit, fit
from shoal.simulation.observed import observe
from shoal.simulation.recording import Recording
from shoal.simulation.workloads import MultiTurn

_BASE = find_profile("h100-8b")
_NODES = 2


def unknown(seed: int) -> Profile:
    """Return engines that nobody has told of."""
    factors = np.exp(np.random.default_rng(seed).uniform(-0.7, 0.7, 7)).tolist()
    return msgspec.structs.replace(
        _BASE,
        name="unknown",
        flops_ratio=_BASE.flops_ratio * factors[0],
        flops_per_pair=_BASE.flops_per_pair * factors[1],
        bytes_ratio=_BASE.bytes_ratio * factors[2],
        kv_bytes_per_token=_BASE.kv_bytes_per_token * factors[3],
        overhead_s=_BASE.overhead_s * factors[4],
        sequence_s=1e-5 * factors[5],
        request_s=0.005 * factors[6],
    )


def journal_of(profile: Profile, seed: int, requests: int) -> list[bytes]:
    """Return the journals of a pool of such engines over a swing from quiet to busy."""
    nodes = tuple(NodeConfig(id=f"e{n}", engine=EngineConfig(profile=profile)) for n in range(_NODES))
    config = ClusterConfig(nodes=nodes, seed=seed)
    rng = np.random.default_rng(seed)
    recipe = MultiTurn(sessions=max(1, requests // 4), turns=(3, 5), system_tokens=2_000, say_tokens=(50, 4_000))
    arrivals = Arrivals(kind="diurnal", rate_per_s=0.6 * _NODES, swing=0.9, period_s=120)
    recording = Recording(config)
    Cluster(config, on_step=recording).run(arrivals.spread(recipe.make(rng), rng))
    return recording.files()


def step_errors(found: Profile, truth: Profile) -> dict[str, float]:
    """Return the error of steps such as the traffic makes: of decoding, of prefill, and of both together."""
    ours, theirs = StepTime(found), StepTime(truth)
    errors = {}
    for sequences in (0, 1, 4, 12):
        for new in (0, 250, 1_000, 4_000):
            count, context = sequences + (new > 0), sequences * 4_000
            if count:
                step = {
                    "sequences": count,
                    "tokens": sequences + new,
                    "context_tokens": context + (2_000 if new else 0),
                    "pairs": context + new * (2_000 + new / 2),
                }
                errors[f"{sequences} decoding, {new} of a prompt"] = (
                    ours.seconds(**step) / theirs.seconds(**step) - 1.0  # type: ignore[arg-type]
                )
    return errors


def fitted(seed: int, requests: int) -> tuple[Fit, dict[str, float]]:
    """Return what was found of engines that nobody has told of, and the errors of its steps."""
    truth = unknown(seed)
    pool = observe(journal_of(truth, seed, requests))
    found = fit(list(pool.seen.values()), _BASE)
    return found, step_errors(found.profile, truth)


@bar("twin.fit", "largest error of a step's time, fitted to journals of engines with unknown coefficients",
     at_most=0.05, part=6)  # fmt: skip
def _fit(scale: float) -> Figure:
    runs = [fitted(seed, max(300, round(1_200 * scale))) for seed in range(1, max(2, round(3 * scale)) + 1)]
    worst = [max(errors, key=lambda each: abs(errors[each])) for _, errors in runs]
    values = [abs(errors[name]) for name, (_, errors) in zip(worst, runs, strict=True)]
    details = {
        "worst": worst,
        "medians": [float(np.median(np.abs(list(errors.values())))) for _, errors in runs],
        "e2e_held_out": [found.e2e.median for found, _ in runs],
        "values": values,
    }
    return Figure(value=max(values), details=details)
