"""What a pool tells its operator, and how the operator asks.

Here: the run directory with its sockets, the merged picture (pure sums over workers), and the client that the verbs
of the command line use; all of it light to import.  Not here: the server of this API and the
processes behind it (`hosts.supervisor`), a worker's own answers (`hosts.extproc`).
"""

from shoal.hosts.admin.client import NoPool, PoolClient, Refused, find_pool
from shoal.hosts.admin.rundir import ADMIN_SOCKET, RunDir, default_for
from shoal.hosts.admin.snapshots import (
    EndpointPicture,
    PoolPicture,
    Snapshot,
    WorkerPicture,
    add_left_behind,
    left_behind,
    merge_endpoints,
    merge_warnings,
)

__all__ = [
    "ADMIN_SOCKET",
    "EndpointPicture",
    "NoPool",
    "PoolClient",
    "PoolPicture",
    "Refused",
    "RunDir",
    "Snapshot",
    "WorkerPicture",
    "add_left_behind",
    "default_for",
    "find_pool",
    "left_behind",
    "merge_endpoints",
    "merge_warnings",
]
