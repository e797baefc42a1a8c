"""In which order the prompts that were sent to an endpoint are prefilled, and how long each was at the front.

Owns no clock and no belief about speed, so that what it says of an endpoint's speed does not depend on what was thought
of it before.  Engines prefill in the order of arrival; a request that waits is served from the moment when the one
before it had its first token, and one that finds nobody waiting from its own arrival.  What is prefilled in one step
has its first tokens together, and is one turn.
"""

from typing import NamedTuple

# How many of the latest places are kept: twice as many at most, since the older half goes at once.
_KEPT = 128
# How many places a look back may pass.
_LOOKED_AT = 64
# First tokens that come so close to each other are of one step of the engine: even small models take longer for one.
STEP_S = 0.001
# Beside this share of its own work, work that may or may not have been ahead of a request does not matter.
_NEGLIGIBLE = 0.25


class Place:
    """One request's place in a line.

    tokens: uncached ones, as believed or known.  first_at: of its first token, None while that is not known.  left_at:
    when it was over, None while it runs.
    """

    __slots__ = ("first_at", "joined_at", "left_at", "number", "tokens")

    def __init__(self, number: int, joined_at: float, tokens: float) -> None:
        self.number = number
        self.joined_at = joined_at
        self.tokens = tokens
        self.first_at: float | None = None
        self.left_at: float | None = None


class Turn(NamedTuple):
    """What an endpoint did up to a first token: `tokens` of work in `seconds`.

    was_idle: nobody was waiting, so the seconds hold also what an answer takes to begin.
    """

    tokens: float
    seconds: float
    was_idle: bool


class Line:
    """The latest places at one endpoint, own requests and those of peers, by arrival."""

    __slots__ = ("_gone", "_places")

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._gone = 0

    def join(self, now: float, tokens: float) -> Place:
        """Add a request with `tokens` to prefill."""
        places = self._places
        if len(places) >= 2 * _KEPT:
            del places[:_KEPT]
            self._gone += _KEPT
        place = Place(self._gone + len(places), now, tokens)
        places.append(place)
        return place

    def reach(self, place: Place, first_at: float, tokens: float) -> Turn | None:
        """Note when a request had its first token and what it really had to prefill.

        Returns what that says of the endpoint, None when it cannot be told: answers are recorded when they end, so some
        that went before may not be known yet.  These count with what is believed of them.
        """
        place.first_at, place.tokens = first_at, tokens
        own = place.number - self._gone
        if own < 0:
            return None
        work, unknown, began_at, joined_at = tokens + self._beside(own, first_at), 0.0, first_at, place.joined_at
        for before in reversed(self._places[max(0, own - _LOOKED_AT) : own]):
            at = before.first_at
            if at is None:
                if before.left_at is None or before.left_at > place.joined_at:
                    unknown += before.tokens
            elif abs(at - began_at) <= STEP_S:
                work, began_at, joined_at = work + before.tokens, min(at, began_at), before.joined_at
            elif at <= first_at:
                if at >= joined_at:
                    return Turn(work + unknown, first_at - at, was_idle=False)
                break
        if unknown > _NEGLIGIBLE * work:
            return None
        return Turn(work + unknown, first_at - joined_at, was_idle=True)

    def _beside(self, own: int, first_at: float) -> float:
        """Return the work behind a place that was done in the same step: up to the last one that is known to be."""
        work = between = 0.0
        for behind in self._places[own + 1 : own + 1 + _LOOKED_AT]:
            if behind.joined_at > first_at:
                break
            between += behind.tokens
            if behind.first_at is None:
                continue
            if abs(behind.first_at - first_at) > STEP_S:
                break
            work, between = work + between, 0.0
        return work
