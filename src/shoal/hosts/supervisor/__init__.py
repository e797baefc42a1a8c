"""`shoal up`: the process that starts, watches, feeds and replaces all others of a pool.

Here: children with backoff, the fleet's ledger that a new worker is filled from, worker slots, embedded engines, the
merged admin server, reload and drain.  Not here: routing (every decision is a worker's), Envoy's configuration
(`hosts.envoy`), what is known of engines (`hosts.fleet`).
"""

from typing import TYPE_CHECKING

from shoal.hosts.supervisor.backoff import Backoff
from shoal.hosts.supervisor.leash import leash, leashed
from shoal.hosts.supervisor.options import Options
from shoal.hosts.supervisor.ports import check_port, free_port

if TYPE_CHECKING:
    from shoal.hosts.supervisor.supervisor import run as run_pool

__all__ = ["Backoff", "Options", "check_port", "free_port", "leash", "leashed", "run_pool"]


def __getattr__(name: str) -> object:
    """Import the pool itself when it is asked for: it needs gRPC and Envoy, which a measurement's stage does not."""
    if name == "run_pool":
        from shoal.hosts.supervisor.supervisor import run

        return run
    raise AttributeError(name)
