"""Sessions that said they will be back: their endpoint is preferred for the time that they gave, their prefix spared.

Owns which session is expected where, and until when; who steps aside for it; and the answer to a client that wants its
prefix or nothing.  An agent whose tool runs for a second comes back to a cache that holds all it said; without this an
equal match elsewhere, or a moment of load, would send it away, or others' prompts would have pushed out what it said.
"""

import hashlib
from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

import numpy as np

from shoal.pool import Decision, FleetView, Outcome, Refusal, Request
from shoal.prefix import EstimatedIndex
from shoal.routing.books import ASSUMED_OUTPUT_TOKENS, Flight
from shoal.routing.fleet import Fleet, Member
from shoal.routing.news import PeerExpects
from shoal.routing.outbox import Outbox
from shoal.routing.refusals import NOWHERE
from shoal.routing.reserves import Reserves, Session
from shoal.routing.status import ReturnGauges

MAX_SESSIONS = 50_000
"""About 20 MB; the oldest promise gives way."""

KEPT = ": kept for its session"
SPARED = ": spares another session"


class Promise(NamedTuple):
    """Where a session is expected, until when, and which request said so: "" for one of a peer's."""

    endpoint_id: str
    until: float
    request_id: str


def session_of(request: Request) -> Session:
    """Return the name of a request's session among those of all tenants, for peers too, that tells nobody who it is."""
    name = f"{len(request.tenant_id)} {request.tenant_id} {request.session_id}"
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Returns:
    """Promises by session, own ones and those that peers tell.

    max_wait_s: how much longer than elsewhere a session may have to wait for its endpoint, or a request for another one
    than that whose cache a session comes back for.
    """

    __slots__ = ("_expected", "_fleet", "_kept", "_outbox", "_reserves", "_spared", "max_wait_s")

    def __init__(self, max_wait_s: float, fleet: Fleet, index: EstimatedIndex, outbox: Outbox) -> None:
        self.max_wait_s = max_wait_s
        self._fleet = fleet
        self._outbox = outbox
        self._expected: OrderedDict[Session, Promise] = OrderedDict()
        self._reserves = Reserves(fleet, index)
        self._kept = self._spared = 0

    def __len__(self) -> int:
        return len(self._expected)

    # ------------------------------------------------------------------ promises

    def ended(self, flight: Flight, now: float) -> None:
        """Note from when on a session is expected back, if it said so; to be called before its booking is released."""
        request, outcome = flight.request, flight.outcome
        hints, member = request.hints, flight.member
        if hints is None or hints.returns_within_s is None or not request.session_id or member is None:
            return
        if outcome is not None and not outcome.is_prefilled:
            return
        promise = Promise(member.endpoint.id, now + hints.returns_within_s, request.id)
        self._expect(session_of(request), promise, _held_tokens(flight), now)

    def recorded(self, flight: Flight, outcome: Outcome, served: Member | None, now: float) -> None:
        """Put a promise right by the record: kept where the answer was `served`, nowhere when none was.

        How long the answer became is known by now: what its client had said may be anything.
        """
        if not self._expected:
            return
        answer_tokens = float(outcome.completion_tokens or 0)
        if served is not None:
            self._reserves.wrote(served.endpoint.id, answer_tokens)
        if flight.request.hints is None or not flight.request.session_id:
            return
        session = session_of(flight.request)
        promise = self._expected.get(session)
        if promise is None or promise.request_id != flight.request.id:
            return
        if not outcome.is_prefilled:
            self._forget(session)
            self._outbox.expects(session, "", 0.0, 0.0)
        elif served is not None and served.endpoint.id != promise.endpoint_id:
            self._expect(session, promise._replace(endpoint_id=served.endpoint.id), _held_tokens(flight), now)
        elif served is not None:
            self._reserves.measured(session, served.endpoint.id, _held_tokens(flight), answer_tokens)

    def told(self, news: PeerExpects, now: float) -> None:
        """Take in what a peer says of a session: where it is expected, or that it is expected no more."""
        self._forget(news.session)
        if news.endpoint_id:
            promise = Promise(news.endpoint_id, now + news.within_ms / 1e3, "")
            self._remember(news.session, promise, float(news.tokens), now)

    def gauges(self) -> ReturnGauges:
        """Return how many sessions are expected, and what was done for them."""
        return ReturnGauges(
            expected=len(self._expected), kept=self._kept, spared=self._spared, lost=self._reserves.lost_total
        )

    def _expect(self, session: Session, promise: Promise, tokens: float, now: float) -> None:
        self._forget(session)
        self._remember(session, promise, tokens, now)
        self._outbox.expects(session, promise.endpoint_id, promise.until - now, tokens)

    def _remember(self, session: Session, promise: Promise, tokens: float, now: float) -> None:
        self._expected[session] = promise
        member = self._fleet.get(promise.endpoint_id)
        if member is not None:
            self._reserves.add(session, member, tokens, promise.until)
        # Two for each that comes, so that those whose time is over go sooner than they came.
        for name, oldest in list(islice(self._expected.items(), 2)):
            if oldest.until < now or len(self._expected) > MAX_SESSIONS:
                self._forget(name)

    def _forget(self, session: Session) -> Promise | None:
        """Drop a promise with what is reserved for it."""
        promise = self._expected.pop(session, None)
        if promise is not None:
            self._reserves.drop(session, promise.endpoint_id)
        return promise

    # ------------------------------------------------------------------ decisions

    def place(self, request: Request, decision: Decision, view: FleetView, now: float) -> Decision:
        """Return the decision with those in mind who said that they will be back.

        view: the candidates before any filter.
        """
        if not self._expected:
            return decision
        if request.session_id:
            session = session_of(request)
            promise = self._expected.get(session)
            if promise is not None:
                self._outbox.expects(session, "", 0.0, 0.0)
                is_back = now <= promise.until and self._reserves.back(session, promise.endpoint_id, now)
                self._forget(session)
                if is_back:
                    return self._keep(promise.endpoint_id, decision, view)
        returns_s = request.hints.returns_within_s if request.hints is not None else None
        if returns_s is None and not self._reserves.are_at(decision.chosen[0]):
            return decision
        return self._spare(request, returns_s or 0.0, decision, view, now)

    def _keep(self, endpoint_id: str, decision: Decision, view: FleetView) -> Decision:
        """Return the decision with the endpoint of a session that is back in time first, unless it is too busy."""
        chosen = decision.chosen
        if endpoint_id == chosen[0] or endpoint_id not in decision.candidates:
            return decision
        wait_s = waits_s(view)
        if wait_s[self._position(view, endpoint_id)] - wait_s[self._position(view, chosen[0])] > self.max_wait_s:
            return decision
        self._kept += 1
        return _led_by(endpoint_id, decision, KEPT)

    def _spare(self, request: Request, returns_s: float, decision: Decision, view: FleetView, now: float) -> Decision:
        """Return the decision with the endpoint first that costs least, with what it would push out of reserves.

        Only those that were chosen are compared.  Each costs the wait, what it has to prefill of this prompt, and what
        it will have to prefill again: of others, and of this one when it is back in `returns_s`, 0 for never.  All in
        seconds.
        """
        chosen, matched, wait_s = decision.chosen, view.column("matched_tokens"), waits_s(view)
        speed = self._fleet.cells["prefill_s_per_token"]
        best, least_s, most_s = chosen[0], np.inf, np.inf
        for endpoint_id in chosen:
            at, s_per_token = self._position(view, endpoint_id), speed[self._fleet.at(endpoint_id).row]
            tokens = max(0.0, request.prompt_tokens - float(matched[at]))
            lost = self._reserves.pushed_out(endpoint_id, tokens, now)
            if returns_s:
                lost += self._reserves.passing(endpoint_id, float(request.prompt_tokens), returns_s, now)
            own_s = float(wait_s[at]) + tokens * s_per_token
            if endpoint_id == chosen[0]:
                if not (lost or returns_s):
                    return decision
                most_s = own_s + self.max_wait_s
            if own_s <= most_s and own_s + lost * s_per_token < least_s:
                best, least_s = endpoint_id, own_s + lost * s_per_token
        if best == chosen[0]:
            return decision
        self._spared += 1
        return _led_by(best, decision, SPARED)

    def _position(self, view: FleetView, endpoint_id: str) -> int:
        """Where a candidate stands in the columns."""
        row = self._fleet.at(endpoint_id).row
        return row if view.rows is None else int(np.searchsorted(view.rows, row))


def _held_tokens(flight: Flight) -> float:
    """What an endpoint holds of a session when its answer has ended; until it is recorded, with an answer as usual."""
    outcome = flight.outcome
    said = outcome.completion_tokens if outcome is not None else None
    usual = min(flight.output_tokens, float(ASSUMED_OUTPUT_TOKENS))
    return flight.request.prompt_tokens + (usual if said is None else said)


def _led_by(endpoint_id: str, decision: Decision, why: str) -> Decision:
    """Return the decision with an endpoint first, and as many behind it as before."""
    others = [name for name in decision.chosen if name != endpoint_id]
    chosen = (endpoint_id, *others)[: max(len(decision.chosen), 1)]
    return decision._replace(profile=decision.profile + why, chosen=chosen)


def waits_s(view: FleetView) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return how long a request would wait on each candidate: as predicted, else for the prefill that is booked."""
    name = "predicted_ttft_s" if view.has("predicted_ttft_s") else "inflight_prefill_s"
    return np.asarray(view.column(name), np.float64)


def is_conditional(request: Request) -> bool:
    """Whether a client wants its prefix or nothing: `Prefer: if-available` (RFC 7240)."""
    prefer = request.headers.get("prefer", "")
    return any(each.partition(";")[0].strip().lower() == "if-available" for each in prefer.split(","))


def holders(view: FleetView) -> FleetView | Refusal:
    """Return the candidates that hold any of the prompt's prefix, or the refusal where none does."""
    mask = view.column("held_tokens") > 0
    if mask.any():
        return view if mask.all() else view.keep(mask)
    return NOWHERE
