"""A pool of our own for the length of a measurement.

Starts `shoal up` as a child on free ports and in a run directory of its own, waits for its ready line, and takes it
down again whatever happens: the child is on a leash, so not even `kill -9` of this process leaves one behind.
"""

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

import msgspec

from shoal.hosts.admin import PoolClient, PoolPicture
from shoal.hosts.load.client import Client
from shoal.hosts.load.report import LoadReport
from shoal.hosts.supervisor.leash import leash
from shoal.hosts.supervisor.ports import free_port
from shoal.kernel import ShoalError

_GOODBYES = (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)
_READY = "shoal is ready: "
_LAG = re.compile(rb'^shoal_engine_loop_lag_seconds\{[^}]*quantile="0.99"[^}]*\} (\S+)', re.MULTILINE)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class StageFailed(ShoalError):
    """The pool did not come up; holds the last lines that it wrote."""


class Stage:
    """A running pool, from `async with` to its end.

    arguments: flags of `shoal up`, without ports and run directory.  url: the public endpoint.  metrics_url: the
    page of the whole pool.  directory: its run directory, with its output in `stage.log`.
    """

    __slots__ = ("_arguments", "_child", "_temporary", "_wait_s", "directory", "metrics_url", "url")

    def __init__(self, arguments: Sequence[str], *, wait_s: float = 60.0) -> None:
        self._arguments = list(arguments)
        self._wait_s = wait_s
        self._child: subprocess.Popen[bytes] | None = None
        self._temporary = tempfile.TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True)
        self.directory = Path(self._temporary.name) / "run"
        self.url = ""
        self.metrics_url = ""

    async def __aenter__(self) -> "Stage":
        try:
            await self._start()
        except BaseException:
            await self.stop(at_once=True)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(at_once=True)

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        assert self._child is not None
        return self._child.pid

    @property
    def log(self) -> Path:
        """Where the pool's output goes."""
        return self.directory.parent / "stage.log"

    async def model(self) -> str:
        """Return the first model that the pool lists."""
        client = Client(self.url, timeout_s=10.0)
        try:
            answer = await client.get("/v1/models")
        finally:
            await client.close()
        if answer.status != 200:
            raise StageFailed(f"the pool does not list its models: {answer.failure or answer.status}")
        return msgspec.json.decode(answer.body, type=_Models).data[0].id

    async def picture(self) -> PoolPicture:
        """Return the pool as it sees itself."""
        return await asyncio.to_thread(PoolClient(self.directory).picture)

    async def complete(self, report: LoadReport) -> LoadReport:
        """Return the report with what the pool knows: requests per endpoint, and how late its engines ran."""
        endpoints = (await self.picture()).endpoints
        return msgspec.structs.replace(
            report,
            served={each.id: int(each.requests_total) for each in endpoints},
            engine_lag_p99_s=max([await engine_lag_of(each.address) for each in endpoints], default=0.0),
        )

    async def stop(self, *, at_once: bool = False) -> None:
        """Take the pool down.  at_once: give requests in flight two seconds, and not a minute."""
        child, self._child = self._child, None
        if child is not None:
            for number, wait_s in zip(_GOODBYES, (2.0 if at_once else 60.0, 5.0, 10.0), strict=True):
                child.send_signal(number)  # a second SIGTERM ends the drain
                if await _ended(child, wait_s):
                    break
        self._temporary.cleanup()

    async def _start(self) -> None:
        port, metrics_port = free_port(), free_port()
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self.directory.mkdir(mode=0o700)
        places = ["--port", str(port), "--metrics-port", str(metrics_port), "--run-dir", str(self.directory)]
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "shoal.cli", "up", *self._arguments, *places],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=leash(),
            )
        deadline = monotonic() + self._wait_s
        while monotonic() < deadline:
            for line in self.log.read_text(errors="replace").splitlines():
                if line.startswith(_READY):
                    self.url = line.removeprefix(_READY).split()[0]
                    return
            if self._child.poll() is not None:
                raise StageFailed(f"`shoal up` ended with status {self._child.returncode}: {self._tail()}")
            await asyncio.sleep(0.05)
        raise StageFailed(f"the pool was not ready after {self._wait_s:.0f} s: {self._tail()}")

    def _tail(self) -> str:
        with suppress(OSError):
            return " | ".join(self.log.read_text(errors="replace").splitlines()[-5:])
        return ""


async def engine_lag_of(address: str) -> float:
    """Return the loop lag p99 in seconds of an embedded engine over its last ten seconds, 0.0 for any other engine."""
    client = Client(f"http://{address}", timeout_s=5.0)
    try:
        answer = await client.get("/metrics")
    finally:
        await client.close()
    found = _LAG.search(answer.body)
    return float(found[1]) if found else 0.0


async def _ended(child: "subprocess.Popen[bytes]", wait_s: float) -> bool:
    deadline = monotonic() + wait_s
    while child.poll() is None:
        if monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True
