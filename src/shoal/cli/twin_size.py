"""`shoal twin size`: how many engines of which kind, split how, and which configuration, meet an SLO cheapest.

Owns the verb and what it prints; the search is `simulation.size`.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shoal.cli import flags
from shoal.kernel import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shoal.simulation import Experiment
    from shoal.simulation.size import Search, Slo

__all__ = ["add_parser"]

_EXAMPLES = """\
examples:
  shoal twin size --slo ttft_p99=1.5s examples/twin/agents.yaml
  shoal twin size --slo ttft_p95=800ms --slo tpot_p95=50ms --policy default --policy new.yaml --jobs 2 fleet.yaml

Each group of the fleet is a kind of engine to choose; its count is what is looked for.  Groups of role prefill and
decode are looked for together, with the cheapest split.
"""
_DEFAULT = "default"
_INTERRUPTED = 130
_MOST = 2_000


class _Candidate(NamedTuple):
    """A kind of fleet under a policy.  groups: their places in the experiment's.  profile: in words.  has_cost: whether
    what an engine costs is known."""

    groups: tuple[int, ...]
    profile: str
    policy: str
    has_cost: bool
    search: "Search"


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "size",
        help="find the cheapest fleet that meets an SLO",
        description="Find for each group of an experiment's fleet, each pair of groups of which one prefills and one\n"
        "decodes, and each policy, how few engines meet an SLO with every seed, and which fleet is cheapest by the\n"
        "groups' cost_per_hour.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT", help="fleet, workload and router (docs/twin.md)")
    parser.add_argument(
        "--slo", type=_slo, action="append", required=True, metavar="FIGURE=TIME",
        help="as ttft_p99=1.5s, tpot_p95=50ms or e2e_p95=20s (repeatable; all are to be met)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", action="append", default=[], metavar="FILE",
        help=f"a router's configuration, or `{_DEFAULT}` (repeatable; the experiment's)",
    )  # fmt: skip
    parser.add_argument("--most", type=int, default=64, metavar="N", help="largest count to try of a group (64)")
    parser.add_argument(
        "--seed", type=flags.seed, action="append", default=[], metavar="N", help="instead of the file's"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was tried there")
    parser.set_defaults(run=_run)


def _slo(text: str) -> "Slo":
    """Read `ttft_p99=1.5s`.  Raises ArgumentTypeError."""
    from shoal.simulation.size import FIGURES, Slo

    name, _, limit = text.partition("=")
    if name not in FIGURES:
        raise argparse.ArgumentTypeError(f"{name!r} is no figure; there are {', '.join(FIGURES)}")
    return Slo(name, flags.seconds(limit))


def _run(args: argparse.Namespace) -> int:
    """Search; 0 when a fleet meets the SLO, 1 when none does, 130 when interrupted.  Raises ConfigError."""
    import msgspec

    from shoal.cli.twin_files import beside, experiment_of, read_text
    from shoal.cli.twin_jobs import Job, run_jobs
    from shoal.routing.config import load
    from shoal.simulation.size import Search, check_sizable, kinds, named, sized

    flags.check_report(args.json)
    for name in ("most", "jobs"):
        if getattr(args, name) < 1:
            raise ConfigError("must be at least 1", source=f"--{name}")
    if args.most > _MOST:
        raise ConfigError(f"must be at most {_MOST:,}", source="--most")
    experiment = experiment_of(read_text(args.experiment), args.experiment)
    check_sizable(experiment, str(args.experiment))
    configs = {}
    for name in args.policy or [experiment.router.config or _DEFAULT]:
        path = beside(args.experiment, name)
        configs[name] = "" if name == _DEFAULT else read_text(path)
        load(configs[name], str(path))
    seeds = tuple(dict.fromkeys(args.seed or experiment.seeds))
    candidates = [
        _Candidate(
            groups,
            named(experiment, groups),
            policy,
            all(costs),
            Search(args.slo, args.most, costs if all(costs) else (1.0,)),
        )
        for groups, costs in _costs(experiment, kinds(experiment))
        for policy in configs
    ]
    console = Console() if sys.stdout.isatty() else Console(width=140)
    with Progress(TextColumn("sizing"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
                  console=console, transient=True) as bar:  # fmt: skip
        task = bar.add_task("")
        tried = 0
        while probes := [(each, counts) for each in candidates if (counts := each.search.next()) is not None]:
            jobs = [
                Job(each.policy, str(args.experiment),
                    msgspec.json.encode(sized(experiment, each.groups, counts)).decode(), configs[each.policy], seed)
                for each, counts in probes
                for seed in seeds
            ]  # fmt: skip
            bar.update(task, total=tried + len(jobs), description=f"{tried} runs done, {len(jobs)} in this round")
            runs, is_cut = run_jobs(
                jobs, args.jobs, lambda done, _, before=tried: bar.update(task, completed=before + done)  # type: ignore[misc]
            )  # fmt: skip
            if is_cut:
                print("shoal: interrupted before the search was over", file=sys.stderr)
                return _INTERRUPTED
            tried += len(jobs)
            for place, (each, counts) in enumerate(probes):
                mine = runs[place * len(seeds) : (place + 1) * len(seeds)]
                each.search.tell(counts, [run.result for run in mine])
    best = _best(candidates)
    if args.json:
        flags.write_report(args.json, msgspec.json.format(msgspec.json.encode(_document(candidates, args.slo, best))))
    _show(console, candidates, args.slo, best)
    return 0 if best is not None else 1


def _costs(
    experiment: "Experiment", fleets: list[tuple[int, ...]]
) -> "Iterator[tuple[tuple[int, ...], tuple[float, ...]]]":
    """Yield each kind of fleet with what an engine of each of its groups costs, 0 when that is not known."""
    for groups in fleets:
        yield groups, tuple(experiment.fleet[place].cost_per_hour for place in groups)


def _cost(each: _Candidate) -> float:
    return each.search.cost(each.search.found) if each.search.found is not None else 0.0


def _best(candidates: list[_Candidate]) -> _Candidate | None:
    return min((each for each in candidates if each.search.found is not None), key=_cost, default=None)


def _show(console: Console, candidates: list[_Candidate], slos: "list[Slo]", best: _Candidate | None) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("PROFILE", "POLICY"):
        table.add_column(name, overflow="fold")
    from shoal.simulation.size import shown

    has_cost = any(each.has_cost for each in candidates)
    for name in ("engines", *(["cost/h"] if has_cost else []), *(f"{slo.figure} s" for slo in slos), "hit %"):
        table.add_column(name, justify="right")
    for each in candidates:
        found = each.search.found
        results = each.search.tried[found or max(each.search.tried)]
        figures = [f"{slo.of(results):.3g}" for slo in slos]
        hit = sum(result.hit_ratio for result in results) / len(results)
        cost = [f"{_cost(each):,.2f}" if found else ""] if has_cost else []
        style = "bold" if each is best else ""
        names = Text(each.profile), Text(each.policy)
        table.add_row(*names, shown(found) if found else "none", *cost, *figures, f"{hit * 100:.1f}", style=style)
    console.print(table)
    for each in candidates:
        if each.search.found is None:
            console.print(f"{each.profile}, {each.policy}: {each.search.why_none()}.", markup=False, highlight=False)
    if best is not None and best.search.found is not None:
        less = best.search.less()
        said = f"; with {shown(less)} {', '.join(best.search.missed(less))}" if less is not None else ""
        console.print(
            f"Cheapest: {shown(best.search.found)} x {best.profile}, {best.policy}{said}.",
            markup=False,
            highlight=False,
        )
    seeds = len(next(iter(candidates[0].search.tried.values())))
    console.print(f"Figures are the worst of {seeds} seeds." if seeds > 1 else "Figures are of one seed.", style="dim")


def _document(candidates: list[_Candidate], slos: "list[Slo]", best: _Candidate | None) -> dict[str, object]:
    from shoal.simulation.size import shown

    return {
        "format": "shoal-twin-size/1",
        "slos": {slo.figure: slo.limit_s for slo in slos},
        "cheapest": candidates.index(best) if best is not None else None,
        "candidates": [
            {
                "profile": each.profile,
                "policy": each.policy,
                "engines": sum(each.search.found) if each.search.found else None,
                "split": each.search.found,
                "cost_per_hour": _cost(each) if each.search.found and each.has_cost else None,
                "why_none": each.search.why_none() if each.search.found is None else "",
                "tried": {shown(counts): results for counts, results in sorted(each.search.tried.items())},
            }
            for each in candidates
        ],
    }
