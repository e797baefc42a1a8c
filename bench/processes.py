"""What processes cost, read from /proc: CPU time to the nanosecond where the kernel tells, and resident memory."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used, all threads, 0.0 when it is gone.

    The scheduler's own count is finer than the clock ticks of `stat`, but misses threads that have ended; the larger
    of the two is right to within a tick.
    """
    root = Path(f"/proc/{pid}")
    exact = 0.0
    with suppress(OSError):
        for task in (root / "task").iterdir():
            with suppress(OSError):
                exact += int((task / "schedstat").read_text().split()[0]) / 1e9
    ticks = 0
    with suppress(OSError):
        fields = (root / "stat").read_text().rpartition(") ")[2].split()
        ticks = int(fields[11]) + int(fields[12])
    return exact if exact >= (ticks - 2) * _TICK_S else ticks * _TICK_S


def total_cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of several processes together."""
    return sum(cpu_s(pid) for pid in pids)


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process that is its own (not mapped from files), 0 when it is gone."""
    return _memory(pid, "RssAnon:")


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of several processes together, with what is mapped from files."""
    return sum(_memory(pid, "VmRSS:") for pid in pids)


def _memory(pid: int, name: str) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0


def descendants(pid: int) -> Iterator[int]:
    """Yield every live process below `pid`, parents before their children."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(") ")[2].split()[1])
            children.setdefault(parent, []).append(int(process.name))
    waiting = children.get(pid, [])
    for each in waiting:
        yield each
        waiting.extend(children.get(each, []))


def name_of(pid: int) -> str:
    """Return the name of a process as `ps` shows it, "" when it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def command_of(pid: int) -> list[str]:
    """Return the command line of a process, [] when it is gone."""
    with suppress(OSError):
        return [
            word.decode("utf-8", "replace") for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if word
        ]
    return []
