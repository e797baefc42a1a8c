"""One request in the queue: what is known of it there, and where it stands."""

import math
from typing import Any

import msgspec


class Ticket(msgspec.Struct, eq=False, gc=False):
    """A request that waits, is about to be sent, or has gone.

    lane: those whose requests can go to the same endpoints.  weight: its tenant's.  size_bytes: of its body.
    work_tokens: tokens that it is thought to cost.  ttl_s: how long it waits at most; infinite for as long as it takes.
    item: its owner's.  is_follow_up: a later turn of a session that is under way.  deadline: when its client stops
    waiting, infinite when it did not say.  slo_ttft_s: the time to first token that it asks for, infinite without.
    number: how many had come with it, 0 for one that did not have to wait.  left: how many had come when it left, 0
    before that.  ahead: how many were there before it.  charged_tokens: what its tenant's share was charged.
    """

    request_id: str
    lane: str = ""
    priority: int = 0
    tenant_id: str = ""
    weight: float = 1.0
    size_bytes: int = 0
    work_tokens: float = 1.0
    arrived_at: float = 0.0
    ttl_s: float = math.inf
    item: Any = None
    is_follow_up: bool = False
    deadline: float = math.inf
    slo_ttft_s: float = math.inf
    number: int = 0
    left: int = 0
    ahead: int = 0
    charged_tokens: float = 0.0
