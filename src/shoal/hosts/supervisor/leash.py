"""Children that cannot outlive their parent.

A child gets its own session, so that Ctrl-C in the terminal reaches the supervisor alone, and a kernel-side leash
(`PR_SET_PDEATHSIG`) that kills it when the supervisor dies in any way.  Two ways to put it on: between fork and exec,
which costs nothing, and by a program of its own for a process that may have gRPC's threads, beside which code between
fork and exec is not safe.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1

_LAUNCHER = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


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


def leashed(program: str) -> list[str]:
    """Return the beginning of a command line that becomes `program`, on the leash of this process."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), program]
