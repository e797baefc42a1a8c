"""Why a request went where it went, kept for a while and for a bounded number of figures.

Owns the ring of recent decisions; the figures are the very columns that decided.  Holds no prompt text.
"""

from collections import OrderedDict
from typing import Any

from shoal.pool import Decision, Outcome
from shoal.routing.books import Flight
from shoal.routing.fleet import Fleet, Floats

# 2,000,000 float64 figures are 16 MB; a pool of 4 endpoints keeps tens of thousands of requests, one of 1,000 hundreds.
MAX_FIGURES = 2_000_000
MAX_REQUESTS = 10_000


class Explained:
    """One request's decision with the columns behind it; `outcome` comes when its record does."""

    __slots__ = ("decision", "flight_facts", "matched_tokens", "outcome", "queue_s", "served_id")

    def __init__(self, flight: Flight, matched_tokens: Floats | float, fleet: Fleet) -> None:
        request = flight.request
        self.decision: Decision = flight.decision
        self.flight_facts: dict[str, Any] = {
            "request_id": request.id,
            "client_id": request.client_id,
            "api": str(request.api),
            "model": request.model,
            "target_model": flight.target_model,
            "prompt_tokens": request.prompt_tokens,
            "prompt_blocks": len(flight.blocks) // 8,
            "dispatched_at": flight.dispatched_at,
        }
        self.queue_s = flight.dispatched_at - flight.arrived_at
        candidates = flight.decision.candidates
        if not isinstance(matched_tokens, float) and len(candidates) < len(fleet):
            members = [fleet.get(name) for name in candidates]
            matched_tokens = matched_tokens[[member.row for member in members if member is not None]]
        self.matched_tokens = matched_tokens
        self.outcome: Outcome | None = None
        self.served_id = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: candidates, scores, weights, total, choice, outcome."""
        decision, matched = self.decision, self.matched_tokens
        candidates = [
            {
                "id": name,
                "total": float(decision.total[position]),
                "matched_tokens": int(matched if isinstance(matched, float) else matched[position]),
                "scores": {column.name: float(column.values[position]) for column in decision.scores},
            }
            for position, name in enumerate(decision.candidates)
        ]
        outcome = self.outcome
        return {
            **self.flight_facts,
            "profile": decision.profile,
            "weights": {column.name: column.weight for column in decision.scores},
            "dropped": [list(entry) for entry in decision.dropped],
            "candidates": candidates,
            "chosen": list(decision.chosen),
            "queue_s": self.queue_s,
            "served": self.served_id,
            "status": outcome.status if outcome else None,
            "attempts": outcome.attempts if outcome else None,
            "ttft_s": outcome.ttft_s if outcome else None,
            "duration_s": outcome.duration_s if outcome else None,
            "cached_tokens": outcome.cached_tokens if outcome else None,
            "reported_prompt_tokens": outcome.prompt_tokens if outcome else None,
            "completion_tokens": outcome.completion_tokens if outcome else None,
            "is_estimated": outcome.is_estimated if outcome else None,
            "is_cut": outcome.is_cut if outcome else None,
        }


class Explanations:
    """The recent decisions, oldest dropped first."""

    __slots__ = ("_by_client_id", "_by_id", "_figures")

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Explained] = OrderedDict()
        self._by_client_id: dict[str, str] = {}
        self._figures = 0

    def keep(self, flight: Flight, matched_tokens: Floats | float, fleet: Fleet) -> None:
        """Remember a decision.  matched_tokens: over the whole fleet."""
        explained = Explained(flight, matched_tokens, fleet)
        self._by_id[flight.request.id] = explained
        if flight.request.client_id:
            self._by_client_id[flight.request.client_id] = flight.request.id
        self._figures += self._size(explained)
        while self._figures > MAX_FIGURES or len(self._by_id) > MAX_REQUESTS:
            request_id, dropped = self._by_id.popitem(last=False)
            self._figures -= self._size(dropped)
            client_id = dropped.flight_facts["client_id"]
            if self._by_client_id.get(client_id) == request_id:
                del self._by_client_id[client_id]

    def close(self, request_id: str, outcome: Outcome, served_id: str) -> None:
        """Add what was measured."""
        explained = self._by_id.get(request_id)
        if explained is not None:
            explained.outcome = outcome
            explained.served_id = served_id

    def find(self, request_id: str) -> dict[str, Any] | None:
        """The explanation of a request by its minted or its client's id; None when it is unknown or too old."""
        explained = self._by_id.get(request_id) or self._by_id.get(self._by_client_id.get(request_id, ""))
        return explained.as_dict() if explained else None

    @staticmethod
    def _size(explained: Explained) -> int:
        return len(explained.decision.candidates) * (len(explained.decision.scores) + 2) + 32
