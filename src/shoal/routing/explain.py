"""Why a request went where it went, waits, or was refused, kept for a while and for a bounded number of figures.

Owns the rings of recent decisions and refusals; the figures are the very columns that decided.  Holds no prompt text.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import merge
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from shoal.flow import Ticket
from shoal.flow.ahead import Group, all_groups_ahead, groups_ahead, groups_before
from shoal.pool import Decision, Refusal, Request
from shoal.routing.books import Flight
from shoal.routing.commands import Waited

# 2,000,000 float64 figures are 16 MB; a pool of 4 endpoints keeps tens of thousands of requests, one of 1,000 hundreds.
MAX_FIGURES = 2_000_000
MAX_REQUESTS = 10_000
MAX_REFUSED = 5_000

T = TypeVar("T")


class Gate(Protocol):
    """Where requests wait."""

    def waiting(self, name: str) -> Ticket | None:
        """A request that waits, by its own or its client's id."""
        ...

    def waits(self) -> Collection[Ticket]:
        """Everybody who waits."""
        ...


class Refused(NamedTuple):
    """A request that was refused by the router.  waited: how long before that, None where it could not wait.
    ticket: with which it came to the gate, None where it did not get so far."""

    request: Request
    refusal: Refusal
    priority: int
    waited: Waited | None
    ticket: Ticket | None
    at: float


def _asked(request: Request) -> dict[str, Any]:
    """What was asked for."""
    return {
        "request_id": request.id,
        "client_id": request.client_id,
        "api": str(request.api),
        "model": request.model,
        "tenant": request.tenant_id,
        "prompt_tokens": request.prompt_tokens,
    }


def _stood(priority: int, queue_s: float | None, ahead: int, groups: Sequence[Group]) -> dict[str, Any]:
    """Where it stands in the queue, or stood when it came.  ahead: requests; ahead_by: the larger groups of them."""
    return {
        "priority": priority,
        "queue_s": queue_s,
        "ahead": ahead,
        "ahead_by": [
            {"priority": group.priority, "tenant": group.tenant_id, "requests": group.requests} for group in groups
        ],
    }


def explain_waiting(ticket: Ticket, waited_s: float | None, waits: Iterable[Ticket]) -> dict[str, Any]:
    """Return plain values for JSON of a request that waits.  waits: all that do."""
    ahead, groups = groups_before(ticket, waits)
    stood = _stood(ticket.priority, waited_s, ahead, groups)
    return {"state": "waiting", **_asked(ticket.item.request), **stood, "status": None}


def explain_refused(refused: Refused, groups: Sequence[Group]) -> dict[str, Any]:
    """Return plain values for JSON of a request that was refused.  groups: ahead of it when it came."""
    refusal, waited = refused.refusal, refused.waited
    queue_s = waited.queue_s if waited is not None else 0.0
    stood = _stood(refused.priority, queue_s, _ahead(refused), groups)
    return {
        "state": "refused",
        **_asked(refused.request),
        **stood,
        "reason": str(refusal.reason),
        "message": refusal.message,
        "retry_after_s": refusal.retry_after_s,
        "status": None,
    }


def explain(flight: Flight, groups: Sequence[Group]) -> dict[str, Any]:
    """Return plain values for JSON: candidates, scores, weights, total, choice, and the outcome once recorded.

    groups: ahead of it when it came.
    """
    request, decision, outcome, matched = flight.request, flight.decision, flight.outcome, flight.matched
    candidates = [
        {
            "id": name,
            "total": float(decision.total[position]),
            "matched_tokens": int(matched if isinstance(matched, float) else matched[position]),
            "scores": {column.name: float(column.values[position]) for column in decision.scores},
        }
        for position, name in enumerate(decision.candidates)
    ]
    noted = flight.noted
    if noted is not None and len(noted.ttft_s) == len(candidates):
        for candidate, ttft_s, tpot_s in zip(candidates, noted.ttft_s.tolist(), noted.tpot_s.tolist(), strict=True):
            candidate |= {"predicted_ttft_s": ttft_s, "predicted_tpot_s": tpot_s}
    forecast = noted.forecast if noted is not None else None
    return {
        "state": "sent",
        **_asked(request),
        **_stood(flight.priority, flight.dispatched_at - flight.arrived_at, _ahead(flight), groups),
        "target_model": flight.target_model,
        "prompt_blocks": flight.expectation.total if flight.expectation else 0,
        "dispatched_at": flight.dispatched_at,
        "profile": decision.profile,
        "weights": {column.name: column.weight for column in decision.scores},
        "dropped": [list(entry) for entry in decision.dropped],
        "candidates": candidates,
        "chosen": list(decision.chosen),
        "served": flight.served_id,
        "status": outcome.status if outcome else None,
        "attempts": outcome.attempts if outcome else None,
        "ttft_s": outcome.ttft_s if outcome else None,
        "duration_s": outcome.duration_s if outcome else None,
        "predicted_cached_tokens": flight.predicted_tokens,
        "is_exact": flight.is_exact,
        "predicted_ttft_s": forecast.ttft_s if forecast else None,
        "predicted_tpot_s": forecast.tpot_s if forecast else None,
        "is_prediction_trusted": forecast.is_trusted if forecast else None,
        "cached_tokens": outcome.cached_tokens if outcome else None,
        "reported_prompt_tokens": outcome.prompt_tokens if outcome else None,
        "completion_tokens": outcome.completion_tokens if outcome else None,
        "is_estimated": outcome.is_estimated if outcome else None,
        "is_cut": outcome.is_cut if outcome else None,
    }


class _Ring(Generic[T]):
    """Entries by the id of their request, and the latest one by its client's; the oldest goes first."""

    __slots__ = ("_by_client_id", "by_id")

    def __init__(self) -> None:
        # A plain dict would walk over all that was dropped before to find the oldest.
        self.by_id: OrderedDict[str, T] = OrderedDict()
        self._by_client_id: dict[str, str] = {}

    def keep(self, request: Request, entry: T) -> T | None:
        """Add an entry; returns the one of the same request that it replaces."""
        before = self.by_id.pop(request.id, None)
        self.by_id[request.id] = entry
        if request.client_id:
            self._by_client_id[request.client_id] = request.id
        return before

    def drop(self, request: Request) -> None:
        """Forget an entry."""
        del self.by_id[request.id]
        if self._by_client_id.get(request.client_id) == request.id:
            del self._by_client_id[request.client_id]

    def first(self) -> T:
        """The oldest entry."""
        return next(iter(self.by_id.values()))

    def find(self, name: str) -> T | None:
        """An entry by the id of its request or its client's."""
        return self.by_id.get(name) or self.by_id.get(self._by_client_id.get(name, ""))


class Explanations:
    """The recent decisions and refusals, oldest dropped first.  A flood of refusals drops no decision.

    gate: gives the queue of now, None where there is none.
    """

    __slots__ = ("_figures", "_gate", "_refused", "_sent")

    def __init__(self, gate: Callable[[], Gate | None] = lambda: None) -> None:
        self._gate = gate
        self._sent: _Ring[Flight] = _Ring()
        self._refused: _Ring[Refused] = _Ring()
        self._figures = 0

    def keep(self, flight: Flight) -> None:
        """Remember a decision; what is learned of its flight later is seen too."""
        before = self._sent.keep(flight.request, flight)
        if before is not None:
            self._figures -= _size(before.decision)
        self._figures += _size(flight.decision)
        while self._figures > MAX_FIGURES or len(self._sent.by_id) > MAX_REQUESTS:
            oldest = self._sent.first()
            self._figures -= _size(oldest.decision)
            self._sent.drop(oldest.request)

    def refused(self, refused: Refused) -> None:
        """Remember a refusal."""
        ring = self._refused
        ring.keep(refused.request, refused)
        if len(ring.by_id) > MAX_REFUSED:
            ring.drop(ring.first().request)

    def find(self, request_id: str, now: float | None = None) -> dict[str, Any] | None:
        """What is known of a request by its minted or its client's id, the latest; None when unknown or too old.

        now: without it nothing is said of how long one has waited that still does.
        """
        gate = self._gate()
        ticket = gate.waiting(request_id) if gate is not None else None
        waits: Collection[Ticket] = gate.waits() if gate is not None else ()
        if ticket is not None:
            return explain_waiting(ticket, None if now is None else now - ticket.arrived_at, waits)
        flight, refused = self._sent.find(request_id), self._refused.find(request_id)
        if refused is not None and (flight is None or flight.dispatched_at <= refused.at):
            return explain_refused(refused, self._groups(refused.ticket, waits))
        return explain(flight, self._groups(flight.ticket, waits)) if flight is not None else None

    def newest(self) -> Iterator[dict[str, Any]]:
        """All that is known, the latest first."""
        groups = all_groups_ahead(self._stood())
        sent: Iterable[Flight | Refused] = reversed(self._sent.by_id.values())
        for each in merge(sent, reversed(self._refused.by_id.values()), key=_at, reverse=True):
            ahead = groups[each.ticket.number] if each.ticket is not None and each.ticket.number else ()
            yield explain_refused(each, ahead) if isinstance(each, Refused) else explain(each, ahead)

    def _groups(self, ticket: Ticket | None, waits: Iterable[Ticket]) -> Sequence[Group]:
        return groups_ahead(ticket, chain(waits, self._stood()))[1] if ticket is not None and ticket.number else ()

    def _stood(self) -> Iterator[Ticket]:
        """Those that have left the queue, as far as they are known."""
        for each in chain[Flight | Refused](self._sent.by_id.values(), self._refused.by_id.values()):
            if each.ticket is not None and each.ticket.number:
                yield each.ticket


def _ahead(entry: Flight | Refused) -> int:
    return entry.ticket.ahead if entry.ticket is not None else 0


def _at(entry: Flight | Refused) -> float:
    return entry.at if isinstance(entry, Refused) else entry.dispatched_at


def _size(decision: Decision) -> int:
    return len(decision.candidates) * (len(decision.scores) + 4) + 32
