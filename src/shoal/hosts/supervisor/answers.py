"""The answers of all workers as one: snapshot, metrics, explain.

Asks every worker at once, and says so when one did not answer instead of failing.  The HTTP around it is `server`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from shoal.hosts import bequest
from shoal.hosts.admin import (
    PoolPicture,
    Snapshot,
    WorkerPicture,
    add_left_behind,
    left_behind,
    merge_endpoints,
    merge_warnings,
)
from shoal.hosts.admin.queues import merge_flows
from shoal.hosts.admin.snapshots import merge_peers
from shoal.hosts.supervisor.link import WorkerLink, WorkerSilent
from shoal.hosts.supervisor.merging import Family, WorkerCounts, merge, text
from shoal.hosts.supervisor.waiting import Waiting, with_waiting
from shoal.routing.events import SessionAborted

T = TypeVar("T")


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the pool knows it now.

    incarnation: unique over restarts.  link: None while it is down.
    """

    picker: str
    incarnation: str
    link: WorkerLink | None = None
    pid: int | None = None
    state: str = ""
    restarts: int = 0


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers know of one request.

    silent: pickers that did not answer.  renewed: those that died once and were started anew: what the process before
    knew is gone.
    """

    request_id: str
    found: list[dict[str, Any]] = []
    silent: list[str] = []
    renewed: list[str] = []


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of a session were ended.  silent: pickers that did not answer, whose requests may go on."""

    requests: int
    silent: list[str] = []


class PoolAnswers:
    """Merges what the workers in `seats()` say.

    about: what the pool says of itself (url, pid, readiness, warnings); its sums are filled in here.
    families: the pool's own metrics, beside those of the workers.  waiting: endpoints that are not ready, with reasons.
    bequests: by picker, what a worker that was replaced has left (`hosts.bequest`).
    """

    def __init__(
        self,
        seats: Callable[[], Sequence[Seat]],
        about: Callable[[], PoolPicture],
        families: Callable[[], list[Family]] = list,
        waiting: Callable[[], Sequence[Waiting]] = tuple,
        bequests: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        self._bequests = bequests
        self._seats = seats
        self._about = about
        self._families = families
        self._waiting = waiting
        self._counts = WorkerCounts()
        self._last: dict[str, Snapshot] = {}
        self._left = Snapshot()

    async def picture(self) -> PoolPicture:
        """Return the whole pool in one picture."""
        seats = self._seats()
        answers = self._of_present(seats, await _ask_all(seats, lambda link: link.snapshot()))
        heard = [answer for answer in answers if answer is not None]
        for seat, answer in zip(seats, answers, strict=True):
            if answer is not None:
                self.saw(seat.incarnation, answer)
        about, left = self._about(), self._left
        return msgspec.structs.replace(
            about,
            workers=[_worker(seat, answer) for seat, answer in zip(seats, answers, strict=True)],
            endpoints=with_waiting(add_left_behind(merge_endpoints(heard), left), self._waiting()),
            requests_total=left.requests_total + sum(answer.requests_total for answer in heard),
            inflight=sum(answer.inflight for answer in heard),
            errors_total=left.errors_total + sum(answer.errors_total for answer in heard),
            peers=merge_peers(heard),
            flow=merge_flows(answer.flow for answer in heard),
            warnings=list(dict.fromkeys([*about.warnings, *merge_warnings(heard)])),
            is_partial=len(heard) < len(seats),
        )

    async def metrics(self) -> str:
        """Return one page of Prometheus text over all workers."""
        seats = self._seats()
        silent = await self._read_counts(seats)
        up = Family(
            name="shoal_worker_up",
            help="Whether the picker worker answered this scrape.",
            type="gauge",
            samples=[("", {"picker": seat.picker}, float(seat.incarnation not in silent)) for seat in seats],
        )
        return text(merge([[up], self._families(), self._counts.merged(frozenset(silent))]))

    def saw(self, incarnation: str, snapshot: Snapshot) -> None:
        """Take a worker's snapshot, to count with when the worker is gone; one that comes after its end is too late."""
        if incarnation in self._present():
            self._last[incarnation] = snapshot

    def lost(self, incarnation: str) -> None:
        """Keep in the sums what a worker that is gone had counted."""
        self._counts.lost(incarnation)
        last = self._last.pop(incarnation, None)
        if last is not None:
            self._left = left_behind(self._left, last)

    async def read_counts(self) -> None:
        """Read the metrics of every worker, so that little is lost with one that dies between two scrapes."""
        await self._read_counts(self._seats())

    async def explain(self, request_id: str) -> Explained:
        """Ask every worker about one request, and where none knows it look into what replaced ones have left."""
        seats = self._seats()
        silent: list[str] = []

        async def ask(seat: Seat) -> dict[str, Any] | None:
            if seat.link is None:
                silent.append(seat.picker)
                return None
            try:
                return await seat.link.explain(request_id)
            except WorkerSilent:
                silent.append(seat.picker)
                return None

        answers = await asyncio.gather(*(ask(seat) for seat in seats))
        found = [
            {"picker": seat.picker, **answer} for seat, answer in zip(seats, answers, strict=True) if answer is not None
        ]
        if not found:
            found = await asyncio.to_thread(_left_of, request_id, dict(self._bequests))
        renewed = sorted({seat.picker for seat in seats if seat.restarts})
        return Explained(request_id=request_id, found=found, silent=sorted(silent), renewed=renewed)

    async def abort(self, session: SessionAborted) -> Aborted:
        """Have every worker end the requests of a session."""
        seats = self._seats()
        counts = await _ask_all(seats, lambda link: link.abort(session))
        silent = [seat.picker for seat, count in zip(seats, counts, strict=True) if count is None]
        return Aborted(requests=sum(count or 0 for count in counts), silent=sorted(silent))

    def _present(self) -> set[str]:
        return {seat.incarnation for seat in self._seats() if seat.link is not None}

    def _of_present(self, seats: Sequence[Seat], answers: Sequence[T | None]) -> list[T | None]:
        """The answers without those of workers that ended meanwhile: their counts are in the sums already."""
        present = self._present()
        return [answer if seat.incarnation in present else None for seat, answer in zip(seats, answers, strict=True)]

    async def _read_counts(self, seats: Sequence[Seat]) -> set[str]:
        pages = self._of_present(seats, await _ask_all(seats, lambda link: link.families()))
        silent: set[str] = set()
        for seat, page in zip(seats, pages, strict=True):
            if page is None:
                silent.add(seat.incarnation)
            else:
                self._counts.saw(seat.incarnation, page)
        return silent


def _left_of(request_id: str, bequests: Mapping[str, Path]) -> list[dict[str, Any]]:
    """What replaced workers have left of a request."""
    found = ((picker, bequest.find(path, request_id)) for picker, path in bequests.items())
    return [{"picker": picker, "is_replaced": True, **left} for picker, left in found if left is not None]


async def _ask_all(seats: Sequence[Seat], ask: Callable[[WorkerLink], Coroutine[Any, Any, T]]) -> list[T | None]:
    async def one(seat: Seat) -> T | None:
        if seat.link is None:
            return None
        try:
            return await ask(seat.link)
        except WorkerSilent:
            return None

    return list(await asyncio.gather(*(one(seat) for seat in seats)))


def _worker(seat: Seat, answer: Snapshot | None) -> WorkerPicture:
    if answer is None:
        return WorkerPicture(
            picker=seat.picker, pid=seat.pid, state=seat.state, restarts=seat.restarts, is_answering=False
        )
    return WorkerPicture(
        picker=seat.picker,
        pid=seat.pid if seat.pid is not None else answer.pid,
        state=seat.state,
        restarts=seat.restarts,
        uptime_s=answer.uptime_s,
        requests_total=answer.requests_total,
        inflight=answer.inflight,
    )
