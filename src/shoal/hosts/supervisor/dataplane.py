"""Our Envoy as the supervisor handles it: settings from the configuration, endpoints, drain.

Owns the translation of what the pool knows (targets, keys, certificate authorities, picker sockets) into Envoy's
settings.  Files and process are `hosts.envoy`.
"""

import asyncio
import hashlib
import re
import socket
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from time import monotonic

import msgspec

from shoal.hosts import logs
from shoal.hosts.envoy import (
    BackendTls,
    EndpointAddress,
    EnvoyProcess,
    EnvoySettings,
    FailureMode,
    Picker,
    loaded,
    write_certificates,
    write_endpoints,
)
from shoal.hosts.fleet import Target
from shoal.hosts.supervisor.ports import hold_port
from shoal.hosts.supervisor.workers import service_socket
from shoal.kernel import ConfigError
from shoal.pool import Endpoint

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


class DataPlane:
    """One Envoy in front of the pool.

    base: settings from flags and configuration, without what this class fills in.  targets: endpoint id -> target.
    """

    def __init__(
        self,
        base: EnvoySettings,
        pickers: Sequence[str],
        run_dir: Path,
        targets: Callable[[], dict[str, Target]],
    ) -> None:
        self._pickers = tuple(Picker(id=each, socket=str(service_socket(run_dir, each))) for each in pickers)
        self._targets = targets
        self._base = base
        self._groups: dict[str, BackendTls] = {}
        self._is_open = False
        self._port: socket.socket | None = None
        self._log = logs.get("envoy")
        self._window_at = 0.0
        self._lines = self._left_out = 0
        self.process = EnvoyProcess(self._settings(), log=self._say)

    @property
    def is_tls(self) -> bool:
        """Whether clients speak TLS."""
        return self._base.tls is not None

    async def start(self) -> None:
        """Start with an empty fleet and a closed door: what an earlier pool left in the files is nobody's any more."""
        write_endpoints(self._base.run_dir, ())
        await self.process.start()
        # Nobody may take the port before Envoy opens it, nor while a crashed one is being started again.
        self._port = hold_port(self._base.host, self._base.port)

    async def open(self) -> None:
        """Let clients in, and return when they can connect.  Raises EnvoyFailed when Envoy does not open the port."""
        self._is_open = True
        self.process.apply(self._settings())
        await self.process.listening()

    async def is_live(self) -> bool:
        """Whether Envoy serves clients."""
        return self._is_open and await self.process.admin.is_live()

    def configure(self, base: EnvoySettings) -> None:
        """Hand over changed settings, without a restart.  Raises ConfigError when they cannot be used."""
        before, self._base = self._base, base
        try:
            self.process.apply(self._settings())
        except Exception:
            self._base = before
            raise

    async def show(self, endpoints: dict[str, Endpoint], waits: bool) -> bool:
        """Write the endpoints that Envoy may send to; with `waits`, return whether it holds them."""
        targets = self._targets()
        # The group of a member that is not ready just now stays: without it Envoy would make all connections anew.
        named = {_tls(target).name for target in targets.values() if target.is_tls}
        groups = {name: group for name, group in self._groups.items() if name in named}
        addresses = [_address(endpoint, targets.get(name), groups) for name, endpoint in endpoints.items()]
        before, self._groups = self._groups, groups
        try:
            if self.process.settings.backend_tls != self._settings().backend_tls:
                self.process.apply(self._settings())
        except Exception:
            self._groups = before  # a group that cannot be used must not keep a reload from being accepted
            raise
        version = write_endpoints(self._base.run_dir, addresses)
        return await loaded(self.process.admin, version, timeout_s=CONFIRM_S) if waits else True

    def marks(self) -> dict[str, Hashable]:
        """What Envoy is shown of an endpoint besides its address, by id: it is shown again when this changes."""
        return {name: (target.api_key, target.ca_file, target.host) for name, target in self._targets().items()}

    async def follow_certificates(self) -> None:
        """Hand Envoy certificates and roots that changed, until cancelled; a pair that cannot be used is refused."""
        held = await asyncio.to_thread(write_certificates, self.process.settings)
        refused = ""
        while True:
            await asyncio.sleep(CERTIFICATES_S)
            try:
                found = await asyncio.to_thread(write_certificates, self.process.settings)
            except ConfigError as error:
                if str(error) != refused:
                    refused = str(error)
                    self._log.error("certificates not reloaded, the last ones stay in use", why=error)
                continue
            refused = ""
            if found != held:
                held = found
                self._log.info("certificates reloaded")

    async def watched(self) -> dict[str, int]:
        """Return the counters that should stay 0: requests past the picker, and connections over the limit."""
        return await self.process.admin.gauges(_WATCHED)

    def meaning(self, counter: str) -> str:
        """Say what it means that a watched counter is not 0."""
        if counter.endswith("overflow"):
            return "Envoy met a limit of connections or requests"
        if self._base.failure_mode is FailureMode.CLOSED:
            return "a picker was gone when requests needed one, and new ones got 503"
        return "a picker was gone when requests needed one, and Envoy placed new ones by itself"

    async def drain(self, timeout_s: float) -> int:
        """Accept no more, wait for requests in flight; returns how many were left."""
        return await self.process.drain(timeout_s=timeout_s)

    async def stop(self) -> None:
        """End it now."""
        await self.process.stop()
        if self._port is not None:
            self._port.close()
            self._port = None

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


def _address(endpoint: Endpoint, target: Target | None, groups: dict[str, BackendTls]) -> EndpointAddress:
    """The endpoint as Envoy is shown it; its TLS group is added to `groups`."""
    group = ""
    if endpoint.is_tls:
        tls = _tls(target)
        group = tls.name
        groups[group] = tls
    key = f"Bearer {target.api_key}" if target is not None and target.api_key else ""
    return EndpointAddress(address=endpoint.address, tls=group, authorization=key)


def _tls(target: Target | None) -> BackendTls:
    """How the engines of a target are dialled."""
    sni = target.host if target is not None and not target.is_literal else ""
    ca = target.ca_file if target is not None else ""
    return BackendTls(name="tls-" + hashlib.sha256(f"{ca}\0{sni}".encode()).hexdigest()[:12], ca=ca, sni=sni)
