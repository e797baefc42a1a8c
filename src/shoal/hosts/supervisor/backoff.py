"""How long a crashed child waits before its next start.

Owns the arithmetic only; starting and waiting belong to `children`.
"""

FIRST_S = 0.2
LONGEST_S = 10.0
STABLE_S = 60.0


class Backoff:
    """Doubling waits of 0.2 s to 10 s; a run of at least a minute starts again at 0.2 s.

    first_s, longest_s: the shortest and the longest wait.  stable_s: a run this long counts as healthy.
    """

    __slots__ = ("_first_s", "_longest_s", "_next_s", "_stable_s")

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S, stable_s: float = STABLE_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._stable_s = stable_s
        self._next_s = first_s

    def after_run(self, run_s: float) -> float:
        """Return the wait in seconds after a run that lasted `run_s`."""
        if run_s >= self._stable_s:
            self._next_s = self._first_s
        wait_s = self._next_s
        self._next_s = min(self._longest_s, wait_s * 2)
        return wait_s
