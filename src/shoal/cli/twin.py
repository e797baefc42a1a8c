"""`shoal twin`: the router in virtual time over a model of the fleet, to try a policy before it is deployed.

Owns the verbs `run` and `compare` and the files that they write; other verbs have modules of their own, and the twin
itself is `shoal.simulation`.
"""

import argparse
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import flags, twin_fit, twin_replay, twin_size
from shoal.kernel import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.cli.twin_jobs import Job, Work
    from shoal.report import Document
    from shoal.simulation import Run

_EXAMPLES = """\
examples:
  shoal twin run examples/twin/agents.yaml
  shoal twin run examples/twin/agents.yaml --seed 1 --report agents.html --parquet agents/
  shoal twin run examples/twin/agents.yaml --load 16,32,64,128 --jobs 2 --report sweep.html
  shoal twin compare examples/twin/agents.yaml --policy default --policy examples/policies/round-robin.yaml
  shoal twin compare examples/twin/chats.yaml --load 10,20 --policy default --policy mine.yaml --report mine.html
  shoal twin compare examples/twin/agents.yaml --seed 1 --policy default --reference
  shoal twin size --slo ttft_p99=1.5s examples/twin/agents.yaml
  shoal twin replay /var/lib/shoal/journal --config new.yaml
  shoal twin fit /var/lib/shoal/journal --out our-gpu.yaml
"""
DEFAULT = "default"
TRIALS = 500
_INTERRUPTED = 130


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "twin",
        help="try policies, fleets and recorded days in virtual time",
        description="Run the very router in virtual time over a model of the fleet.  What is modelled and what is not\n"
        "stands in docs/twin.md.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    run_parser = verbs.add_parser(
        "run",
        help="run one experiment",
        description="Run one experiment, once per seed.",
        epilog=flags.examples_of(_EXAMPLES, "shoal twin run"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare = verbs.add_parser(
        "compare",
        help="run several policies on the same arrivals",
        description="Run several policies on the same arrivals, once per seed, and show them side by side.",
        epilog=flags.examples_of(_EXAMPLES, "shoal twin compare"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for verb in (run_parser, compare):
        verb.add_argument(
            "experiment", type=Path, metavar="EXPERIMENT", help="fleet, workload and router (docs/twin.md)"
        )
        verb.add_argument(
            "--seed",
            type=flags.seed,
            action="append",
            default=[],
            metavar="N",
            help="instead of the file's (repeatable)",
        )
        verb.add_argument(
            "--load",
            type=_loads,
            default=[],
            metavar="X,Y,...",
            help="run once per load: clients of closed arrivals, sessions/s of others, times the recorded rate of a "
            "trace",
        )
        verb.add_argument(
            "--every-step",
            action="store_true",
            help="where engines are aggregate, run with step-level ones, too, and say how far apart the figures are",
        )
        verb.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time (1)")
        verb.add_argument("--report", type=Path, metavar="FILE", help="write one page of HTML with plots there")
        verb.add_argument("--json", type=Path, metavar="FILE", help="write every figure of every run there")
        verb.add_argument(
            "--parquet", type=Path, metavar="DIR", help="write every request and every look at an endpoint there"
        )
    compare.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="FILE",
        help=f"a router's configuration, or `{DEFAULT}` (repeatable; the first is what others are compared with)",
    )
    compare.add_argument(
        "--reference",
        action="store_true",
        help="search with everything known beforehand for how good any policy could be, and show the regret of each",
    )
    compare.add_argument(
        "--trials", type=_count, default=TRIALS, metavar="N", help=f"runs of the search per seed and load ({TRIALS})"
    )
    twin_fit.add_parser(verbs)
    twin_replay.add_parser(verbs)
    twin_size.add_parser(verbs)
    run_parser.set_defaults(run=_run, policy=[], reference=False)
    compare.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Run all jobs; returns 0, or 130 when somebody interrupted.  Raises ConfigError or InvalidInput."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from shoal.cli.twin_jobs import run_jobs, searches
    from shoal.cli.twin_tables import show
    from shoal.simulation.regret import with_regret

    _check(args)
    document, jobs = _planned(args)
    # A pipe has no width of its own.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    with Progress(TextColumn("simulating"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"),
                  TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:  # fmt: skip
        task = progress.add_task("", total=document.planned)

        def carried_out(work: "Sequence[Work]", before: "Sequence[Run]") -> "tuple[list[Run], bool]":
            ended = sum(len(run.requests) for run in before)

            def told(runs: float, requests: int) -> None:
                number = min(document.planned, len(before) + int(runs) + 1)
                said = f"run {number} of {document.planned}, {ended + requests:,} requests"
                progress.update(task, completed=len(before) + runs, description=said)

            return run_jobs(work, args.jobs, told)

        runs, is_cut = carried_out(jobs, [])
        if args.reference and not is_cut:
            found, is_cut = carried_out(searches(jobs, runs, args.trials), runs)
            order = [*document.loads, None]
            runs = sorted(with_regret([*runs, *found]), key=lambda run: order.index(run.load))
    if runs:
        # Files first: what reads the tables may close the pipe.
        _write(args, document, runs)
        show(console, runs, document.load_unit)
    if is_cut:
        whole = sum(not run.result.is_partial for run in runs)
        print(
            f"shoal: interrupted: {whole} of {document.planned} runs were done, {len(runs) - whole} in part"
            + ("; figures are of those that were done" if whole else "; figures are of what had ended" * bool(runs)),
            file=sys.stderr,
        )
        return _INTERRUPTED
    return 0


def _planned(args: argparse.Namespace) -> "tuple[Document, list[Job]]":
    """Return what is to be run; everything is read and checked here, before the first run."""
    from shoal.cli.twin_files import beside, experiment_of, read_text
    from shoal.cli.twin_jobs import Job
    from shoal.report import Document, about
    from shoal.routing.config import load
    from shoal.simulation.experiment import at_load, load_unit
    from shoal.simulation.handover import Role

    text = read_text(args.experiment)
    experiment = experiment_of(text, args.experiment)
    policies = {}
    for name in args.policy or [experiment.router.config or DEFAULT]:
        path = beside(args.experiment, name)
        policies[name] = "" if name == DEFAULT else read_text(path)
        load(policies[name], str(path))
    for each in args.load:
        at_load(experiment, each)
    if args.reference and any(group.role is not Role.BOTH for group in experiment.fleet):
        raise ConfigError("places requests and no prefills; leave it out for engines with roles", source="--reference")
    seeds = tuple(dict.fromkeys(args.seed or experiment.seeds))
    texts = dict.fromkeys(policies, text)
    if args.every_step:
        if all(group.mode == "step" for group in experiment.fleet):
            raise ConfigError("no engines of the fleet have mode: aggregate", source="--every-step")
        exact = {f"{name}, every step": router for name, router in policies.items()}
        texts |= dict.fromkeys(exact, _step_by_step(text))
        policies = {name: router for pair in zip(exact.items(), policies.items(), strict=True) for name, router in pair}
    jobs = [
        Job(name, str(args.experiment), texts[name], router, seed, each)
        for each in args.load or [None]
        for name, router in policies.items()
        for seed in seeds
    ]
    document = Document(
        experiment=experiment,
        policies=policies,
        seeds=seeds,
        loads=tuple(args.load),
        load_unit=load_unit(experiment),
        command=shlex.join(["shoal", *sys.argv[1:]]),
        planned=len(jobs) + (len(seeds) * max(1, len(args.load)) if args.reference else 0),
        trials=args.trials if args.reference else 0,
        versions=about(),
    )
    return document, jobs


def _step_by_step(text: str) -> str:
    """Return the text of an experiment with step-level engines only."""
    import yaml

    document = yaml.safe_load(text)
    for group in document["fleet"]:
        group.pop("mode", None)
    return yaml.safe_dump(document, sort_keys=False)


def _check(args: argparse.Namespace) -> None:
    if args.reference and args.every_step:
        raise ConfigError("is of one kind of engines; leave --every-step out", source="--reference")
    if args.jobs < 1:
        raise ConfigError("must be at least 1", source="--jobs")
    for path in (args.json, args.report):
        flags.check_report(path)
    if args.parquet is not None:
        from shoal.report.tables import check_parquet

        check_parquet()
        if args.parquet.exists() and not args.parquet.is_dir():
            raise ConfigError("is a file; name a directory", source=str(args.parquet))


def _write(args: argparse.Namespace, document: "Document", runs: "list[Run]") -> None:
    from shoal.report import as_html, as_json, parquet

    if args.json:
        flags.write_report(args.json, as_json(document, runs))
    if args.report:
        flags.write_report(args.report, as_html(document, runs).encode())
    if args.parquet:
        try:
            args.parquet.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot be made: {error.strerror}", source=str(args.parquet)) from None
        for name, data in parquet(runs).items():
            flags.write_report(args.parquet / f"{name}.parquet", data)


def _count(text: str) -> int:
    """Read a count.  Raises ArgumentTypeError."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def _loads(text: str) -> list[float]:
    """Read `8,16,32`.  Raises ArgumentTypeError."""
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        loads = [math.nan]
    if not all(0 < load < math.inf for load in loads):
        raise argparse.ArgumentTypeError(f"must be numbers above 0 with commas between them, not {text!r}")
    return list(dict.fromkeys(loads))
