"""The spare worker process: warmed up and idle, so that a worker that dies is followed at once.

Importing what a worker needs takes a second or more; taking its arguments takes milliseconds.  Owns one idle process.
What it becomes, and when it is good to use, is for those who take it.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence

import msgspec

from shoal.hosts import logs
from shoal.hosts.supervisor.leash import leash

Process = asyncio.subprocess.Process


async def spawn(
    command: Sequence[str],
    env: dict[str, str],
    inherited: Sequence[int] = (),
    stdin: int = asyncio.subprocess.DEVNULL,
) -> Process:
    """Start a child on the leash of this process, its output in pipes.

    env: added to the environment.  inherited: descriptors that it gets under their own numbers.
    """
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **env},
        start_new_session=True,
        pass_fds=tuple(inherited),
        preexec_fn=leash(),
    )


class Spare:
    """At most one idle process.

    command: what it is started with; none is kept without.  env, inherited: see `spawn`.
    """

    def __init__(self, command: Sequence[str], env: dict[str, str], inherited: Sequence[int] = ()) -> None:
        self._command = command
        self._env = env
        self._inherited = inherited
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._log = logs.get("supervisor")

    @property
    def pid(self) -> int | None:
        """The idle process, if there is one."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def refill(self) -> None:
        """Start one unless there is one, or none is to be kept."""
        async with self._turn:
            if not self._command or self.pid is not None:
                return
            try:
                self._process = await spawn(self._command, self._env, self._inherited, asyncio.subprocess.PIPE)
            except OSError as error:
                self._log.warning("no spare worker for now", why=error)

    def take(self, arguments: Sequence[str]) -> Process | None:
        """Let it go on with these arguments and give it away; None when there is none."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None or process.stdin is None:
            return None
        process.stdin.write(msgspec.json.encode(list(arguments)) + b"\n")
        process.stdin.close()
        return process

    async def drop(self) -> None:
        """End the idle process."""
        async with self._turn:
            process, self._process = self._process, None
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
