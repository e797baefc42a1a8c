"""`shoal picker`: one picker worker and its fleet keeper in one process, for an Envoy or gateway that is not ours.

The gateway dials gRPC over TCP (ext_proc, access log, health); the fleet's events go straight to the router.  The admin
API is that of a pool with one worker, so the operator's verbs work alike.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic

import grpc
import grpc.aio
import msgspec
from aiohttp import web
from grpc_health.v1 import health_pb2_grpc

from shoal import __version__
from shoal.hosts import logs
from shoal.hosts.admin import ADMIN_SOCKET, PoolPicture, RunDir, default_for
from shoal.hosts.extproc.service import LiveCalls, serve, set_serving
from shoal.hosts.extproc.worker import Worker, parser
from shoal.hosts.filewatch import read_small
from shoal.hosts.fleet import FleetKeeper, Source
from shoal.hosts.supervisor.answers import PoolAnswers, Seat
from shoal.hosts.supervisor.configuration import Configuration
from shoal.hosts.supervisor.configured import ConfiguredBackends
from shoal.hosts.supervisor.dialling import BACKENDS, tell_workers
from shoal.hosts.supervisor.inputs import Inputs, inputs_of
from shoal.hosts.supervisor.link import WorkerLink
from shoal.hosts.supervisor.loads import load_warnings
from shoal.hosts.supervisor.named import named_sources
from shoal.hosts.supervisor.orders import FleetOrders
from shoal.hosts.supervisor.ports import check_port
from shoal.hosts.supervisor.preflight import preflight
from shoal.hosts.supervisor.server import AdminServer
from shoal.hosts.supervisor.settings import hash_key_of, needs_new_workers, targets_of
from shoal.hosts.supervisor.waiting import call_roll
from shoal.hosts.workerpages import WorkerAdmin
from shoal.kernel import ConfigError
from shoal.pool import Endpoint
from shoal.routing import Configured, Event
from shoal.routing.commands import Cut
from shoal.routing.config import RouterConfig
from shoal.routing.events import EndpointJoined

NOTHING_TO_PICK = "nothing to pick from; name engines with --backend URL, --endpoints FILE or in --config-file"

_WORKER_SOCKET = "w0.sock"
_FIRST_REPORT_S, _REPORT_S = 1.0, 5.0
_LOOK_S = 0.1

_log = logs.get("picker")


class PickerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `shoal picker`.

    cert_dir: directory with `tls.crt` and `tls.key`, None for plain gRPC.  metrics_port: 0 for none.
    """

    backends: tuple[str, ...] = ()
    backends_file: Path | None = None
    config: Path | None = None
    host: str = "127.0.0.1"
    grpc_port: int = 9002
    health_port: int = 9003
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9090
    cert_dir: Path | None = None
    run_dir: Path | None = None
    seed: int = 0
    drain_s: float = 30.0

    def check(self) -> None:
        """Raise ConfigError when the flags make no picker."""
        if not (self.backends or self.backends_file or self.config):
            raise ConfigError(NOTHING_TO_PICK)


async def run_picker(options: PickerOptions) -> int:
    """Run the picker until a signal ends it; returns the exit status.  Raises ConfigError before anything starts."""
    options.check()
    configuration = Configuration(options.config)
    preflight(configuration.config.pool)
    backends = ConfiguredBackends(targets_of(configuration.config.pool))
    sources = named_sources(options.backends, options.backends_file, configuration.config)
    if not (sources or configuration.config.pool.backends):
        raise ConfigError(NOTHING_TO_PICK)
    credentials = _credentials(options.cert_dir)
    for host, port, flag in (
        (options.host, options.grpc_port, "--grpc-port"),
        (options.host, options.health_port, "--grpc-health-port"),
        (options.metrics_host, options.metrics_port, "--metrics-port"),
    ):
        if port:
            check_port(host, port, flag)
    run_dir = RunDir(options.run_dir or default_for(options.grpc_port))
    run_dir.open()
    try:
        await StandalonePicker(options, configuration, [*sources, backends], backends, credentials, run_dir.path).run()
    finally:
        run_dir.close()
    return 0


class StandalonePicker(Worker):
    """A worker that serves over TCP and keeps its own fleet.  Also what an operator may do to it."""

    def __init__(
        self,
        options: PickerOptions,
        configuration: Configuration,
        sources: Sequence[Source],
        backends: ConfiguredBackends,
        credentials: grpc.ServerCredentials | None,
        run_dir: Path,
    ) -> None:
        flags = ["--socket", "", "--admin", str(run_dir / _WORKER_SOCKET), "--seed", str(options.seed)]
        flags += ["--hash-key", hash_key_of(configuration.config.pool), "--backends", str(run_dir / BACKENDS)]
        # What it reads how engines are dialled from is there before it looks.
        tell_workers(run_dir, {}, {})
        super().__init__(parser().parse_args(flags), configuration.config, configuration.text)
        self.picker.is_behind_gateway = True
        self._picker_options = options
        self._configuration = configuration
        self._configured = backends
        self._endpoints: dict[str, Endpoint] = {}
        self._credentials = credentials
        self._run_dir = run_dir
        self._started_at = monotonic()
        self._refused = self._stuck = ""
        self._inputs = Inputs(lambda: inputs_of(options.config, options.backends_file, configuration.config))
        self._keeper = FleetKeeper(sources, self._take, busy=self._is_busy, seed=options.seed)
        self._live = LiveCalls()
        self._link = WorkerLink(run_dir / _WORKER_SOCKET)
        self._answers = PoolAnswers(self._seats, self._about, waiting=lambda: call_roll(self._keeper).waiting)
        self._admin = AdminServer(self._answers, self, FleetOrders(self._keeper))

    async def run(self) -> None:
        """Serve until a signal ends it."""
        options = self._picker_options
        limits = self._configuration.config.pool.limits
        server, self._health = serve(
            self.picker,
            [self._address],
            max_body_bytes=limits.max_body_bytes,
            credentials=self._credentials,
            live=self._live,
        )
        health_server = self._health_server()
        admin = WorkerAdmin(self.picker, self._drain, self._on_event, self.sharing, self._cut, self.kv)
        pages = web.AppRunner(admin.app(), access_log=None)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._open_admin(pages)
            await self.sharing.start()
            await server.start()
            if health_server is not None:
                await health_server.start()
            self._say_what_is_open()
            await self._keeper.start()
            tasks = self._watchers()
            await self._stopped.wait()
            _log.info("draining", up_to_s=options.drain_s)
            await set_serving(self._health, False)
            await server.stop(grace=options.drain_s)
        finally:
            for task in tasks:
                task.cancel()
            self.sharing.close()
            await self._keeper.close()
            self.kv.close()
            await self._link.close()
            await self._admin.stop()
            await pages.cleanup()
            await server.stop(grace=None)
            if health_server is not None:
                await health_server.stop(grace=None)
            self.driver.close()
            self._tracer.close()
            _log.info("stopped")

    # ------------------------------------------------------------------ operations

    async def reload(self) -> str:
        """Read the configuration again; a bad one is refused and the old one goes on.  Raises ConfigError."""
        try:
            text, config = await asyncio.to_thread(self._configuration.candidate)
            await asyncio.to_thread(preflight, config.pool)
            targets = await asyncio.to_thread(targets_of, config.pool)
        except ConfigError as error:
            self._refused = str(error)
            _log.error("configuration refused, the old one goes on", why=error)
            raise
        self._configuration.accept(text, config)
        self._configured.replace(targets)
        self._take([Configured(text)])
        self._refused = ""
        source = self._configuration.source
        _log.info("configuration accepted", source=source)
        stuck = stuck_since(self._configuration.at_start, config)
        self._stuck = f"these settings take effect at the next start: {', '.join(stuck)}" if stuck else ""
        if self._stuck:
            _log.warning("these settings take effect at the next start", settings=", ".join(stuck))
        return f"configuration of {source} is in use" + (f"; at the next start: {', '.join(stuck)}" if stuck else "")

    async def upgrade(self) -> str:
        """Refuse: one process cannot replace itself without its gateway noticing."""
        raise ConfigError("a picker alone is upgraded by starting a second one and draining this (SIGTERM)")

    def why_not_ready(self) -> str:
        """Return "" when a request would be placed now, else what is missing."""
        roll = call_roll(self._keeper)
        return "" if roll.ready else roll.reasons

    # ------------------------------------------------------------------ inside

    def _take(self, batch: Sequence[Event]) -> None:
        joined = {event.endpoint.id: event.endpoint for event in batch if isinstance(event, EndpointJoined)}
        if joined:
            targets = self._keeper.targets()
            present = {name: each for name, each in {**self._endpoints, **joined}.items() if name in targets}
            self._endpoints = present
            tell_workers(self._run_dir, present, targets)
        for event in batch:
            self._on_event(event)
            self.driver.feed(event)

    def _cut(self, commands: Mapping[str, Cut]) -> int:
        return self._live.cut(commands)

    def _is_busy(self, endpoint_id: str) -> bool:
        return self.driver.router.inflight_at(endpoint_id) > 0

    def _seats(self) -> list[Seat]:
        return [Seat(picker="0", incarnation="0.1", link=self._link, pid=os.getpid(), state="serving")]

    def _about(self) -> PoolPicture:
        roll = call_roll(self._keeper)
        warnings = [*self._configuration.config.warnings]
        warnings += [each for each in ("" if roll.ready else roll.summary, self._refused, self._stuck) if each]
        warnings += self._inputs.warnings
        warnings += load_warnings(self._keeper.reports())
        return PoolPicture(
            url=f"grpc://{self._address}",
            pid=os.getpid(),
            version=__version__,
            at_s=monotonic() - self._started_at,
            run_dir=str(self._run_dir),
            is_ready=roll.ready > 0,
            warnings=warnings,
        )

    @property
    def _address(self) -> str:
        return f"{_bracketed(self._picker_options.host)}:{self._picker_options.grpc_port}"

    def _say_what_is_open(self) -> None:
        options = self._picker_options
        _log.info("open to the gateway", address=self._address, tls="on" if self._credentials else "off")
        if options.metrics_port:
            _log.info(
                "open to scrapers", metrics=f"http://{_bracketed(options.metrics_host)}:{options.metrics_port}/metrics"
            )
        _log.info("open to this user", admin=self._run_dir)

    async def _open_admin(self, pages: web.AppRunner) -> None:
        options = self._picker_options
        await pages.setup()
        await web.UnixSite(pages, str(self._run_dir / _WORKER_SOCKET)).start()
        await self._admin.listen_unix(self._run_dir / ADMIN_SOCKET)
        if options.metrics_port:
            await self._admin.listen_tcp(options.metrics_host, options.metrics_port)

    def _health_server(self) -> grpc.aio.Server | None:
        options = self._picker_options
        if not options.health_port:
            return None
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        server.add_insecure_port(f"{_bracketed(options.host)}:{options.health_port}")
        return server

    def _watchers(self) -> list[asyncio.Task[None]]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        reloads: set[asyncio.Task[None]] = set()

        def reload_soon() -> None:
            task = loop.create_task(self._reload_quietly())
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        loop.add_signal_handler(signal.SIGHUP, reload_soon)
        work = [self._follow_configuration(), self._follow_readiness(), self._inputs.run()]
        if self._keys is not None:
            work.append(self._keys.watch())
        return [asyncio.create_task(each) for each in work]

    async def _follow_configuration(self) -> None:
        async for _ in self._configuration.changes():
            await self._reload_quietly()

    async def _reload_quietly(self) -> None:
        with contextlib.suppress(ConfigError):  # it is logged, and the old configuration goes on
            await self.reload()

    async def _follow_readiness(self) -> None:
        """Serve as soon as there is something to pick; say why not until then."""
        loop = asyncio.get_running_loop()
        is_told = False
        report_at = loop.time() + _FIRST_REPORT_S
        while True:
            roll = call_roll(self._keeper)
            if roll.ready and not is_told:
                is_told = True
                await self.sharing.begin(())
                await set_serving(self._health, True)
                share = f" ({roll.share})" if roll.waiting else ""
                print(f"shoal picker is ready: {self._address}{share}", flush=True)
            elif not roll.ready and loop.time() >= report_at:
                _log.info("waiting for an endpoint to pick", why=roll.reasons)
                report_at = loop.time() + _REPORT_S
            await asyncio.sleep(_LOOK_S)


def stuck_since(before: RouterConfig, after: RouterConfig) -> list[str]:
    """Return the settings of `after` that only a new picker reads.  before: the configuration of the start."""
    found = needs_new_workers(before.pool, after.pool)
    found += ["sharing"] if after.pool.sharing != before.pool.sharing else []
    return found + (["dataLayer.discovery"] if after.discovery != before.discovery else [])


def _credentials(cert_dir: Path | None) -> grpc.ServerCredentials | None:
    """Read `tls.crt` and `tls.key`.  Raises ConfigError."""
    if cert_dir is None:
        return None
    try:
        pair = (read_small(cert_dir / "tls.key"), read_small(cert_dir / "tls.crt"))
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}", source="--cert-path") from error
    return grpc.ssl_server_credentials([pair])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
