"""Regular readings of every worker: what is in flight where, and whether a worker hangs.

Owns the poll and its figures.  The fleet keeper asks them for the pace of scraping and the end of a drain; the drain
of the whole pool waits on them.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from time import monotonic

from shoal.hosts import logs
from shoal.hosts.admin import Snapshot
from shoal.hosts.supervisor.link import WorkerSilent
from shoal.hosts.supervisor.workers import WorkerProcess, Workers

HANG_S = 30.0
"""A worker in service that does not answer for this long is killed, and so restarted."""

_SMALL_FLEET = 100
_SMALL_FLEET_POLL_S = 0.25
_LARGE_FLEET_POLL_S = 2.0


class Pulse:
    """The last readings of all workers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._inflight: Counter[str] = Counter()
        self._is_whole = False
        self._turn = asyncio.Event()
        self._silent_since: dict[str, float] = {}
        self._saw: Callable[[str, Snapshot], None] = lambda name, snapshot: None
        self._log = logs.get("supervisor")
        self.endpoints = 0

    def on_reading(self, saw: Callable[[str, Snapshot], None]) -> None:
        """Have `saw` given each snapshot, with the incarnation that it is of."""
        self._saw = saw

    def is_busy(self, endpoint_id: str) -> bool:
        """Whether the pool had requests on an endpoint at the last reading."""
        return self._inflight[endpoint_id] > 0

    async def until_drained(self, endpoint_id: str) -> None:
        """Return when two readings of all workers in a row saw nothing in flight on an endpoint.

        Two, because a request may just be on its way into the books when the first is taken.
        """
        quiet = 0
        while quiet < 2:
            self._turn.clear()
            await self._turn.wait()
            quiet = quiet + 1 if self._is_whole and not self.is_busy(endpoint_id) else 0

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            await self.read()
            await asyncio.sleep(_SMALL_FLEET_POLL_S if self.endpoints <= _SMALL_FLEET else _LARGE_FLEET_POLL_S)

    async def read(self) -> None:
        """Take one reading of every worker that has been in service."""
        processes = [process for process in self._workers.processes if process.seat.link is not None]
        present = {process.incarnation for process in processes}
        self._silent_since = {name: since for name, since in self._silent_since.items() if name in present}
        answers = await asyncio.gather(*(self._ask(process) for process in processes))
        inflight: Counter[str] = Counter()
        for answer in answers:
            if answer is not None:
                self.endpoints = len(answer.endpoints)
                for endpoint in answer.endpoints:
                    inflight[endpoint.id] += int(endpoint.inflight_requests)
        self._inflight = inflight
        self._is_whole = None not in answers and len(processes) == len(self._workers.processes)
        self._turn.set()

    async def _ask(self, process: WorkerProcess) -> Snapshot | None:
        link, name = process.seat.link, process.incarnation
        if link is None:
            return None
        try:
            answer = await link.snapshot()
        except WorkerSilent as error:
            self._silence(process, name, str(error))
            return None
        self._silent_since.pop(name, None)
        if process.incarnation == name:
            self._saw(name, answer)
        return answer

    def _silence(self, process: WorkerProcess, name: str, why: str) -> None:
        since = self._silent_since.setdefault(name, monotonic())
        if process.incarnation == name and process.child.is_running and monotonic() - since > HANG_S:
            self._log.error("worker hangs, killed", picker=process.picker, pid=process.child.pid, why=why)
            self._silent_since.pop(name, None)
            process.child.signal(signal.SIGKILL)
