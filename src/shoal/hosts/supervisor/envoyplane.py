"""Our Envoy as a data plane: settings from the configuration, endpoints, its counters and log, drain.

Owns the translation of what the pool knows (targets, keys, certificate authorities, picker sockets) into Envoy's
settings.  Files and process are `hosts.envoy`.
"""

import asyncio
import re
import socket
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from time import monotonic

import msgspec

from shoal.hosts import logs
from shoal.hosts.envoy import (
    BackendTls,
    EnvoyProcess,
    EnvoySettings,
    FailureMode,
    Picker,
    loaded,
    write_certificates,
    write_endpoints,
)
from shoal.hosts.filewatch import Refusals
from shoal.hosts.supervisor.dialling import Targets, addresses_of, group_names, groups_of, marks_of, tell_workers
from shoal.hosts.supervisor.doors import service_socket
from shoal.hosts.supervisor.merging import Family
from shoal.hosts.supervisor.ports import hold_port
from shoal.hosts.supervisor.settings import Ground, envoy_settings
from shoal.kernel import ConfigError
from shoal.pool import Endpoint
from shoal.routing.config import RouterConfig
from shoal.routing.settings import PoolSettings

CERTIFICATES_S = 2.0
"""Between looks at certificate files: contents are compared, so any way of replacing them is seen."""

CONFIRM_S = 2.0
"""Longest wait until Envoy holds new endpoints; it takes a few milliseconds when all is well."""

_ENVOY_LINE = re.compile(r"\[[^]]*\]\[\d+\]\[(?P<level>\w+)\]\[(?P<part>\w+)\] (?:\[[^]]*\] )?(?P<text>.*)", re.DOTALL)

_WATCHED = (
    r"^(http\.public\.ext_proc\.failure_mode_allowed"
    r"|cluster\.(engines|pickers)\.upstream_(cx|rq_active|rq_pending)_overflow)$"
)

_LINES_PER_WINDOW = 5
_WINDOW_S = 10.0


class EnvoyPlane:
    """One Envoy in front of the pool; a `Plane`.

    ground: where it listens.  run_dir: of the pool.  pickers: ids of the worker slots.  targets: asked for the targets
    behind the endpoints.
    """

    def __init__(
        self,
        config: RouterConfig,
        ground: Ground,
        run_dir: Path,
        pickers: Sequence[str],
        targets: Callable[[], Targets],
    ) -> None:
        self._ground = ground
        self._run_dir = run_dir
        self._pickers = tuple(Picker(id=each, socket=str(service_socket(run_dir, each))) for each in pickers)
        self._targets = targets
        self._base = self._base_of(config)
        self._groups: dict[str, BackendTls] = {}
        self._is_open = self._is_live = False
        self._counts: dict[str, int] = {}
        self._port: socket.socket | None = None
        self._log = logs.get("envoy")
        self._window_at = 0.0
        self._lines = self._left_out = 0
        self.process = EnvoyProcess(self._settings(), log=self._say)

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start with an empty fleet and a closed door: what an earlier pool left in the files is nobody's any more."""
        write_endpoints(self._base.run_dir, ())
        tell_workers(self._run_dir, {}, {})
        await self.process.start()
        # Nobody may take the port before Envoy opens it, nor while a crashed one is being started again.
        self._port = hold_port(self._base.host, self._base.port)

    async def open(self) -> None:
        """Let clients in, and return when they can connect.  Raises EnvoyFailed when Envoy does not open the port."""
        self._is_open = True
        self.process.apply(self._settings())
        await self.process.listening()

    async def drain(self, timeout_s: float) -> int:
        """Accept no more, wait for requests in flight; returns how many were left."""
        return await self.process.drain(timeout_s=timeout_s)

    async def stop(self) -> None:
        """End it now."""
        await self.process.stop()
        if self._port is not None:
            self._port.close()
            self._port = None

    # ------------------------------------------------------------------ how it is

    @property
    def is_tls(self) -> bool:
        """Whether clients speak TLS."""
        return self._base.tls is not None

    @property
    def why_not_serving(self) -> str:
        """Why clients cannot connect, "" when they can."""
        return "" if self._is_live else "Envoy does not serve yet"

    @property
    def warnings(self) -> list[str]:
        """Counters that should be 0, with what they mean."""
        return [f"{self.meaning(name)}: {count} so far ({name})" for name, count in self._counts.items() if count]

    async def look(self) -> None:
        """Ask Envoy whether it serves, and for its counters; one that grew is logged."""
        self._is_live = self._is_open and await self.process.admin.is_live()
        if not self._is_live:
            return
        counts = await self.process.admin.gauges(_WATCHED)
        for name, count in counts.items():
            if count > self._counts.get(name, 0):
                self._log.warning(self.meaning(name), counter=name, total=count)
        self._counts = counts

    def meaning(self, counter: str) -> str:
        """Say what it means that a watched counter is not 0."""
        if counter.endswith("overflow"):
            return "Envoy met a limit of connections or requests"
        if self._base.failure_mode is FailureMode.CLOSED:
            return "a picker was gone when requests needed one, and new ones got 503"
        return "a picker was gone when requests needed one, and Envoy placed new ones by itself"

    def families(self) -> list[Family]:
        """Return what Envoy's admin API told last."""
        return [
            Family(
                name="shoal_envoy_live",
                help="Whether Envoy serves.",
                type="gauge",
                samples=[("", {}, float(self._is_live))],
            ),
            Family(
                name="shoal_envoy_watched",
                help="Counters of Envoy that stay 0 while all is well.",
                type="counter",
                samples=[("_total", {"name": name}, float(count)) for name, count in self._counts.items()],
            ),
        ]

    # ------------------------------------------------------------------ what it is told

    def configure(self, config: RouterConfig) -> None:
        """Hand over changed settings, without a restart.  Raises ConfigError when they cannot be used."""
        before, self._base = self._base, self._base_of(config)
        try:
            self.process.apply(self._settings())
        except Exception:
            self._base = before
            raise

    def needs_restart(self, before: PoolSettings, after: PoolSettings) -> list[str]:
        """Return the changed settings that Envoy reads at its start only."""
        is_same = after.limits.max_connections == before.limits.max_connections
        return [] if is_same else ["limits.max_connections"]

    def needs_new_workers(self, before: PoolSettings, after: PoolSettings) -> list[str]:
        """Return nothing: workers have nothing of Envoy's."""
        return []

    async def show(self, endpoints: dict[str, Endpoint], waits: bool) -> bool:
        """Write the endpoints that Envoy may send to; with `waits`, return whether it holds them."""
        targets = self._targets()
        # The group of a member that is not ready just now stays: without it Envoy would make all connections anew.
        named = group_names(targets.values())
        groups = {name: group for name, group in self._groups.items() if name in named} | groups_of(endpoints, targets)
        before, self._groups = self._groups, groups
        try:
            if self.process.settings.backend_tls != self._settings().backend_tls:
                self.process.apply(self._settings())
        except Exception:
            self._groups = before  # a group that cannot be used must not keep a reload from being accepted
            raise
        tell_workers(self._run_dir, endpoints, targets)
        version = write_endpoints(self._base.run_dir, addresses_of(endpoints, targets))
        return await loaded(self.process.admin, version, timeout_s=CONFIRM_S) if waits else True

    def marks(self) -> dict[str, Hashable]:
        """Return keys and authorities by endpoint id."""
        return marks_of(self._targets())

    async def follow_files(self) -> None:
        """Hand Envoy certificates and roots that changed, until cancelled; a pair that cannot be used is refused."""
        held = await asyncio.to_thread(write_certificates, self.process.settings)
        refusals = Refusals("certificates", self._log)
        while True:
            await asyncio.sleep(CERTIFICATES_S)
            try:
                found = await asyncio.to_thread(write_certificates, self.process.settings)
            except ConfigError as error:
                refusals.tell(error)
                continue
            refusals.forget()
            if found != held:
                held = found
                self._log.info("certificates reloaded")

    # ------------------------------------------------------------------ inside

    def _base_of(self, config: RouterConfig) -> EnvoySettings:
        return envoy_settings(config.pool, self._ground, self._run_dir / "envoy", config.response_headers)

    def _settings(self) -> EnvoySettings:
        groups = tuple(self._groups[name] for name in sorted(self._groups))
        return msgspec.structs.replace(
            self._base,
            pickers=self._pickers,
            backend_tls=groups or self._base.backend_tls,
            is_open=self._is_open,
        )

    def _say(self, line: str) -> None:
        """Pass on a line of Envoy's log, without its own stamp; a flood of lines is cut and counted."""
        if "caught ENVOY_SIGTERM" in line or self._is_flood():
            return
        found = _ENVOY_LINE.match(line)
        level, text, part = found.group("level", "text", "part") if found else ("warning", line, "")
        say = self._log.error if level in ("error", "critical") else self._log.warning
        left_out, self._left_out = self._left_out, 0
        say(text, part=part, **({"left_out": left_out} if left_out else {}))

    def _is_flood(self) -> bool:
        now = monotonic()
        if now - self._window_at > _WINDOW_S:
            self._window_at, self._lines = now, 0
        self._lines += 1
        if self._lines > _LINES_PER_WINDOW:
            self._left_out += 1
            return True
        return False
