"""`shoal picker` as a process, with embedded engines and whatever gateway a test puts before it."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.hosts.supervisor import free_port
from tests.hosts.supervisor.pool_rig import until


class Alone:
    """A picker process with its engines.

    more: further flags of `shoal picker`.
    """

    def __init__(self, directory: Path, engines: int = 1, more: Sequence[str] = ()) -> None:
        self.directory = directory
        self.flags = ["--run-dir", str(directory / "run")]
        self.port, self.health_port = free_port(), free_port()
        names = [f"engine-{i}" for i in range(engines)]
        self.engines = [self._start(name, ["engine", "--port", "0"]) for name in names]
        self.engine_urls = [self._listening(name) for name in names]
        ports = ["--grpc-port", str(self.port), "--grpc-health-port", str(self.health_port), "--metrics-port", "0"]
        backends = [flag for url in self.engine_urls for flag in ("--backend", url)]
        self.picker = self._start("picker", ["picker", *backends, *ports, *self.flags, *more])

    def _listening(self, name: str) -> str:
        found = until(lambda: re.search(r"listening on (http://\S+)", self.said(name)))
        assert found is not None
        return found[1]

    def wait_ready(self) -> None:
        until(lambda: "shoal picker is ready" in self.said("picker"), why=lambda: self.said("picker"))

    def said(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "shoal.cli", *command]
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def end(self) -> None:
        for process in (self.picker, *self.engines):
            process.kill()
            process.wait(20.0)
