"""`python -m bench.policies`: the policies of other routers beside the default profile, as docs/policies.md has them.

Every policy gets the same arrivals in the twin.  What the default profile was chosen and tuned on has seeds below 100
and the beginning of each trace, as TUNING and the experiments have; figures are of the other half, REPORTING, unless
--tuning asks for the first.  Traces are read from the working directory; workloads whose trace is not there are left
out, and that is said.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from shoal.cli.twin_files import beside
from shoal.cli.twin_jobs import Job, run_jobs, searches
from shoal.report import short
from shoal.simulation import Run
from shoal.simulation.regret import REFERENCE, with_regret

ROOT = Path(__file__).parents[1]
WORKLOADS = ("agents", "chats", "zipf", "hot", "mixed", "rollouts", "mooncake", "claude-code")
POLICIES = ("default", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples/policies").glob("*.yaml")))
TUNING = (1, 2, 3)
REPORTING = (101, 102, 103)
# A figure that near the best one is as good.
_NEAR = 0.02


class Outcome(msgspec.Struct, frozen=True):
    """A policy on a workload, means over the seeds.  regret: 0.1 for a tenth, None when nobody searched."""

    p50_s: float
    p95_s: float
    failed: float
    regret: float | None


class Found(msgspec.Struct, frozen=True):
    """A workload.  requests: of a run.  outcomes: by policy, with the reference where there is one."""

    workload: str
    seeds: tuple[int, ...]
    trials: int
    requests: int
    outcomes: dict[str, Outcome]


def measure(workload: str, seeds: Sequence[int], trials: int, at_once: int, *, is_tuning: bool) -> Found:
    """Run all policies on a workload.  trials: of the search for the reference, 0 for none.  Ctrl-C ends it."""
    path = ROOT / f"examples/twin/{workload}.yaml"
    text = path.read_text() if is_tuning else held_out(path.read_text())
    configs = {name: "" if name == "default" else (ROOT / name).read_text() for name in POLICIES}
    jobs = [Job(name, str(path), text, router, seed) for name, router in configs.items() for seed in seeds]
    runs, is_cut = run_jobs(jobs, at_once, _told(workload, "policies", len(jobs)))
    if trials and not is_cut:
        wanted = searches(jobs, runs, trials)
        found, is_cut = run_jobs(wanted, at_once, _told(workload, "searches", len(wanted)))
        runs = with_regret([*runs, *found])
    if is_cut:
        raise KeyboardInterrupt
    names = dict.fromkeys(run.policy for run in runs)
    outcomes = {short(name): _outcome([run for run in runs if run.policy == name]) for name in names}
    return Found(workload, tuple(seeds), trials, runs[0].result.requests, outcomes)


def held_out(text: str) -> str:
    """Return an experiment on the other half: behind what its trace is limited to, another as much."""
    document = yaml.safe_load(text)
    if document["workload"]["shape"] == "trace":
        document["workload"]["skip"] = document["workload"]["limit"]
    return yaml.safe_dump(document, sort_keys=False)


def is_there(workload: str) -> bool:
    """Whether a workload needs no trace, or has it."""
    path = ROOT / f"examples/twin/{workload}.yaml"
    named = yaml.safe_load(path.read_text())["workload"].get("path")
    return named is None or beside(path, named).exists()


def compared(found: Sequence[Found]) -> list[str]:
    """Return the table of all policies: p50 / p95 of each workload, and the mean of them over the best ones."""
    rows = {name: [name] for name in _policies(found)}
    for each in found:
        best = _best(each)
        for name in rows:
            outcome = each.outcomes[name]
            own = (outcome.p50_s, outcome.p95_s)
            shown = [_time(value, value <= (1 + _NEAR) * least) for value, least in zip(own, best, strict=True)]
            rows[name].append(" / ".join(shown) + (f", {outcome.failed:g} failed" if outcome.failed else ""))
    for name, mean in means(found).items():
        rows[name].append(f"{mean:.2f}")
    return _markdown(["policy", *(each.workload for each in found), "mean"], list(rows.values()))


def means(found: Sequence[Found]) -> dict[str, float]:
    """Return each policy's mean of its p50 and p95 on all workloads, each over the best policy's."""
    over: dict[str, list[float]] = {name: [] for name in _policies(found)}
    for each in found:
        for name in over:
            outcome = each.outcomes[name]
            over[name] += [
                value / least for value, least in zip((outcome.p50_s, outcome.p95_s), _best(each), strict=True)
            ]
    return {name: float(np.mean(ratios)) for name, ratios in over.items()}


def lost(found: Sequence[Found], policy: str = "default") -> list[str]:
    """Return in which figures a policy is the worst of all, as "hot p95"."""
    worst = []
    for each in found:
        for shown, key in (("p50", "p50_s"), ("p95", "p95_s")):
            others = [getattr(each.outcomes[name], key) for name in _policies(found) if name != policy]
            if getattr(each.outcomes[policy], key) > max(others):
                worst.append(f"{each.workload} {shown}")
    return worst


def regrets(found: Sequence[Found]) -> list[str]:
    """Return the table of regrets: the default profile's, and that of the best policy of each workload."""
    rows = []
    for each in found:
        known = {name: outcome.regret for name, outcome in each.outcomes.items() if outcome.regret is not None}
        policies = {name: regret for name, regret in known.items() if name != REFERENCE}
        if not policies:
            continue
        best, reference = min(policies, key=policies.__getitem__), each.outcomes[REFERENCE]
        rows.append([
            each.workload, f"{each.requests:,}", f"{len(each.seeds)} x {each.trials}",
            f"{_time(reference.p50_s)} / {_time(reference.p95_s)}", f"{policies['default'] * 100:,.0f} %",
            f"{policies[best] * 100:,.0f} % ({best})",
        ])  # fmt: skip
    titles = ["workload", "requests", "seeds x trials", "reference, p50 / p95", "regret of default", "lowest regret"]
    return _markdown(titles, rows) if rows else []


def _policies(found: Sequence[Found]) -> list[str]:
    return [name for name in found[0].outcomes if name != REFERENCE]


def _best(found: Found) -> tuple[float, float]:
    """The lowest p50 and p95 that any policy has on a workload."""
    outcomes = [outcome for name, outcome in found.outcomes.items() if name != REFERENCE]
    return min(outcome.p50_s for outcome in outcomes), min(outcome.p95_s for outcome in outcomes)


def _outcome(runs: Sequence[Run]) -> Outcome:
    results = [run.result for run in runs]
    known = [result.regret_ratio for result in results if result.regret_ratio is not None]
    return Outcome(
        float(np.mean([result.ttft_p50_s for result in results])),
        float(np.mean([result.ttft_p95_s for result in results])),
        float(np.mean([result.failed for result in results])),
        float(np.mean(known)) if known else None,
    )


def _time(value_s: float, is_best: bool = False) -> str:
    shown = f"{value_s * 1e3:,.0f}" if value_s < 10 else f"{value_s:,.0f} s"
    return f"**{shown}**" if is_best else shown


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _told(workload: str, what: str, total: int) -> Any:
    last = [-1]

    def told(done: float, requests: int) -> None:
        if int(done) != last[0]:
            last[0] = int(done)
            print(f"{workload}: {int(done)} of {total} {what}", file=sys.stderr, flush=True)

    return told


def main() -> int:
    """Run the workloads and print both tables as Markdown; returns 0, or 130 when somebody interrupted."""
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description=__doc__.split("\n\n")[1])
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="only this one (repeatable)")
    parser.add_argument("--tuning", action="store_true", help="on the half that the default profile was tuned on")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="how many (3)")
    parser.add_argument("--trials", type=int, default=0, metavar="N", help="search for the reference, print regrets")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time (1)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep them there; what is there is not run again")
    args = parser.parse_args()
    first = (TUNING if args.tuning else REPORTING)[0]
    seeds = tuple(range(first, first + args.seeds))
    kept = args.results.read_bytes().splitlines() if args.results and args.results.exists() else []
    results = {found.workload: found for found in (msgspec.json.decode(line, type=Found) for line in kept)}
    for workload in args.workload or WORKLOADS:
        if workload in results:
            continue
        if not is_there(workload):
            print(f"{workload}: its trace is not here, see examples/twin/{workload}.yaml", file=sys.stderr)
            continue
        try:
            results[workload] = measure(workload, seeds, args.trials, args.jobs, is_tuning=args.tuning)
        except KeyboardInterrupt:
            return 130
        if args.results:
            with args.results.open("ab") as file:
                file.write(msgspec.json.encode(results[workload]) + b"\n")
    found = [results[workload] for workload in WORKLOADS if workload in results]
    for table in (compared(found), regrets(found)) if found else ():
        if table:
            print("\n".join([*table, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
