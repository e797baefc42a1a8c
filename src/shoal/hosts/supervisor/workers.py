"""Picker workers: one slot per picker id, filled, restarted after a crash, and replaced without a gap.

A worker is let in only when it knows the fleet.  How requests find it is its door's (`doors`).
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.hosts import logs
from shoal.hosts.bequest import path_of
from shoal.hosts.supervisor.answers import Seat
from shoal.hosts.supervisor.backoff import Backoff
from shoal.hosts.supervisor.children import Child
from shoal.hosts.supervisor.doors import Door
from shoal.hosts.supervisor.feed import Feed
from shoal.hosts.supervisor.ledger import Ledger
from shoal.hosts.supervisor.link import WorkerLink, WorkerSilent
from shoal.hosts.supervisor.roster import Roster
from shoal.hosts.supervisor.spares import Spare
from shoal.routing import events

_POLL_S = 0.02
_ADMIT_AGAIN_S = 0.2
_CRASHES_ALLOWED = 2
# A spare takes over at once; without one the imports of the new process are wait enough.
_FIRST_WAIT_S = 0.02
_SPARE_AFTER_S = 0.1
# A successor is there to take the client's next connection; at the end of the pool nobody is.
_LINGER_S, _LAST_LINGER_S = 2.0, 0.2
WARM_S = 60.0
"""Longest wait for a new worker to know the fleet; past this an upgrade is given up and the old worker stays."""

Command = Callable[[str, str, Path], Sequence[str]]
"""Makes argv of a worker from its picker id, its incarnation and its admin socket."""


class Upgrade(NamedTuple):
    """What became of replacing the workers."""

    is_done: bool
    text: str


class WorkerProcess:
    """One supervised worker process of a slot, through its crashes.

    known: called when it knows the fleet, returns when it knows what its siblings do.  warmed: called then, returns
    when it may count as ready.  lost: called when the process ended, with the incarnation that ended.
    """

    def __init__(
        self,
        picker: str,
        run_dir: Path,
        command: Command,
        door: Door,
        ledger: Ledger,
        env: dict[str, str],
        spare: Spare,
        next_number: Callable[[], int],
        known: Callable[["WorkerProcess"], Awaitable[None]],
        warmed: Callable[["WorkerProcess"], Awaitable[None]],
        lost: Callable[[str], None],
    ) -> None:
        self._known = known
        self.picker = picker
        self.state = "starting"
        self.feed: Feed | None = None
        self.ready = asyncio.Event()
        self._run_dir = run_dir
        self._command = command
        self._ledger = ledger
        self._spare = spare
        self._next_number = next_number
        self._warmed = warmed
        self._lost = lost
        self._door = door
        self._number = 0
        self._link: WorkerLink | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.child = Child(
            f"picker-{picker}",
            self._argv,
            on_start=self._warm,
            on_exit=self._ended,
            env=env,
            inherited=door.inherited,
            backoff=Backoff(first_s=_FIRST_WAIT_S),
            spare=self._from_spare,
        )

    @property
    def incarnation(self) -> str:
        """Name of the present process, never used again."""
        return f"{self.picker}.{self._number}"

    @property
    def link(self) -> WorkerLink | None:
        """How to speak with it, None while it does not listen."""
        return self._link

    @property
    def seat(self) -> Seat:
        """What the pool says of it."""
        return Seat(
            picker=self.picker,
            incarnation=self.incarnation,
            link=self._link,
            pid=self.child.pid,
            state=self.state,
            restarts=self.child.restarts,
        )

    async def drain(self, timeout_s: float, linger_s: float = _LINGER_S, *, leaves: bool = True) -> int:
        """Let it finish its requests and end; cut short after `timeout_s`.  Returns how many were cut.

        linger_s: how long unused connections of clients are kept, for a request that is on its way.  leaves: whether
        somebody may ask about its requests later.
        """
        self.state = "draining"
        self.child.let_end()
        if self.feed is not None:
            self.feed.is_ending = True
        link, left = self._link, 0
        if link is not None:
            with contextlib.suppress(WorkerSilent):
                await link.drain(linger_s, leaves=leaves)
                if not await self.child.ended(timeout_s):
                    left = int((await link.snapshot()).inflight)
        await self.child.stop()
        return left

    @property
    def bequest(self) -> Path:
        """Where the present process leaves what it knows of requests."""
        return path_of(self._admin_socket())

    async def admit(self) -> None:
        """Let requests of its slot in.  Raises WorkerSilent."""
        if self._link is None:
            raise WorkerSilent(f"worker {self.incarnation} is gone")
        await self._door.admit(self.picker, self.incarnation, self._link)

    async def stop(self) -> None:
        """End it now."""
        await self.child.stop()

    def _argv(self) -> Sequence[str]:
        self._number = self._next_number()
        self.state = "starting"
        self.ready.clear()
        return self._command(self.picker, self.incarnation, self._admin_socket())

    def _from_spare(self, command: Sequence[str]) -> asyncio.subprocess.Process | None:
        flags = next((at for at, word in enumerate(command) if word.startswith("--")), len(command))
        found = self._spare.take(command[flags:])
        if found is not None:
            logs.get("supervisor").info("the spare worker takes over", picker=self.picker, pid=found.pid)
        return found

    def _admin_socket(self) -> Path:
        return self._run_dir / f"w{self.incarnation}.sock"

    async def _warm(self, child: Child) -> None:
        """Tell a process that just started the whole fleet, then put it in service."""
        link = WorkerLink(self._admin_socket())
        while not (self._admin_socket().exists() and await link.is_listening()):
            await asyncio.sleep(_POLL_S)
        self._link = link
        self.feed = Feed(self.picker, link, self._ledger)
        self._feeding = asyncio.create_task(self.feed.run(), name=f"feed {self.incarnation}")
        await self.feed.caught_up()
        await self._known(self)
        await self._warmed(self)
        self.state = "serving"
        self.ready.set()

    def _ended(self, child: Child) -> None:
        self.state = "down"
        self.ready.clear()
        if self._feeding is not None:
            self._feeding.cancel()
        if self._link is not None:
            closing = asyncio.ensure_future(self._link.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self.feed = self._link = self._feeding = None
        self._admin_socket().unlink(missing_ok=True)
        self._door.forget(self.incarnation)
        self._lost(self.incarnation)


class Workers:
    """One slot per picker id, whose requests come in by `door`.

    env: added to the environment of each process.  spare: command of the process that waits to become a worker, () to
    keep none.  bequests: by slot, what the worker that was replaced last has left.
    """

    def __init__(
        self,
        pickers: Sequence[str],
        run_dir: Path,
        command: Command,
        door: Door,
        ledger: Ledger,
        env: dict[str, str] | None = None,
        spare: Sequence[str] = (),
    ) -> None:
        self._env = env or {}
        self._spare = Spare(spare, self._env, door.inherited)
        self._door = door
        self._tasks: set[asyncio.Task[None]] = set()
        self._run_dir = run_dir
        self._command = command
        self._ledger = ledger
        self._lost: Callable[[str], None] = lambda _: None
        self._number = 0
        self._roster = Roster(run_dir, self._links)
        self._upgrading = asyncio.Lock()
        self._serving = {picker: self._process(picker) for picker in pickers}
        self._others: list[WorkerProcess] = []
        self.bequests: dict[str, Path] = {}
        self._drains: set[asyncio.Task[None]] = set()
        self._log = logs.get("supervisor")

    def on_lost(self, lost: Callable[[str], None]) -> None:
        """Have `lost` told each incarnation that ended."""
        self._lost = lost

    def start(self) -> None:
        """Start one process per slot."""
        for process in self._serving.values():
            process.child.start()

    @property
    def pickers(self) -> list[str]:
        """The picker ids, in order."""
        return list(self._serving)

    @property
    def processes(self) -> list[WorkerProcess]:
        """Every process, those that drain or are being warmed included."""
        return [*self._serving.values(), *self._others]

    def seats(self) -> list[Seat]:
        """Return every process as the pool knows it; a successor that is not in service yet is left out."""
        serving = list(self._serving.values())
        return [each.seat for each in self.processes if each in serving or each.state == "draining"]

    def tell(self, told: Sequence[events.Event]) -> None:
        """Hand events to every process; one that starts now takes them from the ledger."""
        for process in self.processes:
            if process.feed is not None:
                process.feed.put(told)

    async def settled(self, timeout_s: float = 2.0) -> None:
        """Return when every process that answers took what it was told; one that hangs is not waited for."""
        feeds = [each.feed for each in self.processes if each.feed is not None and not each.feed.is_ending]
        waits = [asyncio.create_task(feed.caught_up()) for feed in feeds]
        if not waits:
            return
        _, late = await asyncio.wait(waits, timeout=timeout_s)
        for wait in late:
            wait.cancel()

    @property
    def in_service(self) -> int:
        """How many slots are served now."""
        return sum(process.ready.is_set() for process in self._serving.values())

    async def upgrade(self, drain_timeout_s: float) -> Upgrade:
        """Replace the process of each slot by a new one, one slot after the other.

        The new one is warmed first.  When it does not come up, it is stopped, the old one stays, and the rest is not
        tried.  Returns what was done.  Old processes finish their requests in the background.
        """
        if self._upgrading.locked():
            return Upgrade(False, "an upgrade is under way already")
        async with self._upgrading:
            await self._spare.drop()  # it holds the code of before
            for picker in self.pickers:
                if not await self._replace(picker, drain_timeout_s):
                    text = f"picker {picker}: the new worker did not come up; the old one stays, see the log"
                    return Upgrade(False, text)
            return Upgrade(True, f"{len(self.pickers)} worker(s) replaced")

    async def stop(self) -> None:
        """End every process now."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._roster.close()
        await asyncio.gather(self._spare.drop(), *(process.stop() for process in self.processes))
        self._door.close()

    async def drain(self, timeout_s: float) -> int:
        """Have every process finish its requests and end; returns how many were cut after `timeout_s`."""
        draining = (process.drain(timeout_s, _LAST_LINGER_S, leaves=False) for process in self.processes)
        return sum(await asyncio.gather(*draining))

    async def _replace(self, picker: str, drain_timeout_s: float) -> bool:
        old, new = self._serving[picker], self._process(picker)
        self._others.append(new)
        self._log.info("replacing worker", picker=picker, old_pid=old.child.pid)
        new.child.start()
        if not (await _comes_up(new) and await _is_admitted(new)):
            self._log.error("the new worker did not come up, keeping the old one", picker=picker)
            await new.stop()
            self._others.remove(new)
            return False
        self._others.remove(new)
        self._serving[picker] = new
        self._others.append(old)
        self._log.info("worker replaced", picker=picker, old_pid=old.child.pid, new_pid=new.child.pid)
        task = asyncio.create_task(self._let_go(old, drain_timeout_s), name=f"drain {old.incarnation}")
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)
        return True

    async def _let_go(self, old: WorkerProcess, drain_timeout_s: float) -> None:
        left_at = old.bequest
        try:
            if left := await old.drain(drain_timeout_s):
                self._log.warning("a replaced worker was ended with requests in flight", picker=old.picker, left=left)
        finally:
            before = self.bequests.get(old.picker)
            self.bequests[old.picker] = left_at
            self._others.remove(old)
            if before is not None:
                before.unlink(missing_ok=True)

    def _process(self, picker: str) -> WorkerProcess:
        return WorkerProcess(
            picker,
            self._run_dir,
            self._command,
            self._door,
            self._ledger,
            self._env,
            self._spare,
            self._next,
            self._meets_siblings,
            self._warmed,
            self._ended,
        )

    def _links(self) -> dict[str, WorkerLink]:
        return {each.incarnation: each.link for each in self.processes if each.link is not None}

    async def _meets_siblings(self, process: WorkerProcess) -> None:
        """Have all know of a process that joins, and the process take over what they know."""
        self._roster.changed()
        await self._roster.introduce(
            process.incarnation,
            lambda: [each.incarnation for each in self.processes if each.state == "serving" and each.link is not None],
        )

    def _ended(self, incarnation: str) -> None:
        self._roster.forget(incarnation)
        self._roster.changed()
        self._lost(incarnation)

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _warmed(self, process: WorkerProcess) -> None:
        """Let the process of a slot in; a successor waits until it takes the slot over."""
        task = asyncio.create_task(self._refill_spare(), name="spare")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._serving.get(process.picker) is process:
            while not await _is_admitted(process):
                await asyncio.sleep(_ADMIT_AGAIN_S)
            self._log.info("worker in service", picker=process.picker, pid=process.child.pid)

    async def _refill_spare(self) -> None:
        """Have a spare again, once nobody waits for the CPU that its imports take."""
        await asyncio.sleep(_SPARE_AFTER_S)
        if all(process.ready.is_set() for process in self._serving.values()):
            await self._spare.refill()


async def _is_admitted(process: WorkerProcess) -> bool:
    try:
        await process.admit()
    except WorkerSilent as error:
        logs.get("supervisor").warning("a worker could not be let in", picker=process.picker, why=error)
        return False
    return True


async def _comes_up(process: WorkerProcess) -> bool:
    """Whether the process gets in service; one that crashed a few times will not."""
    try:
        async with asyncio.timeout(WARM_S):
            while not process.ready.is_set():
                if process.child.restarts >= _CRASHES_ALLOWED:
                    return False
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        return False
    return True


def worker_command(door: Door, config: Path, count: int, seed: int, log_format: str, log_level: str) -> Command:
    """Return the maker of a worker's argv."""

    def argv(picker: str, incarnation: str, admin: Path) -> list[str]:
        return [
            *(sys.executable, "-m", door.package, *door.flags(picker, incarnation), "--admin", str(admin)),
            *("--picker-id", picker, "--workers", str(count), "--config", str(config)),
            *("--seed", str(seed + int(picker)), "--log-format", log_format, "--log-level", log_level),
        ]

    return argv


def waiting_worker(door: Door) -> tuple[str, ...]:
    """Return the command of a process that becomes a worker when it is given the flags."""
    return (sys.executable, "-m", "shoal.hosts.supervisor.warm", f"{door.package}.worker")
