"""The nouns that every room speaks: request, endpoint, signals, the fleet view, decision, outcome.

Frozen values and numpy columns only.  How bytes become a Request is `wire`; who chooses is
`scheduling`; who keeps the books is `routing`.  What engines say about their KV caches stands in `kvevents`.
"""

from shoal.pool import kvevents
from shoal.pool.decision import Decision, ScoreColumn
from shoal.pool.endpoint import Endpoint, EndpointState, ServedModel
from shoal.pool.outcome import Outcome, Refusal, RefusalReason
from shoal.pool.request import Api, Request
from shoal.pool.signals import Signals
from shoal.pool.view import Column, FleetView, Given

__all__ = [
    "Api",
    "Column",
    "Decision",
    "Endpoint",
    "EndpointState",
    "FleetView",
    "Given",
    "Outcome",
    "Refusal",
    "RefusalReason",
    "Request",
    "ScoreColumn",
    "ServedModel",
    "Signals",
    "kvevents",
]
