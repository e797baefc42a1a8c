"""What an operator may do to a running pool as a whole: reload, upgrade.  Orders about endpoints are `orders`.

Owns the order within one operation, and that a bad one changes nothing.  How it is asked for (socket, signal, changed
file) is for others.
"""

import asyncio

from shoal.hosts import logs
from shoal.hosts.supervisor.parts import Parts
from shoal.hosts.supervisor.preflight import preflight
from shoal.hosts.supervisor.settings import (
    drain_s_of,
    needs_new_workers,
    needs_restart,
    targets_of,
)
from shoal.hosts.supervisor.vitals import Vitals
from shoal.kernel import ConfigError
from shoal.routing import Configured

REPLACED_S = 3600.0
"""How long a worker that was replaced may go on with the requests it has; nobody waits for it, as for the end of a
pool."""


class WorkersBehind(ConfigError):
    """The configuration is accepted, and workers run what was before it."""


class PoolOperations:
    """The operations on the parts of one pool, one reload or upgrade at a time."""

    def __init__(self, parts: Parts, vitals: Vitals) -> None:
        self._parts = parts
        self._vitals = vitals
        self._turn = asyncio.Lock()
        self._workers_run = parts.configuration.config.pool
        self._log = logs.get("supervisor")

    async def reload(self) -> str:
        """Read the configuration again; a bad one is refused and the old one goes on.  Raises ConfigError."""
        async with self._turn:
            try:
                return await self._reload()
            except WorkersBehind as error:
                self._vitals.reloads["refused"] += 1
                self._vitals.config_error = str(error)
                self._log.error("configuration accepted, and not all of it is in use", why=error)
                raise
            except ConfigError as error:
                self._vitals.reloads["refused"] += 1
                self._vitals.config_error = f"the configuration file is not in use, the one before it is: {error}"
                self._log.error("configuration refused, the old one goes on", why=error)
                raise

    async def upgrade(self) -> str:
        """Replace the workers one by one by ones that run the code and flags of now."""
        async with self._turn:
            return await self._replace_workers()

    def why_not_ready(self) -> str:
        """Return "" when a request would be routed now, else what is missing."""
        return self._vitals.why_not_ready()

    async def _replace_workers(self) -> str:
        parts, pool = self._parts, self._parts.configuration.config.pool
        upgrade = await parts.workers.upgrade(max(REPLACED_S, drain_s_of(parts.options, pool)))
        self._log.info("upgrade", result=upgrade.text)
        if upgrade.is_done:
            self._workers_run = pool
        return upgrade.text

    async def _reload(self) -> str:
        parts, configuration = self._parts, self._parts.configuration
        text, config = await asyncio.to_thread(configuration.candidate)
        await asyncio.to_thread(preflight, config.pool)
        targets = await asyncio.to_thread(targets_of, config.pool)
        stuck = needs_restart(parts.ground, parts.options, configuration.at_start, config)
        stuck += parts.plane.needs_restart(configuration.at_start.pool, config.pool)
        # The data plane first: it is the one that can still refuse (a certificate that cannot be read).
        parts.plane.configure(config)
        configuration.accept(text, config)
        configuration.accept_into(parts.run_dir)
        parts.backends.replace(targets)
        parts.gate.pass_on([Configured(text)])
        self._log.info("configuration accepted", source=configuration.source)
        if stuck:
            self._log.warning("these settings take effect at the next start", settings=", ".join(stuck))
        for warning in config.warnings:
            self._log.warning(warning)
        # What the workers run, not what was accepted last: they differ when a replacement failed.
        before = self._workers_run
        changed = [*needs_new_workers(before, config.pool), *parts.plane.needs_new_workers(before, config.pool)]
        if stale := ", ".join(changed):
            self._log.info("workers read these at their start, replacing them", settings=stale)
            done = await self._replace_workers()
            if self._workers_run is not config.pool:
                raise WorkersBehind(f"workers still run with the {stale} of before, reload to try again: {done}")
        self._vitals.reloads["accepted"] += 1
        self._vitals.config_error = ""
        return f"configuration of {configuration.source} is in use" + (
            f"; at the next start: {', '.join(stuck)}" if stuck else ""
        )
