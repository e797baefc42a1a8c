"""`shoal engine` as child processes that a scenario may kill, restart and question."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.hosts.supervisor.pool_rig import until


class EngineProcess:
    """One engine.  It keeps its port over a restart; what it prints goes to `log`."""

    def __init__(self, log: Path, flags: Sequence[str] = ()) -> None:
        self.log = log
        self.port = 0
        self._flags = tuple(flags)
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(timeout=30.0)
        self.start()

    def start(self, *more: str) -> None:
        """Start it; `listening` says when it is there."""
        command = [sys.executable, "-m", "shoal.cli", "engine", "--port", str(self.port), "--record", "2000"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen([*command, *self._flags, *more], stdout=log, stderr=log)

    def listening(self) -> "EngineProcess":
        """Wait for its port."""
        said = until(lambda: re.search(r"listening on https?://127.0.0.1:(\d+)", self.log.read_text()), 90.0)
        assert said is not None
        self.port = int(said[1])
        return self

    def kill(self) -> None:
        """End it as the kernel does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End it for good."""
        self.kill()
        self._http.close()

    def heal(self) -> None:
        """Make it whole again: running, and without faults."""
        if self._process is not None and self._process.poll() is not None:
            self.start()
            self.listening()
        self.fault(fail_rate=0.0, fail_status=500, cut_after=None, stall_after=None, is_healthy=True)

    @property
    def address(self) -> str:
        """Its `ip:port`."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{self.address}"

    def samples(self) -> dict[str, float]:
        """Its metrics page as name -> sum over the label sets."""
        return totals(self._http.get(f"{self.url}/metrics").text)

    def busy(self) -> float:
        """Requests that it computes or holds waiting."""
        found = self.samples()
        return found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]

    def arrivals(self, path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        """What arrived at `path`, oldest first."""
        return [each for each in self._http.get(f"{self.url}/requests").json() if each["path"] == path]

    def post(self, asked: dict[str, Any], key: str) -> None:
        """One chat request past every pool."""
        headers = {"authorization": f"Bearer {key}"}
        self._http.post(f"{self.url}/v1/chat/completions", json=asked, headers=headers).raise_for_status()

    def fault(self, **fields: object) -> None:
        """Change its faults."""
        self._http.post(f"{self.url}/faults", json=fields).raise_for_status()


@contextmanager
def engines(directory: Path, *flags: Sequence[str]) -> Iterator[list[EngineProcess]]:
    """Start one engine per set of flags, all at once; all are gone at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        started = []
        for number, each in enumerate(flags):
            engine = EngineProcess(directory / f"engine-{number}.log", ["--seed", str(number), *each])
            stack.callback(engine.close)
            started.append(engine)
        yield [engine.listening() for engine in started]


def totals(page: str) -> dict[str, float]:
    """A metrics page as name -> sum over the label sets."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def backends(started: Sequence[EngineProcess]) -> list[str]:
    """The flags of `shoal up` that name these engines."""
    return [flag for engine in started for flag in ("--backend", engine.url)]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
