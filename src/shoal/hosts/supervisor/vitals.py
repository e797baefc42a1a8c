"""How the pool is: ready or why not, what is open, what an operator should look at, its own metrics.

Owns what the supervisor says of itself.  The figures of the workers are merged by `answers`.
"""

import asyncio
import os
from time import monotonic

from shoal import __version__
from shoal.hosts import logs
from shoal.hosts.admin import PoolPicture
from shoal.hosts.supervisor.inputs import Inputs, inputs_of
from shoal.hosts.supervisor.loads import load_warnings
from shoal.hosts.supervisor.merging import Family
from shoal.hosts.supervisor.parts import Parts
from shoal.hosts.supervisor.waiting import Roll, call_roll

_LOOK_S = 1.0


class Vitals:
    """Looks at the parts of the pool now and then."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._started_at = monotonic()
        self._log = logs.get("supervisor")
        self.reloads = {"accepted": 0, "refused": 0}
        self.config_error = ""
        options = parts.options
        self.inputs = Inputs(lambda: inputs_of(options.config, options.backends_file, parts.configuration.config))

    async def run(self) -> None:
        """Look at the data plane until cancelled."""
        plane = self._parts.plane
        while True:
            await plane.look()
            await asyncio.sleep(_LOOK_S / 10 if plane.why_not_serving else _LOOK_S)

    def roll(self) -> Roll:
        """Return which endpoints are ready, and which are waited for."""
        parts = self._parts
        return call_roll(parts.keeper, parts.engines.unannounced(), parts.gate.ready)

    def why_not_ready(self) -> str:
        """Return "" when a request would be routed now, else what is missing."""
        return self._why_not_serving() or ("" if self._parts.gate.ready else self.roll().reasons)

    def _why_not_serving(self) -> str:
        if not self._parts.workers.in_service:
            return "no picker worker is in service"
        return self._parts.plane.why_not_serving

    def warnings(self) -> list[str]:
        """Return what an operator should look at now."""
        found = list(standing_warnings(self._parts))
        if self.config_error:
            found.append(self.config_error)
        found += self.inputs.warnings
        if why_not := self._why_not_serving() or ("" if self._parts.gate.ready else self.roll().summary):
            found.append(why_not)
        found += self._parts.plane.warnings
        found += load_warnings(self._parts.keeper.reports())
        return found

    def about(self) -> PoolPicture:
        """Return the pool's own part of the picture."""
        parts = self._parts
        return PoolPicture(
            url=parts.url,
            pid=os.getpid(),
            version=__version__,
            at_s=monotonic() - self._started_at,
            run_dir=str(parts.run_dir),
            is_ready=not self.why_not_ready(),
            warnings=self.warnings(),
        )

    def families(self) -> list[Family]:
        """Return the pool's own metrics."""
        children = [*parts_children(self._parts)]
        return [
            _gauge("shoal_ready", "Whether a request would be routed now.", [({}, float(not self.why_not_ready()))]),
            *self._parts.plane.families(),
            Family(
                name="shoal_child_restarts",
                help="Restarts of a child process after it ended unasked.",
                type="counter",
                samples=[("_total", {"child": name}, float(count)) for name, count in children],
            ),
            Family(
                name="shoal_config_reloads",
                help="Reloads of the configuration, by what became of them.",
                type="counter",
                samples=[("_total", {"result": result}, float(count)) for result, count in self.reloads.items()],
            ),
        ]


def standing_warnings(parts: Parts) -> list[str]:
    """Return what the operator chose and should know."""
    found = list(parts.configuration.config.warnings)
    is_local = parts.ground.host in ("127.0.0.1", "::1", "localhost")
    if not is_local and not parts.configuration.config.pool.auth.keys_file:
        found.append(f"{parts.ground.host}:{parts.ground.port} is open to the network and asks for no API key")
    return found


def parts_children(parts: Parts) -> list[tuple[str, int]]:
    """Return each child process with its restarts, those of one name added up."""
    counts: dict[str, int] = {}
    for child in (*parts.engines.children, *(process.child for process in parts.workers.processes)):
        counts[child.name] = counts.get(child.name, 0) + child.restarts
    return sorted(counts.items())


def _gauge(name: str, text: str, values: list[tuple[dict[str, str], float]]) -> Family:
    return Family(name=name, help=text, type="gauge", samples=[("", labels, value) for labels, value in values])
