"""`shoal twin fit`: find the coefficients of the engine model from what real engines were seen to do.

Owns the verb and what it prints; the fitting is `simulation.fit`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn
from rich.table import Table

from shoal.cli import flags
from shoal.kernel import ConfigError

if TYPE_CHECKING:
    from shoal.engine import Profile
    from shoal.simulation.fit import Fit
    from shoal.simulation.observed import Pool, Seen

__all__ = ["add_parser", "check_scipy", "chosen", "fitted", "read_journals", "show_fit"]

_EXAMPLES = """\
examples:
  shoal twin fit /var/lib/shoal/journal --out our-gpu.yaml
  shoal twin fit journal/ --base h200-70b-tp8 --name ours --out ours.yaml
  shoal twin fit journal/ --endpoint gpu-1 --endpoint gpu-2 --out gpu-1-2.yaml

Then: `profile: our-gpu.yaml` in the fleet of an experiment, or shoal engine --profile our-gpu.yaml
"""
_FELT = 0.5


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "fit",
        help="fit the model of the engine to what real engines did",
        description="Read journals of a pool, find the coefficients with which the model of the engine answers when\n"
        "the real ones did, and say how well it fits later requests.  All endpoints taken must have one model and one\n"
        "kind of hardware.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("journal", type=Path, nargs="+", help="files of journals, or a folder of them")
    parser.add_argument(
        "--base",
        default="h100-8b",
        metavar="NAME|FILE",
        help="the profile to begin from: sizes of the model, limits of a step, what no request says (h100-8b)",
    )
    parser.add_argument("--endpoint", action="append", default=[], metavar="ID", help="only this one (repeatable)")
    parser.add_argument("--name", default="", help="name of the profile")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profile there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=0, metavar="N", help="as the engines were started (the base's)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=0, metavar="N", help="as the engines were started")
    parser.add_argument("--requests", type=int, default=1_500, metavar="N", help="use at most so many (1500)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Fit and say how well; 0.  Raises ConfigError or InvalidInput."""
    import msgspec

    from shoal.cli.profiles import profile_named
    from shoal.engine.profilefile import check_profile, profile_text

    check_scipy()
    flags.check_report(args.out)
    flags.check_report(args.json)
    base = profile_named(args.base, "--base")
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        if getattr(args, name):
            base = msgspec.structs.replace(base, **{name: getattr(args, name)})
    check_profile(base, "--base")
    pool = read_journals(args.journal)
    seen = chosen(pool, args.endpoint)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    found = fitted(console, seen, base, args.requests, args.name)
    show_fit(console, found)
    if args.out:
        said = f"Fitted to {found.fitted} requests of {len(seen)} endpoints; on {found.held_out} later ones:"
        text = profile_text(found.profile, "\n".join([said, *_lines(found)]))
        flags.write_report(args.out, text.encode())
        console.print(f"written: {args.out}", markup=False)
    if args.json:
        flags.write_report(args.json, msgspec.json.format(msgspec.json.encode(found)))
    return 0


def check_scipy() -> None:
    """Raise ConfigError when what fitting needs is not installed."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise ConfigError("needs SciPy: pip install 'shoal[twin]'", source="shoal twin fit") from None


def read_journals(paths: Sequence[Path]) -> "Pool":
    """Return what journals say of their pool.  Raises ConfigError or InvalidInput."""
    from shoal.cli.twin_files import read_journal_files
    from shoal.simulation.observed import observe

    return observe(read_journal_files(paths))


def chosen(pool: "Pool", names: Sequence[str]) -> "list[Seen]":
    """Return the endpoints of these names, all without any.  Raises ConfigError."""
    for name in names:
        if name not in pool.seen:
            raise ConfigError(f"no endpoint {name!r}; there are {', '.join(sorted(pool.seen))}", source="--endpoint")
    return [seen for name, seen in sorted(pool.seen.items()) if not names or name in names]


def fitted(console: Console, seen: "Sequence[Seen]", base: "Profile", most_requests: int, name: str = "") -> "Fit":
    """Fit with a progress bar.  Raises InvalidInput."""
    from shoal.simulation.fit import fit

    with Progress(
        "fitting", BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("", total=1.0)
        return fit(
            seen, base, most_requests=most_requests, name=name, progress=lambda done: bar.update(task, completed=done)
        )


def show_fit(console: Console, found: "Fit") -> None:
    """Print how well it fits, and what it found."""
    from shoal.simulation.fit import seconds_of

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("COEFFICIENT", "seconds", "± %"):
        table.add_column(name, justify="left" if name == "COEFFICIENT" else "right")
    for name, seconds in seconds_of(found.profile).items():
        spread = found.spread[name]
        table.add_row(_MEANINGS[name], f"{seconds:.3g}", f"{spread * 100:.0f}" if spread < _FELT else "little known")
    console.print(table)
    console.print(f"{found.fitted:,} requests fitted; on {found.held_out:,} later ones that were held out:")
    for line in _lines(found):
        console.print(f"  {line}", highlight=False)
    for name, factor in found.factors.items():
        console.print(f"  {name}: steps take {factor:.2f} times as long as the others'", markup=False)
    if not found.is_cached_told:
        console.print(
            "Engines do not say how much of a prompt they had cached; what the router believed was taken.  "
            "vLLM says it with --enable-prompt-tokens-details.",
            style="yellow",
        )


_MEANINGS = {
    "token": "computing a token",
    "pair": "a token looking at one of its context",
    "weights": "reading the weights",
    "kv_token": "reading the KV of a token",
    "overhead": "each step",
    "sequence": "each sequence of a step",
    "request": "a request before its queue",
}


def _lines(found: "Fit") -> list[str]:
    return [
        f"{name}: off by {error.median * 100:.1f} % (median), {error.p90 * 100:.1f} % (p90); mean "
        f"{error.mean * 100:+.1f} %"
        for name, error in (("TTFT", found.ttft), ("decode", found.decode), ("e2e", found.e2e))
        if error is not None
    ]
