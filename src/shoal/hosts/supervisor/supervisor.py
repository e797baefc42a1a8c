"""A pool from its first line to its last: what is started in which order, and how it all ends.

Owns the life of the whole.  The parts and who knows whom are `parts`; what an operator may do is `operations`.
"""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any

import msgspec

from shoal.hosts import logs
from shoal.hosts.admin import ADMIN_SOCKET, RunDir, default_for
from shoal.hosts.supervisor.announcement import what_is_open
from shoal.hosts.supervisor.answers import PoolAnswers
from shoal.hosts.supervisor.configuration import Configuration
from shoal.hosts.supervisor.named import named_sources
from shoal.hosts.supervisor.operations import PoolOperations
from shoal.hosts.supervisor.options import NOTHING_TO_SERVE, Options
from shoal.hosts.supervisor.orders import FleetOrders
from shoal.hosts.supervisor.parts import Parts, build
from shoal.hosts.supervisor.ports import check_port, free_port
from shoal.hosts.supervisor.preflight import preflight
from shoal.hosts.supervisor.server import AdminServer
from shoal.hosts.supervisor.settings import drain_s_of, ground_of
from shoal.hosts.supervisor.vitals import Vitals, standing_warnings
from shoal.kernel import ConfigError, ShoalError

METRICS_HOST = "127.0.0.1"
"""Metrics name models and tenants: they are for this machine, never for the network."""

_REPORT_S = 5.0
_LOOK_S = 0.05
_COUNTS_S = 2.0

_log = logs.get("supervisor")


async def run(options: Options) -> int:
    """Run a pool until a signal ends it; returns the exit status.

    Raises ConfigError, in one line, before anything is started.
    """
    options.check()
    configuration = Configuration(options.config)
    preflight(configuration.config.pool)
    sources = named_sources(options.backends, options.backends_file, configuration.config)
    if not (sources or options.engines or configuration.config.pool.backends):
        raise ConfigError(NOTHING_TO_SERVE)
    ground = ground_of(options, configuration.config.pool)
    if not ground.port:
        ground = msgspec.structs.replace(ground, port=free_port(ground.host))
    check_port(ground.host, ground.port, "--port")
    if ground.metrics_port:
        check_port(METRICS_HOST, ground.metrics_port, "--metrics-port")
    run_dir = RunDir(options.run_dir or default_for(ground.port))
    run_dir.open()
    try:
        pool = RunningPool(build(options, ground, run_dir.path, configuration, sources))
        await pool.run()
    finally:
        run_dir.close()
    return 0


class RunningPool:
    """The parts of a pool, running from `run` to its return."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._vitals = Vitals(parts)
        self._operations = PoolOperations(parts, self._vitals)
        self._answers = PoolAnswers(
            parts.workers.seats,
            self._vitals.about,
            self._vitals.families,
            lambda: self._vitals.roll().waiting,
            parts.workers.bequests,
        )
        self._admin = AdminServer(self._answers, self._operations, FleetOrders(parts.keeper))
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._failure: ShoalError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        parts.workers.on_lost(self._answers.lost)
        parts.pulse.on_reading(self._answers.saw)

    async def run(self) -> None:
        """Start everything, wait for a signal, drain; nothing is left behind however it ends.

        Raises ShoalError when the pool cannot be started or its port cannot be opened.
        """
        self._listen_to_signals()
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        starting = asyncio.create_task(self._start(), name="start")
        try:
            await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await stopping
                await self._drain()
            else:
                _log.info("stopped before the start was done")
        finally:
            for task in (stopping, starting):
                task.cancel()
            await asyncio.gather(stopping, starting, return_exceptions=True)
            await self._end()
        if self._failure is not None:
            raise self._failure

    async def _start(self) -> None:
        parts = self._parts
        for line, fields in what_is_open(parts):
            _log.info(line, **fields)
        for warning in standing_warnings(parts):
            _log.warning(warning)
        parts.engines.start()
        parts.workers.start()
        await self._admin.listen_unix(parts.run_dir / ADMIN_SOCKET)
        if parts.ground.metrics_port:
            await self._admin.listen_tcp(METRICS_HOST, parts.ground.metrics_port)
        await parts.plane.start()
        await parts.keeper.start()
        self._spawn(parts.pulse.run(), "pulse")
        self._spawn(self._vitals.run(), "vitals")
        self._spawn(self._vitals.inputs.run(), "inputs")
        self._spawn(self._keep_counts(), "counts")
        self._spawn(parts.plane.follow_files(), "certificates")
        self._spawn(self._follow_configuration(), "configuration")
        self._spawn(self._let_clients_in(), "ready")

    async def _let_clients_in(self) -> None:
        """Open the port once every worker serves, say when the first endpoint is ready, and count until all are."""
        loop, workers = asyncio.get_running_loop(), self._parts.workers
        report_at = loop.time() + _REPORT_S
        while workers.in_service < len(workers.pickers):
            if loop.time() >= report_at:
                _log.info("not ready yet", workers=f"{workers.in_service} of {len(workers.pickers)} in service")
                report_at = loop.time() + _REPORT_S
                if workers.in_service:  # better a part of them than nobody
                    break
            await asyncio.sleep(_LOOK_S)
        try:
            await self._parts.plane.open()
        except ShoalError as error:
            self._failure = error
            self._stop.set()
            return
        while self._vitals.why_not_ready():
            if loop.time() >= report_at:
                _log.info("not ready yet", endpoints=self._vitals.roll().share)
                report_at = loop.time() + _REPORT_S
            await asyncio.sleep(_LOOK_S)
        roll = self._vitals.roll()
        print(f"shoal is ready: {self._parts.url}" + (f" ({roll.share})" if roll.waiting else ""), flush=True)
        while roll.waiting:
            await asyncio.sleep(_LOOK_S)
            before, roll = roll, self._vitals.roll()
            if roll.share != before.share:
                _log.info("endpoints ready", share=roll.share)

    async def _keep_counts(self) -> None:
        while True:
            await asyncio.sleep(_COUNTS_S)
            await self._answers.read_counts()

    async def _follow_configuration(self) -> None:
        async for _ in self._parts.configuration.changes():
            await self._reload()

    async def _reload(self) -> None:
        with contextlib.suppress(ConfigError):  # it is logged, and the old configuration goes on
            await self._operations.reload()

    async def _upgrade(self) -> None:
        await self._operations.upgrade()

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._spawn(self._reload(), "reload"))
        loop.add_signal_handler(signal.SIGUSR2, lambda: self._spawn(self._upgrade(), "upgrade"))

    def _asked_to_stop(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def _drain(self) -> None:
        """Accept no more, finish what is in flight; a second signal ends the wait."""
        drain_s = drain_s_of(self._parts.options, self._parts.configuration.config.pool)
        _log.info("draining; a second Ctrl-C stops at once", up_to_s=drain_s)
        draining = asyncio.create_task(self._parts.plane.drain(drain_s), name="drain")
        hurry = asyncio.create_task(self._stop_now.wait(), name="hurry")
        try:
            await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if not draining.done():
                _log.warning("stopping at once; requests in flight are cut off")
            elif left := draining.result():
                _log.warning("requests were cut off after the drain time", requests=left)
        finally:
            draining.cancel()
            hurry.cancel()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        parts = self._parts
        await _quietly(parts.keeper.close())
        await asyncio.gather(
            *(_quietly(part.stop()) for part in (parts.plane, parts.workers, parts.engines, self._admin))
        )
        _log.info("stopped")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("bug in the supervisor", task=task.get_name(), error=repr(error))


async def _quietly(work: Coroutine[Any, Any, object]) -> None:
    """Do one step of the ending; whatever goes wrong must not keep the others from being done."""
    try:
        await work
    except Exception as error:
        _log.error("could not end a part of the pool", error=repr(error))
