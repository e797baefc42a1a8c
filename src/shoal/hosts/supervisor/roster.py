"""Which workers share with which: every process is told its siblings whenever one comes or goes.

Owns the addresses and the telling.  With one process nobody is told anything.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.hosts import logs
from shoal.hosts.sharing import Places
from shoal.hosts.supervisor.link import WorkerLink, WorkerSilent

_AGAIN_S = 0.2

_log = logs.get("supervisor")


class Roster:
    """Keeps workers told.  links: asks for those that answer now, by incarnation."""

    def __init__(self, run_dir: Path, links: Callable[[], Mapping[str, WorkerLink]]) -> None:
        self._run_dir = run_dir
        self._links = links
        self._told: dict[str, Places] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """A process came or went."""
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="roster")

    async def introduce(self, incarnation: str, at_work: Callable[[], list[str]]) -> None:
        """Have a process that is not in service yet learn from those that are.

        at_work: asks for their incarnations.  Whatever fails, the process begins with what it has.
        """
        link, teachers = self._links().get(incarnation), [each for each in at_work() if each != incarnation]
        if link is None:
            return
        await self._tell()
        with contextlib.suppress(WorkerSilent):
            await link.begin([self._pair(each)[0] for each in teachers])

    def forget(self, incarnation: str) -> None:
        """Clean up after a process that ended."""
        self._told.pop(incarnation, None)
        for address in self._pair(incarnation):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)

    async def close(self) -> None:
        """Tell nobody any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _pair(self, incarnation: str) -> tuple[str, str]:
        return f"ipc://{self._run_dir}/s{incarnation}.sock", f"ipc://{self._run_dir}/a{incarnation}.sock"

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not await self._tell():
                await asyncio.sleep(_AGAIN_S)
                self._changed.set()

    async def _tell(self) -> bool:
        """Tell each process what it was not told; return whether all took it."""
        links = dict(self._links())
        is_whole = True
        for incarnation, link in links.items():
            siblings = tuple(self._pair(each) for each in sorted(links) if each != incarnation)
            places = Places(own=self._pair(incarnation), siblings=siblings)
            known = self._told.get(incarnation)
            if places == known or (known is None and not siblings):
                continue
            try:
                await link.share(places)
                self._told[incarnation] = places
            except WorkerSilent as error:
                is_whole = False
                _log.debug("a worker was not told its siblings", incarnation=incarnation, why=error)
        return is_whole
