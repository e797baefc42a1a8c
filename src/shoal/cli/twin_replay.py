"""`shoal twin replay`: a recorded day of the real pool under another configuration.

Owns the verb and what it prints; the replay itself is `simulation.replay`.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shoal.cli import flags
from shoal.cli.twin_fit import add_inputs
from shoal.kernel import ConfigError

if TYPE_CHECKING:
    from shoal.simulation import Result
    from shoal.simulation.replay import Day, Moves

__all__ = ["add_parser"]

_EXAMPLES = """\
examples:
  shoal twin replay /var/lib/shoal/journal                        how near the twin is to what was recorded
  shoal twin replay journal/ --config new.yaml                    what another configuration would have changed
  shoal twin replay journal/ --config new.yaml --profile ours.yaml --json found.json
"""
_DEFAULT = "default"
_RECORDED, _SAME = "recorded", "twin, as recorded"


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "replay",
        help="run a recorded day of the real pool under another configuration",
        description="Read journals of a pool, run their day in the twin under the configuration that it had, and then\n"
        "under others, and say what would have changed.  Engines are fitted to the same journals unless --profile\n"
        "names what they are.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_inputs(parser, "+")
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE",
        help=f"a router's configuration, or `{_DEFAULT}` (repeatable)",
    )  # fmt: skip
    parser.add_argument("--profile", metavar="NAME|FILE", help="what the engines are, instead of fitting them")
    parser.add_argument("--seed", type=flags.seed, default=1, metavar="N", help="of what is left to chance (1)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Replay; 0.  Raises ConfigError or InvalidInput."""
    import msgspec

    from shoal.cli.profiles import profile_named
    from shoal.cli.twin_files import read_journal_files, read_text
    from shoal.cli.twin_fit import check_scipy, fitted, show_fit
    from shoal.routing.config import load
    from shoal.simulation.replay import as_recorded, day_of, moves, nodes_of, play

    flags.check_report(args.json)
    for name in args.config:
        if name in (_RECORDED, _SAME):
            raise ConfigError(f"a row of the table has the name {name!r}; write ./{name}", source="--config")
    configs = {name: "" if name == _DEFAULT else read_text(Path(name)) for name in args.config}
    for name, text in configs.items():
        load(text, name)
    profile = profile_named(args.profile or args.base, "--profile" if args.profile else "--base")
    if not args.profile:
        check_scipy()
    day = day_of(read_journal_files(args.journal))
    console = Console() if sys.stdout.isatty() else Console(width=140)
    factors: dict[str, float] = {}
    if not args.profile:
        found = fitted(console, day.machines, profile, 1_500)
        show_fit(console, found)
        console.print()
        profile, factors = found.profile, found.factors
    nodes = nodes_of(day, profile, factors)
    results = {_RECORDED: as_recorded(day)}
    described = TextColumn("{task.description}", markup=False)
    with Progress(TextColumn("simulating"), BarColumn(), TaskProgressColumn(), described,
                  TimeElapsedColumn(), console=console, transient=True) as bar:  # fmt: skip
        for name, text in {_SAME: day.pool.config, **configs}.items():
            task = bar.add_task(name, total=1.0)
            results[name] = play(
                day, nodes, text, seed=args.seed,
                progress=lambda _, share, task=task: bar.update(task, completed=share),  # type: ignore[misc]
            )  # fmt: skip
    moved = {name: moves(results[_SAME][1], results[name][1]) for name in configs}
    if args.json:
        document = {
            "format": "shoal-twin-replay/1",
            "profile": profile,
            "runs": {name: result for name, (result, _) in results.items()},
            "moves": moved,
        }
        flags.write_report(args.json, msgspec.json.format(msgspec.json.encode(document)))
    _show(console, day, {name: result for name, (result, _) in results.items()}, moved)
    return 0


def _show(console: Console, day: "Day", results: "dict[str, Result]", moved: "dict[str, Moves]") -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("RUN", overflow="fold")
    names = ("requests", "failed", "TTFT p50 ms", "TTFT p95 ms", "e2e p95 s", "hit %", "imbalance")
    for name in names:
        table.add_column(name, justify="right")
    for name, result in results.items():
        table.add_row(Text(name), *_row(result))
    console.print(table)
    recorded, same = results[_RECORDED], results[_SAME]
    gaps = [
        f"{name} {(there / here - 1) * 100:+.0f} %"
        for name, here, there in (
            ("TTFT p50", recorded.ttft_p50_s, same.ttft_p50_s),
            ("TTFT p95", recorded.ttft_p95_s, same.ttft_p95_s),
            ("e2e p95", recorded.e2e_p95_s, same.e2e_p95_s),
        )
        if here
    ]
    points = (same.hit_ratio - recorded.hit_ratio) * 100
    console.print(
        f"The twin is off from what was recorded by: {', '.join(gaps)}, hit ratio {points:+.1f} points.  Believe "
        "differences between configurations that are larger than that.",
        highlight=False,
    )
    for name, each in moved.items():
        share = 100 / max(1, each.compared)
        console.print(
            f"{name}: of {each.compared:,} requests {each.elsewhere * share:.0f} % would have gone elsewhere, "
            f"{each.warmer * share:.0f} % found more in a cache and {each.colder * share:.0f} % less; tokens of "
            f"prompts to compute {(each.computed_ratio - 1) * 100:+.0f} %.",
            markup=False, highlight=False,
        )  # fmt: skip
    if len(day.pool.seen) > len(day.machines):
        console.print(f"{len(day.pool.seen) - len(day.machines)} endpoints never were ready and are left out.")


def _row(result: "Result") -> list[str]:
    return [
        f"{result.requests:,}",
        f"{result.failed:,}",
        f"{result.ttft_p50_s * 1e3:,.0f}",
        f"{result.ttft_p95_s * 1e3:,.0f}",
        f"{result.e2e_p95_s:,.2f}",
        f"{result.hit_ratio * 100:.1f}",
        f"{result.imbalance:.2f}",
    ]
