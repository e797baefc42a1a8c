"""A process that has imported everything of a program and waits to be told its arguments.

`python -m shoal.hosts.supervisor.warm MODULE` imports MODULE, calls its `warm_up` if it has one, reads one line from
stdin, a JSON list, and runs the module's `main` with it; at the end of stdin it ends.  Who keeps such a process is
`spares`.
"""

import importlib
import sys
from pathlib import Path

import msgspec

IDLE, AT_WORK = "shoal-spare", "shoal-worker"
"""The names of such a process in `ps`, before and after it got its arguments."""


def main() -> int:
    """Wait, then be the program; returns its exit status."""
    program = importlib.import_module(sys.argv[1])
    if hasattr(program, "warm_up"):
        program.warm_up()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    _call_myself(AT_WORK)
    return int(program.main(msgspec.json.decode(line, type=list[str])))


def _call_myself(name: str) -> None:
    Path("/proc/self/comm").write_text(name)


if __name__ == "__main__":
    _call_myself(IDLE)
    sys.exit(main())
