"""Whether an engine may begin steps: running, pausing, or paused, and who arrived meanwhile.

Owns the state; what happens to requests and the cache at each change is the engine's.
"""

from shoal.engine.events import Paused, PauseMode
from shoal.engine.sequences import Sequence


class Pausing:
    """The pause of one engine.

    asked: the pause that is on, None while the engine runs.  is_settled: whether it is complete.  parked: arrivals that
    came while a pause lets earlier requests end.
    """

    __slots__ = ("asked", "is_settled", "parked")

    def __init__(self) -> None:
        self.asked: Paused | None = None
        self.is_settled = False
        self.parked: list[Sequence] = []

    @property
    def may_begin(self) -> bool:
        """Whether a step may begin."""
        return self.asked is None or self.is_parking

    @property
    def is_parking(self) -> bool:
        """Whether arrivals stay apart from the requests that are still allowed to end."""
        return self.asked is not None and self.asked.mode is PauseMode.WAIT and not self.is_settled

    def ask(self, pause: Paused) -> None:
        """A pause is wanted; it replaces the one that is on."""
        self.asked = pause
        self.is_settled = False

    def end(self) -> list[Sequence]:
        """The engine runs again; returns the arrivals that were parked."""
        self.asked = None
        self.is_settled = False
        return self.unpark()

    def unpark(self) -> list[Sequence]:
        """Return the parked arrivals and keep none."""
        parked, self.parked = self.parked, []
        return parked
