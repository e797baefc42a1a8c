"""`shoal twin`: the router in virtual time over a model of the fleet, to try a policy before it is deployed.

Owns the verbs and what they print; the twin itself is `shoal.simulation`.
"""

import argparse
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from shoal.cli import flags
from shoal.kernel import ConfigError, InvalidInput

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.simulation import Experiment, Result, Session
    from shoal.simulation.experiment import Trace

_EXAMPLES = """\
examples:
  shoal twin run examples/twin/agents.yaml
  shoal twin run examples/twin/agents.yaml --seed 1 --json result.json
  shoal twin compare examples/twin/agents.yaml --policy default --policy examples/policies/round-robin.yaml
"""
# A trace is read whole.
MAX_TRACE_BYTES = 2 << 30
DEFAULT = "default"


class Job(NamedTuple):
    """One run of one policy with one seed.  source: of the experiment.  router: text of its configuration."""

    policy: str
    source: str
    text: str
    router: str
    seed: int


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "twin",
        help="try a policy in virtual time before it is deployed",
        description="Run the very router in virtual time over a model of the fleet.  What is modelled and what is not "
        "stands in docs/twin.md.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    run_parser = verbs.add_parser("run", help="run one experiment", description="Run one experiment, once per seed.")
    compare = verbs.add_parser(
        "compare",
        help="run several policies on the same arrivals",
        description="Run several policies on the same arrivals, once per seed, and show them side by side.",
    )
    for verb in (run_parser, compare):
        verb.add_argument("experiment", type=Path, help="fleet, workload and router (docs/twin.md)")
        verb.add_argument(
            "--seed", type=flags.seed, action="append", default=[], help="instead of the file's (repeatable)"
        )
        verb.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time (1)")
        verb.add_argument("--json", type=Path, metavar="FILE", help="write every figure of every run there")
    compare.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="FILE",
        help=f"a router's configuration, or `{DEFAULT}` (repeatable; the first is what others are compared with)",
    )
    run_parser.set_defaults(run=_run, policy=[])
    compare.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Run all jobs; returns 0.  Raises ConfigError or InvalidInput."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeElapsedColumn

    from shoal.simulation import read_experiment

    if args.jobs < 1:
        raise ConfigError("must be at least 1", source="--jobs")
    flags.check_report(args.json)
    text = _text(args.experiment)
    experiment = read_experiment(text, str(args.experiment))
    given = args.policy or [experiment.router.config or DEFAULT]
    policies = {name: "" if name == DEFAULT else _text(_beside(args.experiment, name)) for name in given}
    seeds = args.seed or list(experiment.seeds)
    jobs = [Job(name, str(args.experiment), text, router, seed) for name, router in policies.items() for seed in seeds]
    # A pipe has no width of its own.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    results: dict[str, list[Result]] = {name: [] for name in policies}
    with Progress("{task.description}", BarColumn(), "{task.completed} of {task.total} runs", TimeElapsedColumn(),
                  console=console, transient=True) as progress:  # fmt: skip
        task = progress.add_task("simulating", total=len(jobs))
        for job, result in zip(jobs, _carried_out(jobs, args.jobs), strict=True):
            results[job.policy].append(result)
            progress.advance(task)
    console.print(_table(results))
    if args.json:
        plain = {name: [msgspec.to_builtins(each) for each in each_seed] for name, each_seed in results.items()}
        report = msgspec.json.format(msgspec.json.encode({"seeds": seeds, "results": plain})) + b"\n"
        flags.write_report(args.json, report)
    return 0


def _carried_out(jobs: list[Job], at_once: int) -> "list[Result] | map[Result]":
    if at_once == 1:
        return map(_one, jobs)
    with ProcessPoolExecutor(at_once) as pool:
        return list(pool.map(_one, jobs))


def _one(job: Job) -> "Result":
    from shoal.simulation import read_experiment, run_experiment

    experiment = read_experiment(job.text, job.source)
    return run_experiment(experiment, job.seed, router=job.router, sessions=_sessions(experiment, Path(job.source)))[0]


def _sessions(experiment: "Experiment", source: Path) -> "list[Session] | None":
    """Read the trace of an experiment; None when it has none.  Its path is seen from the experiment's file."""
    from shoal.simulation.experiment import Trace, sessions_of

    trace = experiment.workload
    if not isinstance(trace, Trace):
        return None
    path = _beside(source, trace.path)
    try:
        return sessions_of(trace, _trace_files(path, trace))
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error


def _trace_files(path: Path, trace: "Trace") -> list[bytes]:
    """Read a trace: one file, or all of a folder or of an archive.  Raises ConfigError or InvalidInput."""
    suffix = {"claude-code": ".json", "journal": ".journal"}.get(trace.format, "")
    limit = trace.limit if trace.format == "claude-code" else 0
    try:
        if path.is_dir() and suffix:
            found = sorted(each for each in path.iterdir() if each.name.endswith(suffix))[: limit or None]
            if not found:
                raise ConfigError(f"has no file that ends in {suffix}", source=str(path))
            return [_bounded(each) for each in found]
        if suffix == ".json" and tarfile.is_tarfile(path):
            return _packed(path, suffix, limit)
        return [_bounded(path)]
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path)) from None


def _bounded(path: Path) -> bytes:
    if path.stat().st_size > MAX_TRACE_BYTES:
        raise InvalidInput(f"{path} is larger than {MAX_TRACE_BYTES} bytes")
    return path.read_bytes()


def _packed(path: Path, suffix: str, limit: int) -> list[bytes]:
    """Read the files of an archive in their order, without unpacking it to the disk."""
    files: list[bytes] = []
    left = MAX_TRACE_BYTES
    with tarfile.open(path) as archive:
        for member in archive:
            if limit and len(files) >= limit:
                break
            if member.isfile() and member.name.endswith(suffix):
                left -= member.size
                if left < 0:
                    raise InvalidInput(f"{path} unpacks to more than {MAX_TRACE_BYTES} bytes; set `limit`")
                opened = archive.extractfile(member)
                if opened is not None:
                    files.append(opened.read())
    return files


_COLUMNS: dict[str, "Callable[[Result], float]"] = {
    "TTFT p50 ms": lambda result: result.ttft_p50_s * 1e3,
    "TTFT p95 ms": lambda result: result.ttft_p95_s * 1e3,
    "TPOT p50 ms": lambda result: result.tpot_p50_s * 1e3,
    "e2e p95 s": lambda result: result.e2e_p95_s,
    "hit %": lambda result: result.hit_ratio * 100,
    "imbalance": lambda result: result.imbalance,
    "tokens/s": lambda result: result.output_tokens_per_s,
    "failed": lambda result: float(result.failed),
}


def _table(results: "dict[str, list[Result]]") -> "Table":
    """Every policy with the mean over its seeds, and half the width of its 95 % interval where there are several."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("POLICY")
    for name in ("requests", *_COLUMNS):
        table.add_column(name, justify="right")
    for policy, runs in results.items():
        row = [f"{sum(run.requests for run in runs):,}"]
        row += [_shown([read(run) for run in runs]) for read in _COLUMNS.values()]
        table.add_row(policy, *row)
    return table


def _shown(values: list[float]) -> str:
    import numpy as np

    mean = float(np.mean(values))
    shown = f"{mean:,.0f}" if abs(mean) >= 100 else f"{mean:.2f}"
    if len(values) < 2:
        return shown
    half = _T_95.get(len(values), 1.96) * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return f"{shown} ±{half:,.0f}" if abs(mean) >= 100 else f"{shown} ±{half:.2f}"


# Student's t for a two-sided 95 % interval of the mean of n values.
_T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def _beside(source: Path, name: str) -> Path:
    """A path as the user gives it, or as it stands in a file: seen from the working directory, else from that file."""
    path = Path(name)
    return path if path.is_absolute() or path.exists() else source.parent / path


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path)) from None
