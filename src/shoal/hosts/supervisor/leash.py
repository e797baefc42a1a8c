"""Children that cannot outlive their parent.

A child gets its own session, so that Ctrl-C in the terminal reaches the supervisor alone, and a kernel-side leash
(`PR_SET_PDEATHSIG`) that kills it when the supervisor dies in any way.
"""

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def leash(parent_pid: int | None = None) -> Callable[[], None]:
    """Return the function to run in the child between fork and exec (`preexec_fn`).

    parent_pid: who must live, this process by default.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid() if parent_pid is None else parent_pid

    def hold() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the leash was on
            os._exit(1)

    return hold
