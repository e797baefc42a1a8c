"""The parts of one pool, made and joined but not started.

Owns who is given whom.  The order of starting and ending is `supervisor`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.hosts.fleet import FleetKeeper, Source
from shoal.hosts.supervisor.configuration import Configuration
from shoal.hosts.supervisor.configured import ConfiguredBackends
from shoal.hosts.supervisor.engines import EmbeddedEngines
from shoal.hosts.supervisor.gate import FleetGate
from shoal.hosts.supervisor.ledger import Ledger
from shoal.hosts.supervisor.options import Options
from shoal.hosts.supervisor.plane import Plane
from shoal.hosts.supervisor.planes import PLANES
from shoal.hosts.supervisor.pulse import Pulse
from shoal.hosts.supervisor.settings import Ground, hash_key_of, targets_of
from shoal.hosts.supervisor.workers import Workers, waiting_worker, worker_command

HASH_KEY = "SHOAL_HASH_KEY"
"""Where workers find the key of the prompt hash: in their environment, which other users cannot read."""


class Parts(NamedTuple):
    """Everything that a pool is made of."""

    options: Options
    ground: Ground
    run_dir: Path
    configuration: Configuration
    backends: ConfiguredBackends
    engines: EmbeddedEngines
    workers: Workers
    pulse: Pulse
    keeper: FleetKeeper
    plane: Plane
    gate: FleetGate

    @property
    def url(self) -> str:
        """The public endpoint, as a client on this machine would write it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.ground.host, self.ground.host)
        host = f"[{host}]" if ":" in host else host
        scheme = "https" if self.plane.is_tls else "http"
        return f"{scheme}://{host}:{self.ground.port}"


def build(
    options: Options, ground: Ground, run_dir: Path, configuration: Configuration, sources: Sequence[Source]
) -> Parts:
    """Make the parts.  Call it inside a running loop, with the run directory open."""
    config = configuration.config
    ledger = Ledger()
    backends = ConfiguredBackends(targets_of(config.pool))
    engines = EmbeddedEngines(
        options.engines, options.model, options.engine_args, has_kv_events=config.precise is not None
    )
    pickers = [str(number) for number in range(options.workers)]
    door, finish = PLANES[ground.data_plane](config, ground, run_dir, pickers)
    command = worker_command(
        door,
        configuration.accept_into(run_dir),
        options.workers,
        options.seed,
        options.log_format,
        options.log_level,
    )
    env = {HASH_KEY: hash_key_of(config.pool)}
    workers = Workers(pickers, run_dir, command, door, ledger, env, waiting_worker(door))
    pulse = Pulse(workers)
    outlet: list[FleetGate] = []
    keeper = FleetKeeper(
        [*sources, backends, engines],
        lambda batch: outlet[0].take(batch),
        busy=pulse.is_busy,
        drained=pulse.until_drained,
        seed=options.seed,
    )
    plane = finish(workers, keeper.targets)
    gate = FleetGate(ledger, plane.show, workers.tell, workers.settled, plane.marks)
    outlet.append(gate)
    return Parts(options, ground, run_dir, configuration, backends, engines, workers, pulse, keeper, plane, gate)
