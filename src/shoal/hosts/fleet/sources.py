"""Where targets come from: the command line, a watched file, and additions while running.

A source answers what it names now and says when that changed; it never drops what it knew because a
reading failed.  Merging sources and looking up names is the keeper's and the resolver's work.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

from shoal.hosts.filewatch import WatchedFile
from shoal.hosts.fleet.backendsfile import parse_backends
from shoal.hosts.fleet.targets import Target
from shoal.hosts.logs import Log
from shoal.kernel import ConfigError

log = Log("fleet")


class Source(Protocol):
    """Something that names targets."""

    def targets(self) -> Sequence[Target]:
        """What it names now."""
        ...

    async def watch(self, changed: Callable[[], None]) -> None:
        """Keep `targets` current and call `changed` after each change, until cancelled; may return when nothing can."""
        ...


class StaticSource:
    """Targets that never change: `--backend` flags and embedded engines."""

    __slots__ = ("_targets",)

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = tuple(targets)

    def targets(self) -> Sequence[Target]:
        """What was given."""
        return self._targets

    async def watch(self, changed: Callable[[], None]) -> None:
        """Return at once: nothing can change."""


class AddedSource:
    """Targets that an operator adds and takes away while the pool runs."""

    __slots__ = ("_targets",)

    def __init__(self) -> None:
        self._targets: dict[str, Target] = {}

    def targets(self) -> Sequence[Target]:
        """Those added and not taken away, oldest first."""
        return tuple(self._targets.values())

    async def watch(self, changed: Callable[[], None]) -> None:
        """Return at once: who adds knows."""

    def add(self, target: Target) -> None:
        """Add `target`; one with the same name (or URL, when it has none) is replaced."""
        self._targets[target.name or target.url] = target

    def discard(self, key: str) -> bool:
        """Take the target of that name or URL away.  Returns whether there was one."""
        for known, target in self._targets.items():
            if key in (known, target.url):
                del self._targets[known]
                return True
        return False


class FileSource:
    """A backends file that is followed; a broken edit keeps the last good list."""

    __slots__ = ("_file", "_targets")

    def __init__(self, path: Path) -> None:
        """Read `path`.  Raises ConfigError when it cannot be read as a list of backends."""
        self._file = WatchedFile(path)
        self._targets: tuple[Target, ...] = ()
        self._load()

    def targets(self) -> Sequence[Target]:
        """The last good list."""
        return self._targets

    async def watch(self, changed: Callable[[], None]) -> None:
        """Follow the file until cancelled."""
        async with aclosing(self._file.changes()) as changes:
            async for _ in changes:
                before = self._targets
                try:
                    await asyncio.to_thread(self._load)
                except ConfigError as error:
                    log.error(f"backends not reloaded, the last good list is kept: {error}")
                    continue
                if self._targets != before:
                    log.info(f"{self._file.path} reloaded", backends=len(self._targets))
                    changed()

    def _load(self) -> None:
        targets, problems = parse_backends(self._file.read(), self._file.path)
        for problem in problems:
            log.error(f"backend left out: {problem}")
        self._targets = tuple(targets)
