"""Whose turn it is within a band: which tenant's line gives the next request.

A policy is what a configuration names; `turns()` makes the state of one band.  Lines with a head are in it, empty ones
are not; finding the next costs O(log lines), and nothing happens between requests.
"""

import heapq
from collections import OrderedDict
from typing import ClassVar, Protocol, runtime_checkable

from shoal.flow.lines import Line
from shoal.flow.tickets import Ticket

MAX_TENANTS = 10_000
"""Tenants that a band remembers while they have nothing in line."""


class Turns(Protocol):
    """The state of one band."""

    def wake(self, line: Line, now: float) -> None:
        """Note that a line that was empty has a head, or that another request is its head now."""
        ...

    def next(self, now: float) -> Ticket | None:
        """The request that goes next, the head of its line; it stays where it is until `served`."""
        ...

    def served(self, line: Line, now: float) -> None:
        """Note that the head of a line has gone."""
        ...

    def charge(self, tenant_id: str, weight: float, tokens: float, now: float, *, is_late: bool = False) -> None:
        """Note what a request cost its tenant; is_late: a correction after the request was measured."""
        ...


@runtime_checkable
class Fairness(Protocol):
    """A policy."""

    def turns(self) -> Turns:
        """Return the state of a new band."""
        ...


class _Share:
    """What one tenant has had.  level: tokens over weight, on the band's scale.  line: where it waits.  entry: its own
    one in the heap.  version: counts up with every move, so that of equals the one goes first that stands there longer.
    """

    __slots__ = ("entry", "level", "line", "version")

    def __init__(self, level: float) -> None:
        self.level = level
        self.version = 0
        self.line: Line | None = None
        self.entry: tuple[float, int, _Share] | None = None


class _TokenTurns:
    """Start-time fair queueing (Goyal, Vin, Cheng 1996): the tenant that has had least goes next.

    _level: what the tenant had that was served last, before it was; nobody who comes back begins below it.  Levels
    rise, so an entry of the heap may stay where it is until it comes up, and only then is put where its tenant stands.
    """

    __slots__ = ("_heap", "_level", "_moves", "_shares")

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}
        self._heap: list[tuple[float, int, _Share]] = []
        self._level = 0.0
        self._moves = 0

    def wake(self, line: Line, now: float) -> None:
        share = self._share(line.tenant_id)
        if share.line is not line or line.size == 1:
            # Silence is not saved up.
            share.level = max(share.level, self._level)
            share.line = line
            self._move(share)

    def next(self, now: float) -> Ticket | None:
        heap = self._heap
        while heap:
            entry = heap[0]
            share = entry[2]
            if entry is share.entry:
                line = share.line
                if line is not None and line.size:
                    if entry[1] == share.version or len(heap) == 1:
                        first = line.first()
                        return None if first is None else first[2]
                    share.entry = entry = (share.level, share.version, share)
                    heapq.heapreplace(heap, entry)
                    continue
                share.line = share.entry = None
            heapq.heappop(heap)
        return None

    def served(self, line: Line, now: float) -> None:
        if not line.size:
            self._share(line.tenant_id).line = None

    def charge(self, tenant_id: str, weight: float, tokens: float, now: float, *, is_late: bool = False) -> None:
        share = self._shares.get(tenant_id) or self._share(tenant_id)
        if not is_late:
            if share.level < self._level:
                share.level = self._level
            self._level = share.level
        share.level = level = share.level + tokens / weight
        if share.line is not None:
            if share.entry is not None and share.entry[0] <= level:
                self._moves = share.version = self._moves + 1
            else:
                self._move(share)

    def _share(self, tenant_id: str) -> _Share:
        share = self._shares.get(tenant_id)
        if share is None:
            if len(self._shares) >= MAX_TENANTS:
                self._forget()
            share = self._shares[tenant_id] = _Share(self._level)
        return share

    def _forget(self) -> None:
        """Drop the tenants that a newcomer would not differ from, or the longest known ones that do not wait."""
        idle = [name for name, share in self._shares.items() if share.line is None]
        alike = [name for name in idle if self._shares[name].level <= self._level]
        for name in alike or idle[: max(1, len(idle) // 2)]:
            del self._shares[name]

    def _move(self, share: _Share) -> None:
        """Have a tenant stand where its level is."""
        self._moves += 1
        share.version = self._moves
        if share.entry is not None and share.entry[0] <= share.level:
            return
        share.entry = (share.level, share.version, share)
        heapq.heappush(self._heap, share.entry)
        if len(self._heap) > 4 * len(self._shares) + 64:
            for each in self._shares.values():
                each.entry = None if each.line is None else (each.level, each.version, each)
            self._heap = [each.entry for each in self._shares.values() if each.entry is not None]
            heapq.heapify(self._heap)


class TokenFairness:
    """Every tenant gets its weight's share of the tokens that the pool computes: Shoal's own fairness.

    A request costs the prompt tokens that no cache held and the tokens of its answer; what was estimated when it was
    sent is put right when it has been measured.  The tenant that has had least for its weight goes next, so shares are
    exact to within one request, whatever the requests look like.  It does what deficit round robin in uncached tokens
    does, without a quantum: neither does a tenant get a burst, nor does a round look at tenants that cannot go.
    """

    type: ClassVar[str] = "token-fairness-policy"

    def turns(self) -> Turns:
        """Return the state of a new band."""
        return _TokenTurns()


class _GlobalTurns:
    """All heads in one heap."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Line, Ticket]] = []

    def wake(self, line: Line, now: float) -> None:
        first = line.first()
        if first is not None:
            heapq.heappush(self._heap, (first[0], first[1], line, first[2]))

    def next(self, now: float) -> Ticket | None:
        heap = self._heap
        while heap:
            _, _, line, ticket = heap[0]
            first = line.first()
            if first is not None and first[2] is ticket:
                return ticket
            heapq.heappop(heap)
            if first is not None and ticket.left:
                # The head left, and nobody woke the line for the one behind it.
                heapq.heappush(heap, (first[0], first[1], line, first[2]))
        return None

    def served(self, line: Line, now: float) -> None:
        self.wake(line, now)

    def charge(self, tenant_id: str, weight: float, tokens: float, now: float, *, is_late: bool = False) -> None:
        """Nothing is owed here."""


class GlobalStrictFairness:
    """No fairness: one order over the requests of all tenants, that of the ordering policy."""

    type: ClassVar[str] = "global-strict-fairness-policy"

    def turns(self) -> Turns:
        """Return the state of a new band."""
        return _GlobalTurns()


class _RoundTurns:
    """A ring of the lines that have a head."""

    __slots__ = ("_ring",)

    def __init__(self) -> None:
        self._ring: OrderedDict[str, Line] = OrderedDict()

    def wake(self, line: Line, now: float) -> None:
        self._ring.setdefault(line.tenant_id, line)

    def next(self, now: float) -> Ticket | None:
        ring = self._ring
        while ring:
            tenant_id, line = next(iter(ring.items()))
            if line.size:
                return line.head()
            del ring[tenant_id]
        return None

    def served(self, line: Line, now: float) -> None:
        if line.size:
            self._ring.move_to_end(line.tenant_id)
        else:
            self._ring.pop(line.tenant_id, None)

    def charge(self, tenant_id: str, weight: float, tokens: float, now: float, *, is_late: bool = False) -> None:
        """A turn is a turn, whatever it costs."""


class RoundRobinFairness:
    """One request of each tenant in turn, whatever it costs."""

    type: ClassVar[str] = "round-robin-fairness-policy"

    def turns(self) -> Turns:
        """Return the state of a new band."""
        return _RoundTurns()
