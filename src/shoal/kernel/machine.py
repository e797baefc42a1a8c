"""What a decision machine is: events in, commands out, no clock and no I/O of its own.

A host calls `handle` for every event in order, carries out the commands, and calls `handle` with a
tick no later than `deadline`.  The same machine runs live, in virtual time, and under a journal.
"""

from typing import Protocol, TypeVar

EventT = TypeVar("EventT", contravariant=True)
CommandT = TypeVar("CommandT")


class Machine(Protocol[EventT, CommandT]):
    """A synchronous single-writer state machine."""

    def handle(self, event: EventT, now: float) -> list[CommandT]:
        """Apply `event` at `now` (seconds on the machine's clock) and return what must be done.

        Raises ClockWentBack when `now` is smaller than the last one.
        """
        ...

    def deadline(self) -> float | None:
        """Return the time by which a tick must come, or None when nothing is pending."""
        ...
