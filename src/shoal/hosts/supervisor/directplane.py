"""The direct data plane: the workers accept clients themselves, on one port that they share.

Owns the listening sockets, one per slot, which outlive the processes that accept from them: what waits in a queue while
a worker is replaced or restarted is accepted by the next.  What a worker does is `hosts.direct`.
"""

import contextlib
import socket
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from shoal.hosts import logs
from shoal.hosts.backends import context_of
from shoal.hosts.direct.certificates import Certificate
from shoal.hosts.supervisor.dialling import BACKENDS, Targets, groups_of, marks_of, tell_workers
from shoal.hosts.supervisor.link import WorkerLink, WorkerSilent
from shoal.hosts.supervisor.merging import Family
from shoal.hosts.supervisor.ports import hold_port, shared_sockets
from shoal.hosts.supervisor.settings import Ground
from shoal.hosts.supervisor.workers import Workers
from shoal.pool import Endpoint
from shoal.routing.config import RouterConfig
from shoal.routing.settings import PoolSettings


class ClientsDoor:
    """The way of clients to the workers: a listening socket per slot, which a process accepts from once it is told to.

    Raises ConfigError when the port cannot be had.
    """

    package = "shoal.hosts.direct"

    def __init__(self, run_dir: Path, ground: Ground, pickers: Sequence[str]) -> None:
        self.is_open = False
        self._backends = run_dir / BACKENDS
        # Bound for processes that share it and listened on by nobody before `admit`; see `hold_port`.
        self._holder = hold_port(ground.host, ground.port)
        self._sockets = dict(zip(pickers, shared_sockets(ground.host, ground.port, len(pickers)), strict=True))

    @property
    def inherited(self) -> Sequence[int]:
        """Every slot's socket: which slot a spare process takes is not known before."""
        return tuple(each.fileno() for each in self._sockets.values())

    def flags(self, picker: str, incarnation: str) -> list[str]:
        """The slot's socket, and how engines are dialled."""
        return ["--listen", f"fd:{self._sockets[picker].fileno()}", "--backends", str(self._backends), "--held"]

    async def admit(self, picker: str, incarnation: str, link: WorkerLink) -> None:
        """Have the process accept from its slot's socket, once the pool is open."""
        if self.is_open:
            await link.serve()

    def forget(self, incarnation: str) -> None:
        """Nothing is left of a process but its socket, which the next one takes."""

    def shut(self) -> None:
        """Refuse further connections, in whichever process the sockets are open."""
        for each in self._sockets.values():
            with contextlib.suppress(OSError):  # nobody listened on it yet
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the port back."""
        for each in (*self._sockets.values(), *([self._holder] if self._holder is not None else [])):
            each.close()


class DirectPlane:
    """The workers as a data plane; a `Plane`.

    door: what the workers were made with.  targets: asked for the targets behind the endpoints.
    """

    def __init__(
        self, config: RouterConfig, door: ClientsDoor, workers: Workers, run_dir: Path, targets: Callable[[], Targets]
    ) -> None:
        self._pool = config.pool
        self._door = door
        self._workers = workers
        self._run_dir = run_dir
        self._targets = targets
        self._log = logs.get("supervisor")

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start with an empty fleet and a closed door.  Raises ConfigError when the certificate cannot be used."""
        _check_certificate(self._pool)
        tell_workers(self._run_dir, {}, {})

    async def open(self) -> None:
        """Let clients in."""
        self._door.is_open = True
        for process in self._workers.processes:
            if process.ready.is_set():
                try:
                    await process.admit()
                except WorkerSilent as error:  # it ended just now: its successor is let in when it knows the fleet
                    self._log.warning("a worker could not be let in", picker=process.picker, why=error)

    async def drain(self, timeout_s: float) -> int:
        """Accept no more, have the workers finish and end; returns how many requests were left."""
        self._door.shut()
        return await self._workers.drain(timeout_s)

    async def stop(self) -> None:
        """Refuse clients; the workers are ended by who owns them."""
        self._door.shut()

    # ------------------------------------------------------------------ how it is

    @property
    def is_tls(self) -> bool:
        """Whether clients speak TLS."""
        return self._pool.tls is not None

    @property
    def why_not_serving(self) -> str:
        """Why clients cannot connect, "" when they can."""
        return "" if self._door.is_open else "the port is not open yet"

    @property
    def warnings(self) -> Sequence[str]:
        """Nothing: what goes wrong in a worker stands in its own figures."""
        return ()

    def families(self) -> Sequence[Family]:
        """Nothing beside what the workers count."""
        return ()

    async def look(self) -> None:
        """There is no process beside the workers to be looked at."""

    # ------------------------------------------------------------------ what it is told

    def configure(self, config: RouterConfig) -> None:
        """Refuse a certificate that cannot be used; the workers take the rest from their own copy."""
        _check_certificate(config.pool)
        self._pool = config.pool

    def needs_restart(self, before: PoolSettings, after: PoolSettings) -> list[str]:
        """Return nothing: workers take over what they can, and are replaced for the rest."""
        return []

    def needs_new_workers(self, before: PoolSettings, after: PoolSettings) -> list[str]:
        """Return `tls` when the port changes between TLS and none."""
        return [] if (before.tls is None) == (after.tls is None) else ["tls"]

    async def show(self, endpoints: dict[str, Endpoint], waits: bool) -> bool:
        """Write how the endpoints are dialled; workers read it at once when they meet one.  Raises ConfigError."""
        targets = self._targets()
        for group in groups_of(endpoints, targets).values():
            context_of(group)
        tell_workers(self._run_dir, endpoints, targets)
        return True

    def marks(self) -> dict[str, Hashable]:
        """Return keys and authorities by endpoint id."""
        return marks_of(self._targets())

    async def follow_files(self) -> None:
        """Workers follow certificates and roots themselves."""


def _check_certificate(pool: PoolSettings) -> None:
    if pool.tls is not None:
        Certificate(pool.tls)
