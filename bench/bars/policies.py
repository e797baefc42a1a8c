"""The default profile beside the policies of other routers, on the half of the traffic that nothing was tuned on.

The workloads and their table are `bench.policies`', and docs/policies.md has what it says.  Recorded traffic counts
where its traces are in the working directory.  Virtual time: figures are the same on every machine.
"""

import functools

from bench import policies
from bench.bars.registry import Figure, bar
from bench.policies import REPORTING, Found, means

_TRIALS = 100
# At a smaller scale only those that need no trace.
_QUICK = ("agents", "chats", "zipf", "hot", "mixed", "rollouts")


def _workloads(scale: float) -> list[str]:
    return [name for name in (policies.WORKLOADS if scale >= 1.0 else _QUICK) if policies.is_there(name)]


@functools.cache
def _compared(scale: float) -> list[Found]:
    seeds = REPORTING[: max(1, round(scale * len(REPORTING)))]
    return [policies.measure(name, seeds, 0, 1, is_tuning=False) for name in _workloads(scale)]


@bar("policies.mean", "the default profile's mean of normalised p50 and p95 of ttft over that of the best other policy",
     at_most=1.0, part=6)  # fmt: skip
def _mean(scale: float) -> Figure:
    found = _compared(scale)
    by_policy = means(found)
    best = min((name for name in by_policy if name != "default"), key=by_policy.__getitem__)
    details = {"best_other": best, "means": by_policy, "workloads": [each.workload for each in found]}
    return Figure(value=by_policy["default"] / by_policy[best], why=best, details=details)


@bar("policies.worst", "workloads' p50 and p95 of ttft in which the default profile is the worst of all",
     at_most=0, part=6)  # fmt: skip
def _worst(scale: float) -> Figure:
    found = _compared(scale)
    lost = policies.lost(found)
    return Figure(value=len(lost), why=", ".join(lost), details={"workloads": [each.workload for each in found]})


@bar("policies.regret", "how far the default profile's ttft is above the clairvoyant reference's, the worst workload",
     at_most=0.25, part=6)  # fmt: skip
def _regret(scale: float) -> Figure:
    """One seed.  A shorter search finds a worse reference, so at a smaller scale the regret seems lower."""
    trials = max(2, round(scale * _TRIALS))
    found = {}
    for name in _workloads(scale):
        outcome = policies.measure(name, REPORTING[:1], trials, 1, is_tuning=False).outcomes["default"]
        found[name] = outcome.regret or 0.0
    worst = max(found, key=found.__getitem__)
    return Figure(value=found[worst], why=worst, details={"trials": trials, **found})
