"""`shoal replay`: feed a journal to a fresh router and say whether every command comes out the same.

Owns the verb; the replay itself is `routing.journal`.
"""

import argparse
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress

from shoal.cli.inputs import journals_at, read_files
from shoal.kernel import InvalidInput
from shoal.routing.journal import Difference, Opening, Step, read, replay

EXAMPLES = """\
examples:
  shoal replay /var/lib/shoal/journal                                  # every run in that folder
  shoal replay picker-0-1a2b3c4d.journal picker-0-1a2b3c4d.1.journal   # all parts of one run
"""

MAX_JOURNAL_BYTES = 4 << 30
"""Of all files together, which are held in memory."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "replay",
        help="reproduce every command of a journal, or name the first that differs",
        description="Feed a journal to a fresh router and say whether every command comes out the same, run by run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "journal", nargs="+", type=Path, metavar="JOURNAL", help="files of journals, or a folder of them"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay; 0 when all commands are the same, 1 when one differs.  Raises ConfigError or InvalidInput."""
    runs = _runs([each for path in args.journal for each in journals_at(path)])
    console = Console()
    are_same = True
    for name, (opening, steps) in runs.items():
        with Progress("replaying", BarColumn(), "{task.completed} steps", console=console, transient=True) as progress:
            same, difference = replay(opening, progress.track(steps, total=None))
        which = f"{name}: " if len(runs) > 1 else ""
        if difference is None:
            console.print(f"{which}{same:,} steps, every command the same", markup=False)
        else:
            are_same = False
            _show(console, which, difference)
    return 0 if are_same else 1


def _show(console: Console, which: str, difference: Difference) -> None:
    console.print(f"{which}step {difference.number} at {difference.now:.6f} s differs", markup=False)
    for title, value in (
        ("event", difference.event),
        ("recorded", difference.recorded),
        ("replayed", difference.replayed),
    ):
        console.print(f"  {title}: {msgspec.json.encode(value).decode()}", markup=False)


def _runs(files: list[Path]) -> dict[str, tuple[Opening, Iterator[Step]]]:
    """Return the steps of each run, by the name of its first file.

    Raises InvalidInput when a file is no journal, or a part of a run is missing.
    """
    parts: dict[str, list[tuple[Opening, Iterator[Step], Path]]] = {}
    for path, data in zip(files, read_files(files, MAX_JOURNAL_BYTES), strict=True):
        try:
            opening, steps = read(data)
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from error
        parts.setdefault(opening.run, []).append((opening, steps, path))
    runs: dict[str, tuple[Opening, Iterator[Step]]] = {}
    for mine in parts.values():
        mine.sort(key=lambda each: each[0].part)
        for number, (opening, _, path) in enumerate(mine):
            if opening.part != number:
                raise InvalidInput(
                    f"{path} is part {opening.part} of its run, and part {number} is not among the files"
                )
        runs[str(mine[0][2])] = mine[0][0], chain.from_iterable(steps for _, steps, _ in mine)
    return runs
