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
    from shoal.simulation.scraped import ScrapedFit

__all__ = ["add_inputs", "add_parser", "check_scipy", "chosen", "fitted", "read_journals", "show_fit"]

_EXAMPLES = """\
examples:
  shoal twin fit /var/lib/shoal/journal --out our-gpu.yaml
  shoal twin fit journal/ --base h200-70b-tp8 --name ours --out ours.yaml
  shoal twin fit journal/ --endpoint gpu-1 --endpoint gpu-2 --out gpu-1-2.yaml
  shoal twin fit --metrics http://gpu-1:8000/metrics --for 20m --out our-gpu.yaml
  shoal twin fit --metrics scrapes/*.txt --every 1m --out our-gpu.yaml

Then: `profile: our-gpu.yaml` in the fleet of an experiment, or shoal engine --profile our-gpu.yaml
"""
REQUESTS = 1_500
_FELT = 0.5


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "fit",
        help="fit the model of the engine to what real engines did",
        description="Read journals of a pool, find the coefficients with which the model of the engine answers when\n"
        "the real ones did, and say how well it fits later requests.  All endpoints taken must have one model and one\n"
        "kind of hardware.  Metrics of one engine (vLLM, SGLang) will do, too, but tell less: how fast compute and\n"
        "memory are.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_inputs(parser, "*")
    parser.add_argument(
        "--metrics", nargs="+", default=[], metavar="URL|FILE",
        help="instead of a journal: an engine's metrics page to scrape, or files of it in the order of time",
    )  # fmt: skip
    parser.add_argument("--for", dest="for_s", type=flags.seconds, default=0.0, metavar="TIME", help="scrape so long")
    parser.add_argument(
        "--every", dest="every_s", type=flags.seconds, default=0.0, metavar="TIME",
        help="scrape so often (15s), or how far apart the files were scraped",
    )  # fmt: skip
    parser.add_argument("--endpoint", action="append", default=[], metavar="ID", help="only this one (repeatable)")
    parser.add_argument("--name", default="", help="name of the profile")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profile there")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=0, metavar="N", help="as the engines were started (the base's)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=0, metavar="N", help="as the engines were started")
    parser.add_argument("--requests", type=int, metavar="N", help=f"use at most so many of a journal ({REQUESTS})")
    parser.set_defaults(run=_run)


def add_inputs(parser: argparse.ArgumentParser, count: str) -> None:
    """Add the flags of what reads journals.  count: of paths, as argparse takes it."""
    parser.add_argument(
        "journal", type=Path, nargs=count, metavar="JOURNAL", help="files of journals, or a folder of them"
    )
    parser.add_argument(
        "--base",
        default="h100-8b",
        metavar="NAME|FILE",
        help="the profile to begin from: sizes of the model, limits of a step, what no request says (h100-8b)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def _run(args: argparse.Namespace) -> int:
    """Fit and say how well; 0.  Raises ConfigError or InvalidInput."""
    import msgspec

    from shoal.cli.profiles import profile_named
    from shoal.engine.profilefile import check_profile, profile_text

    if bool(args.journal) == bool(args.metrics):
        raise ConfigError("name journals, or --metrics, and not both", source="shoal twin fit")
    check_scipy()
    flags.check_report(args.out)
    flags.check_report(args.json)
    base = profile_named(args.base, "--base")
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        if getattr(args, name):
            base = msgspec.structs.replace(base, **{name: getattr(args, name)})
    check_profile(base, "--base")
    console = Console() if sys.stdout.isatty() else Console(width=120)
    found: Fit | ScrapedFit
    found, lines = (_of_metrics if args.metrics else _of_journals)(console, args, base)
    if args.out:
        flags.write_report(args.out, profile_text(found.profile, "\n".join(lines)).encode())
        console.print(f"written: {args.out}", markup=False)
    if args.json:
        flags.write_report(args.json, msgspec.json.format(msgspec.json.encode(found)))
    return 0


def _of_journals(console: Console, args: argparse.Namespace, base: "Profile") -> "tuple[Fit, list[str]]":
    """Return what journals tell, and how well it fits in words."""
    for name in ("for_s", "every_s"):
        if getattr(args, name):
            raise ConfigError("is for --metrics", source=f"--{name.removesuffix('_s')}")
    most = REQUESTS if args.requests is None else args.requests
    if most < 1:
        raise ConfigError("must be at least 1", source="--requests")
    seen = chosen(read_journals(args.journal), args.endpoint)
    found = fitted(console, seen, base, most, args.name)
    show_fit(console, found)
    said = f"Fitted to {found.fitted} requests of {len(seen)} endpoints; on {found.held_out} later ones:"
    return found, [said, *_lines(found)]


def _of_metrics(console: Console, args: argparse.Namespace, base: "Profile") -> "tuple[ScrapedFit, list[str]]":
    """Return what metrics tell, and how well it fits in words."""
    from shoal.cli.twin_scrapes import lines_of, read_scrapes, show_scraped
    from shoal.simulation.scraped import fit_scrapes

    if args.endpoint:
        raise ConfigError("is for journals; metrics are of one engine", source="--endpoint")
    if args.requests is not None:
        raise ConfigError("is for journals; metrics have no requests, only sums of them", source="--requests")
    found = fit_scrapes(read_scrapes(console, args.metrics, args.for_s, args.every_s), base, name=args.name)
    show_scraped(console, found, base.name)
    return found, [f"Fitted to metrics, from {base.name}.", *lines_of(found)]


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
