"""Prefixes that sessions will come back for, and what a prompt would push out of them where it is sent.

Owns the count of what came to an endpoint since such a prefix was last used.  An engine drops what was used least
recently, so a prefix is there for as long as it and all that came after it fit the cache.  Who comes back, and until
when, is `returns`'.
"""

import math
from collections import OrderedDict
from typing import NamedTuple

from shoal.prefix import BLOCK_TOKENS, EstimatedIndex
from shoal.routing.fleet import Fleet, Member

Session = bytes
"""Its name among the sessions of all tenants."""

STEEPNESS = 3.0
"""What a prefix loses by a prompt grows with this power of the way that it has gone to its end: endpoints for which
nobody comes back are filled first, and a prefix is protected the more the nearer it is to being lost."""

MOST_LOOKED_AT = 16
"""Of one endpoint, those that go first: what is pushed out is pushed out of them."""

FLOW_S = 10.0
"""How long is counted before a flow of tokens is believed."""

LESSON, FORGETTING_S = 0.125, 300.0
"""How much one prefix that was lost, or still there, tells of the next ones, and for how long that is remembered."""


class _Reserve(NamedTuple):
    """tokens: of the prefix.  came: on the endpoint's count, when it was last used."""

    tokens: float
    came: float
    until: float


class _Place:
    """One endpoint with reserves, those that go first first.  written: tokens of answers that ended there meanwhile."""

    __slots__ = ("reserves", "slot", "written")

    def __init__(self, slot: int) -> None:
        self.reserves: OrderedDict[Session, _Reserve] = OrderedDict()
        self.slot = slot
        self.written = 0.0


class _Flow(NamedTuple):
    """How fast tokens come to an endpoint, by its slot.  since, came: when the count began, and where."""

    endpoint_id: str
    since: float
    came: float
    per_s: float = 0.0


class Reserves:
    """Reserves by endpoint.  lost_total: prefixes that were pushed out before their session was back."""

    __slots__ = ("_fleet", "_flows", "_index", "_kept_ratio", "_learned_at", "_places", "lost_total")

    def __init__(self, fleet: Fleet, index: EstimatedIndex) -> None:
        self._fleet = fleet
        self._index = index
        self._places: dict[str, _Place] = {}
        self._flows: dict[int, _Flow] = {}
        self._kept_ratio = 1.0
        self._learned_at = 0.0
        self.lost_total = 0

    def are_at(self, endpoint_id: str) -> bool:
        """Whether an endpoint has any."""
        return endpoint_id in self._places

    def add(self, session: Session, member: Member, tokens: float, until: float) -> None:
        """Reserve a prefix of so many tokens that was used on `member` just now."""
        place = self._places.get(member.endpoint.id)
        if place is None or place.slot != member.slot:
            place = self._places[member.endpoint.id] = _Place(member.slot)
        place.reserves[session] = _Reserve(max(1.0, tokens), self._came(place), until)
        place.reserves.move_to_end(session)

    def measured(self, session: Session, endpoint_id: str, tokens: float, answer_tokens: float) -> None:
        """Put the size of a reserve right.  answer_tokens: of its own answer, which `wrote` has just counted."""
        place = self._places.get(endpoint_id)
        reserve = place.reserves.get(session) if place is not None else None
        if place is not None and reserve is not None:
            place.reserves[session] = _Reserve(max(1.0, tokens), reserve.came + answer_tokens, reserve.until)

    def drop(self, session: Session, endpoint_id: str) -> None:
        """Forget a reserve; nothing when there is none."""
        place = self._places.get(endpoint_id)
        if place is not None and place.reserves.pop(session, None) is not None and not place.reserves:
            del self._places[endpoint_id]

    def back(self, session: Session, endpoint_id: str, now: float) -> bool:
        """Drop the reserve of a session that is back in time; return whether any of it may still be there."""
        place, size = self._of(endpoint_id)
        reserve = place.reserves.get(session) if place is not None else None
        if place is None or reserve is None or math.isnan(size):
            self.drop(session, endpoint_id)
            return True
        left = size - (self._came(place) - reserve.came)
        self._learn(min(1.0, max(0.0, left / reserve.tokens)), now)
        self.lost_total += left <= 0.0
        self.drop(session, endpoint_id)
        return left > 0.0

    def wrote(self, endpoint_id: str, tokens: float) -> None:
        """Count an answer that ended on an endpoint: it lies in its cache too."""
        place = self._places.get(endpoint_id)
        if place is not None:
            place.written += tokens

    # ------------------------------------------------------------------ what a choice costs

    def pushed_out(self, endpoint_id: str, tokens: float, now: float) -> float:
        """Return how many tokens of reserves are lost to a prompt that brings so many to an endpoint.

        As far as reserves have lasted of late: where caches are too small for all, nothing is gained by stepping aside.
        0.0 where the size of the cache is not known.
        """
        place, size = self._of(endpoint_id)
        if place is None or math.isnan(size):
            return 0.0
        came, lost, gone = self._came(place), 0.0, list[Session]()
        for looked_at, (session, reserve) in enumerate(place.reserves.items()):
            if looked_at == MOST_LOOKED_AT:
                break
            since = came - reserve.came
            if now > reserve.until:
                gone.append(session)
            elif since < size:
                most = min(tokens, reserve.tokens, size - since)
                lost += most * min(1.0, (since + reserve.tokens + tokens) / size) ** STEEPNESS
        for session in gone:
            self.drop(session, endpoint_id)
        return min(lost, tokens) * self._worth(now)

    def passing(self, endpoint_id: str, tokens: float, within_s: float, now: float) -> float:
        """Return how many tokens of a prefix are lost on an endpoint until it is used again, by what comes to it."""
        member = self._fleet.get(endpoint_id)
        if member is None:
            return 0.0
        came = float(self._index.sent_blocks(member.slot) * BLOCK_TOKENS)
        flow = self._flows.get(member.slot)
        if flow is None or flow.endpoint_id != endpoint_id or flow.came > came:
            flow = self._flows[member.slot] = _Flow(endpoint_id, now, came)
        elif now - flow.since > FLOW_S:
            per_s = (came - flow.came) / (now - flow.since)
            flow = self._flows[member.slot] = _Flow(endpoint_id, now, came, per_s)
        size = self._fleet.cells["kv_capacity_tokens"][member.row]
        if not flow.per_s or math.isnan(size):
            return 0.0
        gone_ratio: float = min(1.0, (tokens + flow.per_s * within_s) / size) ** STEEPNESS
        return tokens * gone_ratio * self._worth(now)

    def _of(self, endpoint_id: str) -> tuple[_Place | None, float]:
        """The reserves of an endpoint, and the tokens that its cache has beside what is being written; NaN: unknown."""
        place, member = self._places.get(endpoint_id), self._fleet.get(endpoint_id)
        if place is None or member is None or member.slot != place.slot:
            return None, math.nan
        cells, row = self._fleet.cells, member.row
        return place, max(1.0, cells["kv_capacity_tokens"][row] - cells["inflight_output_tokens"][row])

    def _came(self, place: _Place) -> float:
        """Tokens that have come to an endpoint and were not there, by a count that only differences are taken of."""
        return self._index.sent_blocks(place.slot) * BLOCK_TOKENS + place.written

    # ------------------------------------------------------------------ whether it helps

    def _worth(self, now: float) -> float:
        """The share of reserves that is thought to last, 1.0 as long as nothing else was seen of late."""
        return 1.0 - (1.0 - self._kept_ratio) * math.exp((self._learned_at - now) / FORGETTING_S)

    def _learn(self, ratio: float, now: float) -> None:
        worth = self._worth(now)
        self._kept_ratio, self._learned_at = worth + LESSON * (ratio - worth), now
