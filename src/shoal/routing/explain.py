"""Why a request went where it went, kept for a while and for a bounded number of figures.

Owns the ring of recent decisions; the figures are the very columns that decided.  Holds no prompt text.
"""

from collections import OrderedDict
from typing import Any

from shoal.pool import Decision
from shoal.routing.books import Flight

# 2,000,000 float64 figures are 16 MB; a pool of 4 endpoints keeps tens of thousands of requests, one of 1,000 hundreds.
MAX_FIGURES = 2_000_000
MAX_REQUESTS = 10_000


def explain(flight: Flight) -> dict[str, Any]:
    """Return plain values for JSON: candidates, scores, weights, total, choice, and the outcome once recorded."""
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
        "request_id": request.id,
        "client_id": request.client_id,
        "api": str(request.api),
        "model": request.model,
        "target_model": flight.target_model,
        "prompt_tokens": request.prompt_tokens,
        "prompt_blocks": flight.expectation.total if flight.expectation else 0,
        "dispatched_at": flight.dispatched_at,
        "profile": decision.profile,
        "weights": {column.name: column.weight for column in decision.scores},
        "dropped": [list(entry) for entry in decision.dropped],
        "candidates": candidates,
        "chosen": list(decision.chosen),
        "priority": flight.priority,
        "ahead": flight.ahead,
        "queue_s": flight.dispatched_at - flight.arrived_at,
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


class Explanations:
    """The recent decisions, oldest dropped first."""

    __slots__ = ("_by_client_id", "_by_id", "_figures")

    def __init__(self) -> None:
        # A plain dict would walk over all that was dropped before to find the oldest.
        self._by_id: OrderedDict[str, Flight] = OrderedDict()
        self._by_client_id: dict[str, str] = {}
        self._figures = 0

    def keep(self, flight: Flight) -> None:
        """Remember a decision; what is learned of its flight later is seen too."""
        request = flight.request
        before = self._by_id.pop(request.id, None)
        if before is not None:
            self._figures -= _size(before.decision)
        self._by_id[request.id] = flight
        if request.client_id:
            self._by_client_id[request.client_id] = request.id
        self._figures += _size(flight.decision)
        while self._figures > MAX_FIGURES or len(self._by_id) > MAX_REQUESTS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        request_id, dropped = self._by_id.popitem(last=False)
        self._figures -= _size(dropped.decision)
        client_id = dropped.request.client_id
        if self._by_client_id.get(client_id) == request_id:
            del self._by_client_id[client_id]

    def find(self, request_id: str) -> dict[str, Any] | None:
        """The explanation of a request by its minted or its client's id; None when it is unknown or too old."""
        flight = self._by_id.get(request_id) or self._by_id.get(self._by_client_id.get(request_id, ""))
        return explain(flight) if flight else None


def _size(decision: Decision) -> int:
    return len(decision.candidates) * (len(decision.scores) + 4) + 32
