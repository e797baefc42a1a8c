"""Whether the machine is ours and its Python a fast one: what figures depend on that are not of the code measured.

Figures of a shared machine are not wrong by a known factor, they are void: caches, clocks and hyperthreads are shared
too, so even CPU time grows with the neighbours' work.
"""

import os
import sysconfig
import time
from pathlib import Path

FOREIGN_CORES_LIMIT = 0.3
"""A measurement that falls short while others use more than this is void, not short."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Neighbours:
    """What others use, from its making on."""

    __slots__ = ("_began_s", "_busy_s", "_own_s")

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._busy_s = _busy_s()
        self._own_s = _own_s()

    def cores(self) -> float:
        """Return the mean number of cores that processes outside this one's family used.

        Children count as ours once they have ended and were waited for, so ask when they have.
        """
        spent_s = time.monotonic() - self._began_s
        foreign_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return max(0.0, foreign_s / spent_s) if spent_s > 0 else 0.0


def wait_until_idle(limit_s: float) -> None:
    """Wait until others have used little for a second, or until `limit_s` is over."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        watch = Neighbours()
        time.sleep(1.0)
        if watch.cores() < FOREIGN_CORES_LIMIT / 2:
            return


def build_flaw() -> str:
    """Return what is wrong with the build of this Python, "" for nothing."""
    is_profiled = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    return "" if is_profiled else "this Python was built without profile-guided optimization"


def _busy_s() -> float:
    """CPU seconds of all cores that were not idle, since boot, with what a hypervisor took."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS_PER_S


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
