"""The line of one tenant's requests, and tickets in ascending order of some figure, of which most come in that order.

Owns how the first one is found.  Those that left stay until they come up, so neither joining nor leaving looks at more
than a few others.  A heap moves a dozen entries for each that goes, all over memory; where requests come first and go
first nothing has to move.  So what comes in order is a run, and only the rest is a heap.  Whose line goes next is
`fairness`.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from shoal.flow.tickets import Ticket

Entry = tuple[float, int, Ticket]
"""(figure, the ticket's number, ticket)."""


class Ascending:
    """Entries of tickets; those of tickets that have left count for nothing."""

    __slots__ = ("_rest", "_run")

    def __init__(self) -> None:
        self._run: deque[Entry] = deque()
        self._rest: list[Entry] = []

    def __len__(self) -> int:
        """How many entries there are, those that count for nothing included."""
        return len(self._run) + len(self._rest)

    def __iter__(self) -> Iterator[Ticket]:
        """The tickets of all entries, in no order."""
        yield from [entry[2] for entry in (*self._run, *self._rest) if not entry[2].left]

    def push(self, figure: float, ticket: Ticket) -> bool:
        """Add an entry; returns False where others stand before it, True where they may not."""
        entry, run = (figure, ticket.number, ticket), self._run
        if not run:
            run.append(entry)
            return True
        last = run[-1]
        # Mostly the figures tell, and comparing two costs a tenth of comparing entries.
        if figure > last[0] or entry > last:
            run.append(entry)
            return last[2].left > 0
        heappush(self._rest, entry)
        return True

    def first(self) -> Entry | None:
        """The smallest entry, None when there is none."""
        run, rest = self._run, self._rest
        while run and not rest:
            entry = run[0]
            if not entry[2].left:
                return entry
            run.popleft()
        while run or rest:
            is_next = not rest or (bool(run) and run[0] < rest[0])
            entry = run[0] if is_next else rest[0]
            if not entry[2].left:
                return entry
            self._drop(is_next)
        return None

    def pop(self) -> None:
        """Drop the smallest entry."""
        run, rest = self._run, self._rest
        self._drop(not rest or (bool(run) and run[0] < rest[0]))

    def _drop(self, is_of_run: bool) -> None:
        if is_of_run:
            self._run.popleft()
        else:
            heappop(self._rest)

    def prune(self) -> None:
        """Drop the entries that count for nothing."""
        self._run = deque([entry for entry in self._run if not entry[2].left])
        self._rest = [entry for entry in self._rest if not entry[2].left]
        heapify(self._rest)


class Line(Ascending):
    """The requests of one tenant in one band by their keys, of equals the earlier one first.  size: those that wait."""

    __slots__ = ("size", "tenant_id")

    def __init__(self, tenant_id: str) -> None:
        super().__init__()
        self.tenant_id = tenant_id
        self.size = 0

    def head(self) -> Ticket | None:
        """The ticket that goes next, None when the line is empty."""
        first = self.first()
        return None if first is None else first[2]

    def take(self, ticket: Ticket) -> None:
        """Note that one of its tickets has left."""
        self.size -= 1
        run = self._run
        if run and run[0][2] is ticket:
            run.popleft()
        elif len(run) + len(self._rest) > 2 * self.size + 64:
            self.prune()
