"""The data planes that there are, by name, each with the door of its workers.

The only place that knows which is which.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from shoal.hosts.supervisor.dialling import Targets
from shoal.hosts.supervisor.directplane import ClientsDoor, DirectPlane
from shoal.hosts.supervisor.doors import Door, PickerDoor
from shoal.hosts.supervisor.envoyplane import EnvoyPlane
from shoal.hosts.supervisor.plane import Plane
from shoal.hosts.supervisor.settings import Ground
from shoal.hosts.supervisor.workers import Workers
from shoal.routing.config import RouterConfig

Finish = Callable[[Workers, Callable[[], Targets]], Plane]
"""Makes the plane, when its workers and who knows the targets are made."""


class Kind(Protocol):
    """Makes one kind of plane: its door first, which workers are made with."""

    def __call__(
        self, config: RouterConfig, ground: Ground, run_dir: Path, pickers: Sequence[str]
    ) -> tuple[Door, Finish]: ...


def _envoy(config: RouterConfig, ground: Ground, run_dir: Path, pickers: Sequence[str]) -> tuple[Door, Finish]:
    return PickerDoor(run_dir), lambda _, targets: EnvoyPlane(config, ground, run_dir, pickers, targets)


def _direct(config: RouterConfig, ground: Ground, run_dir: Path, pickers: Sequence[str]) -> tuple[Door, Finish]:
    door = ClientsDoor(run_dir, ground, pickers)
    return door, lambda workers, targets: DirectPlane(config, door, workers, run_dir, targets)


PLANES: dict[str, Kind] = {"envoy": _envoy, "direct": _direct}
