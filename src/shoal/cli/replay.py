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

from shoal.cli.inputs import read_files
from shoal.kernel import InvalidInput
from shoal.routing.journal import Opening, Step, read, replay

EXAMPLES = """\
examples:
  shoal replay /var/lib/shoal/picker-0-1a2b3c4d.journal
  shoal replay picker-0-1a2b3c4d.journal picker-0-1a2b3c4d.1.journal   # all parts of one run, in order
"""

MAX_JOURNAL_BYTES = 4 << 30
"""Of all parts together, which are held in memory."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "replay",
        help="reproduce every command of a journal, or name the first that differs",
        description="Feed a journal to a fresh router and say whether every command comes out the same.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, help="the parts of one journal, in order")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay; 0 when all commands are the same, 1 when one differs.  Raises ConfigError or InvalidInput."""
    opening, steps = _parts(args.files)
    console = Console()
    with Progress("replaying", BarColumn(), "{task.completed} steps", console=console, transient=True) as progress:
        same, difference = replay(opening, progress.track(steps, total=None))
    if difference is None:
        console.print(f"{same} steps, every command the same")
        return 0
    console.print(f"step {difference.number} at {difference.now:.6f} s differs")
    for title, value in (
        ("event", difference.event),
        ("recorded", difference.recorded),
        ("replayed", difference.replayed),
    ):
        console.print(f"  {title}: {msgspec.json.encode(value).decode()}", markup=False)
    return 1


def _parts(files: list[Path]) -> tuple[Opening, Iterator[Step]]:
    """Read the parts in order.  Raises InvalidInput when one is no journal, is missing, or is of another run."""
    first: Opening | None = None
    parts: list[Iterator[Step]] = []
    for number, (path, data) in enumerate(zip(files, read_files(files, MAX_JOURNAL_BYTES), strict=True)):
        try:
            opening, more = read(data)
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from error
        if opening.part != number:
            raise InvalidInput(f"{path} is part {opening.part} of its journal; give all parts from 0 on, in order")
        if first is not None and opening.run != first.run:
            raise InvalidInput(f"{path} is of run {opening.run}, the parts before it of run {first.run}")
        first = first or opening
        parts.append(more)
    assert first is not None
    return first, chain.from_iterable(parts)
