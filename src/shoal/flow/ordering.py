"""In which order the requests of one tenant go: one key per request, the smallest first.

A key is fixed when the request joins its line, so an order costs nothing while nothing moves.  The orders that prefer
some requests do so by time: what is passed over is passed over for a bounded time only.
"""

from typing import Annotated, ClassVar, Protocol, runtime_checkable

from shoal.flow.tickets import Ticket


@runtime_checkable
class Ordering(Protocol):
    """An order within a tenant.

    A class with `needs_work = True` has `work_tokens` told without what is cached of the prompt, which costs a look.
    """

    def key(self, ticket: Ticket) -> float:
        """Return where `ticket` stands: smaller goes first, equal ones in the order of their arrival."""
        ...


class FcfsOrdering:
    """First come, first served."""

    type: ClassVar[str] = "fcfs-ordering-policy"

    def key(self, ticket: Ticket) -> float:
        """Return the time of arrival."""
        return ticket.arrived_at


class EdfOrdering:
    """Earliest deadline first: the request that would be the first to give up waiting.

    The deadline is the arrival plus the time that a request may wait, or the client's own when that is earlier.
    """

    type: ClassVar[str] = "edf-ordering-policy"

    def key(self, ticket: Ticket) -> float:
        """Return when the request gives up."""
        return min(ticket.arrived_at + ticket.ttl_s, ticket.deadline)


class SloDeadlineOrdering:
    """By the time to first token that the client asks for in `x-llm-d-slo-ttft-ms`.

    The key is the arrival plus that time; requests without one, or with one that makes no sense, go last.
    """

    type: ClassVar[str] = "slo-deadline-ordering-policy"

    def key(self, ticket: Ticket) -> float:
        """Return when the first token is due."""
        return ticket.arrived_at + ticket.slo_ttft_s


class ShortestWorkOrdering:
    """Short requests first: the mean wait falls, and a long one is passed for a bounded time.

    A request that costs N tokens lets those pass that arrive within N / tokensPerSecond after it and cost less.  What
    some cache holds of its prompt when it begins to wait costs nothing.
    """

    type: ClassVar[str] = "shortest-work-ordering-policy"
    needs_work: ClassVar[bool] = True

    def __init__(
        self,
        *,
        tokens_per_second: Annotated[float, "tokens of work for which a request is put back by one second"] = 1000.0,
    ) -> None:
        if tokens_per_second <= 0:
            raise ValueError(f"tokensPerSecond must be above 0, got {tokens_per_second:g}")
        self._s_per_token = 1.0 / tokens_per_second

    def key(self, ticket: Ticket) -> float:
        """Return the arrival, put back by the work."""
        return ticket.arrived_at + ticket.work_tokens * self._s_per_token


class TurnAwareOrdering:
    """Sessions finish instead of all crawling: a later turn of a running session goes before a first turn.

    A later turn stands in line as if it had arrived leadSeconds earlier, so first turns are passed for that long at
    most.  Within each kind the order is that of arrival.
    """

    type: ClassVar[str] = "turn-aware-ordering-policy"

    def __init__(
        self, *, lead_seconds: Annotated[float, "head start of a later turn of a running session, in seconds"] = 30.0
    ) -> None:
        if lead_seconds < 0:
            raise ValueError(f"leadSeconds must not be negative, got {lead_seconds:g}")
        self._lead_s = lead_seconds

    def key(self, ticket: Ticket) -> float:
        """Return the arrival, with the head start."""
        return ticket.arrived_at - self._lead_s if ticket.is_follow_up else ticket.arrived_at
