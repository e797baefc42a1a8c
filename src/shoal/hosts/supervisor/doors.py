"""How requests reach the worker processes, which come and go: through Envoy, by one unix socket per slot.

Owns the paths.  When a process is let in is decided by `workers`; the direct plane's door is `directplane`.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from shoal.hosts.supervisor.dialling import BACKENDS
from shoal.hosts.supervisor.link import WorkerLink

_POLL_S = 0.02


class Door(Protocol):
    """The way in to the workers.

    package: what `python -m` runs as a worker.  inherited: descriptors that every worker process gets.
    """

    @property
    def package(self) -> str: ...

    @property
    def inherited(self) -> Sequence[int]: ...

    def flags(self, picker: str, incarnation: str) -> list[str]:
        """Return the flags of a process that say where its requests come in."""
        ...

    async def admit(self, picker: str, incarnation: str, link: WorkerLink) -> None:
        """Let new requests of the slot reach this process, which knows the fleet.  Raises WorkerSilent."""
        ...

    def forget(self, incarnation: str) -> None:
        """Clean up after a process that ended."""
        ...

    def close(self) -> None:
        """Let nobody in any more."""
        ...


def service_socket(run_dir: Path, picker: str) -> Path:
    """Return the path that Envoy dials for a slot, whichever process serves it."""
    return run_dir / f"picker-{picker}.sock"


class PickerDoor:
    """Envoy dials one fixed path per slot, a symbolic link to the socket of the process in service.

    So Envoy's configuration never changes for a worker that is replaced.
    """

    package = "shoal.hosts.extproc"
    inherited: Sequence[int] = ()

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._linked: set[Path] = set()

    def flags(self, picker: str, incarnation: str) -> list[str]:
        """Where the process opens its own socket, and how engines are dialled."""
        return ["--socket", str(self._socket(incarnation)), "--backends", str(self._run_dir / BACKENDS)]

    async def admit(self, picker: str, incarnation: str, link: WorkerLink) -> None:
        """Let Envoy's next connection reach this process."""
        socket = self._socket(incarnation)
        while not socket.exists():
            await asyncio.sleep(_POLL_S)
        path = service_socket(self._run_dir, picker)
        fresh = path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        os.symlink(socket.name, fresh)
        os.replace(fresh, path)
        self._linked.add(path)

    def forget(self, incarnation: str) -> None:
        """Remove the socket of a process that ended."""
        self._socket(incarnation).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the paths that Envoy dials."""
        for path in self._linked:
            path.unlink(missing_ok=True)

    def _socket(self, incarnation: str) -> Path:
        return self._run_dir / f"p{incarnation}.sock"
