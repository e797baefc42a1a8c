"""A data plane: what carries bytes between clients and engines, as the rest of the supervisor handles it.

Owns the protocol that `envoyplane` and `directplane` fill.  How requests reach worker processes is `doors`.
"""

from collections.abc import Hashable, Sequence
from typing import Protocol

from shoal.hosts.supervisor.merging import Family
from shoal.pool import Endpoint
from shoal.routing.config import RouterConfig
from shoal.routing.settings import PoolSettings


class Plane(Protocol):
    """One data plane in front of the pool, from `start` to `stop`."""

    async def start(self) -> None:
        """Get everything ready and hold the port; no client is let in.  Raises ShoalError."""
        ...

    async def open(self) -> None:
        """Let clients in, and return when they can connect.  Raises ShoalError."""
        ...

    async def drain(self, timeout_s: float) -> int:
        """Let nobody in any more, and wait for requests in flight; returns how many were left."""
        ...

    async def stop(self) -> None:
        """End it now."""
        ...

    async def look(self) -> None:
        """See how it is; called about once a second, and more often until it serves."""
        ...

    async def follow_files(self) -> None:
        """Take over certificates that change, until cancelled; may return when nothing is to be done."""
        ...

    def configure(self, config: RouterConfig) -> None:
        """Take a new configuration over, without a restart.  Raises ConfigError when it cannot be used."""
        ...

    def needs_restart(self, before: PoolSettings, after: PoolSettings) -> list[str]:
        """Return the changed settings that only a restart of the pool brings into use."""
        ...

    def needs_new_workers(self, before: PoolSettings, after: PoolSettings) -> list[str]:
        """Return the changed settings that only new workers bring into use."""
        ...

    async def show(self, endpoints: dict[str, Endpoint], waits: bool) -> bool:
        """Take the endpoints that requests may be sent to; with `waits`, return whether they are known by then.

        Raises OSError or ShoalError when they cannot be handed over.
        """
        ...

    def marks(self) -> dict[str, Hashable]:
        """Return what is shown of an endpoint besides its address, by id: it is shown again when this changes."""
        ...

    @property
    def is_tls(self) -> bool:
        """Whether clients speak TLS."""
        ...

    @property
    def why_not_serving(self) -> str:
        """Why clients cannot connect, "" when they can."""
        ...

    @property
    def warnings(self) -> Sequence[str]:
        """What an operator should look at."""
        ...

    def families(self) -> Sequence[Family]:
        """Return its own metrics."""
        ...
