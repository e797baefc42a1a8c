"""Requests and sessions under way, as the cluster keeps them.

Owns what is known of each; what happens to them is the cluster's.
"""

import math
from collections import deque

from shoal.pool import Outcome, Request
from shoal.scheduling.slo import SLO_TPOT_HEADER, SLO_TTFT_HEADER, slo_s
from shoal.simulation.nodes import Node
from shoal.simulation.pickers import Pickers
from shoal.simulation.sessions import Session, Turn


class Talk:
    """A session under way.  parent: who waits for it.  children: how many sessions it waits for itself.

    slo_*: the latency that its client asks for, NaN for none.
    """

    __slots__ = ("begun_at", "children", "parent", "session", "slo_tpot_s", "slo_ttft_s", "turns")

    def __init__(self, session: Session, parent: "Talk | None", now: float) -> None:
        self.session = session
        self.turns = session.turns()
        self.parent = parent
        self.children = 0
        self.begun_at = now
        self.slo_ttft_s = self.slo_tpot_s = math.nan
        if session.headers:
            wishes = Request(id="", headers=dict(session.headers))
            self.slo_ttft_s = slo_s(wishes, SLO_TTFT_HEADER) or math.nan
            self.slo_tpot_s = slo_s(wishes, SLO_TPOT_HEADER) or math.nan


class Flight:
    """One request on its way.  tenant: as the router knows it.  is_submitted: whether its engine has it.

    pickers, router: who decides on it.  whole: of a prefill on another engine, the id of the request that it is for.
    prefill: of a request, the id of its prefill under way, "" for none; prefilled: what came of it, None where its
    engine prefills by itself; prefill_s: how long it took; source: who has the KV until it is where it is decoded.
    """

    __slots__ = (
        "arrived_at", "attempts", "endpoints", "is_submitted", "node", "pickers", "prefill", "prefill_s", "prefilled",
        "router", "source", "talk", "tenant", "turn", "whole",
    )  # fmt: skip

    def __init__(self, talk: Talk, turn: Turn, tenant: str, pickers: Pickers, router: int, now: float) -> None:
        self.talk = talk
        self.tenant = tenant
        self.turn = turn
        self.pickers = pickers
        self.router = router
        self.arrived_at = now
        self.attempts = 0
        self.is_submitted = False
        self.endpoints: deque[str] = deque()
        self.node: Node | None = None
        self.whole = self.prefill = ""
        self.prefill_s = 0.0
        self.prefilled: Outcome | None = None
        self.source: Node | None = None
