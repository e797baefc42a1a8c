"""The journals in one directory: whose run still goes on, and which are removed when there are too many.

A run is all parts that one process wrote, `picker-N-RUN.journal`, `picker-N-RUN.1.journal` and so on.  It is kept or
removed as a whole, since a part alone cannot be replayed.  What carries another name, or does not begin as a journal
does, is never touched and does not count.  Who writes holds a lock on its files, so no pool removes what another one
is writing.
"""

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.routing.journal import MAGIC

_NAME = re.compile(r"(picker-[0-9]+-[0-9a-f]{8})(?:\.([1-9][0-9]*))?\.journal")


class Allowance(NamedTuple):
    """How much may lie in a directory.  total_bytes: all parts together.  runs: journals of processes."""

    total_bytes: int
    runs: int


class Removed(NamedTuple):
    """What was removed: runs, and their bytes."""

    runs: int = 0
    size_bytes: int = 0


class _Part(NamedTuple):
    number: int
    path: Path
    size_bytes: int
    written_ns: int


def stem_of(picker: str, run: str) -> str:
    """Return how the files of a run are called.  picker: digits.  run: eight hex digits."""
    return f"picker-{picker}-{run}"


def open_part(path: Path) -> int:
    """Open a part to write it from its beginning, and keep others from removing its run while the descriptor is open.

    Raises OSError.
    """
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            # Where files cannot be locked nobody can lock them, and so nobody removes them.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # It was removed between its making and its lock.
        os.close(descriptor)


def prune(directory: Path, allowance: Allowance) -> Removed:
    """Remove runs that have ended, those written longest ago first, until the others are within the allowance.

    Runs that go on count, but stay.  Raises OSError when the directory cannot be read.
    """
    runs = sorted(_runs(directory).values(), key=lambda parts: max(part.written_ns for part in parts))
    count, total = len(runs), sum(_size(parts) for parts in runs)
    removed = Removed()
    for parts in runs:
        if count <= allowance.runs and total <= allowance.total_bytes:
            break
        if _remove(parts):
            count, total = count - 1, total - _size(parts)
            removed = Removed(removed.runs + 1, removed.size_bytes + _size(parts))
    return removed


def _runs(directory: Path) -> dict[str, list[_Part]]:
    """Return the parts of each run; runs of which any file is no journal are left out."""
    found: dict[str, list[_Part]] = {}
    foreign: set[str] = set()
    with os.scandir(directory) as entries:
        for entry in entries:
            name = _NAME.fullmatch(entry.name)
            if name is None:
                continue
            try:
                with _opened(Path(entry.path)) as descriptor:
                    status = os.fstat(descriptor)
            except FileNotFoundError:
                continue
            except OSError:
                foreign.add(name[1])
                continue
            part = _Part(int(name[2] or 0), Path(entry.path), status.st_size, status.st_mtime_ns)
            found.setdefault(name[1], []).append(part)
    return {stem: parts for stem, parts in found.items() if stem not in foreign}


def _size(parts: Sequence[_Part]) -> int:
    return sum(part.size_bytes for part in parts)


def _remove(parts: Sequence[_Part]) -> bool:
    """Remove a run if it has ended and every part of it is a journal; returns whether it is gone."""
    with contextlib.ExitStack() as held:
        try:
            for part in parts:
                held.enter_context(_locked(part.path))
            # From the last one on: what is left after a crash can still be replayed.
            for part in sorted(parts, reverse=True):
                part.path.unlink()
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a part that nobody writes.  Raises OSError when somebody does, or it is no journal."""
    with _opened(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Have a part open.  Raises OSError when it is no journal: a link, a pipe, or what begins otherwise."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if not is_file or os.pread(descriptor, len(MAGIC), 0) not in (MAGIC, b""):
            raise OSError(f"{path} is no journal")
        yield descriptor
    finally:
        os.close(descriptor)
