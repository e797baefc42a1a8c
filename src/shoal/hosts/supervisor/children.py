"""One supervised child process: start, watch, restart with backoff, stop.

Owns the life of a process and the lines it prints.  What the process is for, and when it is good to use, is for
those who own the child (`workers`, `engines`).
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import Any

from shoal.hosts import logs
from shoal.hosts.supervisor.backoff import Backoff
from shoal.hosts.supervisor.spares import spawn

LONGEST_LINE_BYTES = 64 * 1024
"""A line longer than this is passed on in pieces, so that a child cannot fill our memory."""

_KEPT_LINES = 4


class Child:
    """A child that is started again whenever it ends, until `stop`.

    name: for log lines.  command: called before each start, gives argv.  on_line: gets each line of stdout.
    on_start, on_exit: told after each start and each end.  env: added to the environment.  inherited: descriptors that
    it gets.  backoff: waits between starts.  pass_line: gets each line of stderr, to show it to the operator.  spare:
    gives a process that waits to become this child, if there is one, for argv.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[], Sequence[str]],
        *,
        on_line: Callable[[str], None] | None = None,
        on_start: Callable[["Child"], Coroutine[Any, Any, None]] | None = None,
        on_exit: Callable[["Child"], None] | None = None,
        env: dict[str, str] | None = None,
        inherited: Sequence[int] = (),
        backoff: Backoff | None = None,
        pass_line: Callable[[str], None] | None = None,
        spare: Callable[[Sequence[str]], asyncio.subprocess.Process | None] = lambda _: None,
    ) -> None:
        self.name = name
        self.restarts = 0
        self.pid: int | None = None
        self._command = command
        self._on_line = on_line
        self._on_start = on_start
        self._on_exit = on_exit
        self._env = env or {}
        self._inherited = inherited
        self._backoff = backoff or Backoff()
        self._pass_line = pass_line or _show
        self._spare = spare
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._log = logs.get("supervisor")

    @property
    def is_running(self) -> bool:
        """Whether its process lives right now."""
        return self._process is not None and self._process.returncode is None

    def start(self) -> None:
        """Begin to supervise; returns at once."""
        self._is_stopping = False
        self._task = asyncio.create_task(self._supervise(), name=f"child {self.name}")
        self._task.add_done_callback(self._report_bug)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it lives."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def let_end(self) -> None:
        """Do not start it again when it ends by itself."""
        self._is_stopping = True

    async def ended(self, timeout_s: float) -> bool:
        """Wait until supervision is over, after `let_end`; returns whether it is."""
        if self._task is None:
            return True
        done, _ = await asyncio.wait([self._task], timeout=timeout_s)
        return bool(done)

    async def stop(self, grace_s: float = 5.0) -> None:
        """End it for good: SIGTERM, then SIGKILL after `grace_s`.  Returns when the process is gone."""
        self._is_stopping = True
        if self._task is None:
            return
        if self.is_running:
            self.signal(signal.SIGTERM)
            done, _ = await asyncio.wait([self._task], timeout=grace_s)
            if not done:
                self._log.warning("child did not stop in time, killed", child=self.name, pid=self.pid)
                self.signal(signal.SIGKILL)
        else:
            self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None

    async def _supervise(self) -> None:
        while not self._is_stopping:
            began = monotonic()
            code = await self._run_once()
            if self._is_stopping:
                break
            wait_s = self._backoff.after_run(monotonic() - began)
            self._log.warning(
                "child ended, restarting",
                child=self.name,
                ended=describe_exit(code),
                wait_s=wait_s,
                restarts=self.restarts,
                **({"last_line": self._last_lines[-1]} if self._last_lines else {}),
            )
            await asyncio.sleep(wait_s)
            self.restarts += 1

    def _report_bug(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("bug while supervising a child", child=self.name, error=repr(error))

    async def _run_once(self) -> int | None:
        self._last_lines.clear()
        try:
            process = await self._spawn()
        except OSError as error:
            self._last_lines.append(f"cannot start: {error}")
            return None
        self._process, self.pid = process, process.pid
        readers = [
            asyncio.create_task(self._read(process.stdout, self._on_line or self._pass_line)),
            asyncio.create_task(self._read(process.stderr, self._pass_line)),
        ]
        starter = asyncio.create_task(self._on_start(self)) if self._on_start is not None else None
        if starter is not None:
            starter.add_done_callback(self._report_bug)
        try:
            await process.wait()
            if starter is not None and not starter.done():
                starter.cancel()
            await asyncio.wait(readers, timeout=1.0)  # a grandchild may hold the pipe open
        finally:
            for task in [*readers, *([starter] if starter is not None else [])]:
                task.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()
            self.pid = None
            if self._on_exit is not None:
                self._on_exit(self)
        return process.returncode

    async def _spawn(self) -> asyncio.subprocess.Process:
        command = self._command()
        return self._spare(command) or await spawn(command, self._env, self._inherited)

    async def _read(self, stream: asyncio.StreamReader | None, take: Callable[[str], None]) -> None:
        if stream is None:
            return
        rest = b""
        while chunk := await stream.read(LONGEST_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._take(line, take)
        if rest:
            self._take(rest, take)

    def _take(self, line: bytes, take: Callable[[str], None]) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if text.strip():
            self._last_lines.append(text.strip())
        take(text)


def describe_exit(code: int | None) -> str:
    """Say how a process ended: `exit 1`, `signal SIGKILL`, `never started`."""
    if code is None:
        return "never started"
    if code >= 0:
        return f"exit {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _show(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads our stderr any more; the child must go on
        os.write(2, f"{line}\n".encode())
