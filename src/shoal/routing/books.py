"""What is in flight: one booking per forwarded request, written at dispatch and closed once.

Owns the in-flight columns of the fleet, for own requests and for those of peers.  Uncached prompt work
drains as a fluid at the pace that the endpoint was seen to prefill at, since no data plane tells the end of a prefill;
the requests in flight bound it.
"""

from typing import Protocol

import numpy as np

from shoal.flow import Ticket
from shoal.pool import Decision, Given, Outcome, Request, Signals
from shoal.prefix import Expectation
from shoal.routing.fleet import Fleet, Floats, Member
from shoal.routing.laws import Noted
from shoal.routing.line import Place

# Output tokens assumed for a request that set no limit, or a limit beyond what answers use.
ASSUMED_OUTPUT_TOKENS = 256
# From this use of its KV cache on, what waits in an engine waits for memory and not for its turn.
FULL_RATIO = 0.9


def expected_output_tokens(request: Request) -> int:
    """Return how long an answer is thought to become: as its client says where it is believed, or the usual."""
    asked, hints = request.max_output_tokens, request.hints
    if hints is not None and hints.output_tokens is not None:
        return min(asked or hints.output_tokens, hints.output_tokens)
    return min(asked, ASSUMED_OUTPUT_TOKENS) if asked else ASSUMED_OUTPUT_TOKENS


class Flight:
    """One forwarded request, from its dispatch until it has both ended and been recorded.

    work_tokens: uncached tokens ahead of it and its own, at dispatch.  member: where it is booked, None once it ended.
    place: in the line of that endpoint, since it was booked.
    blocks: dropped when it is closed.  matched: what each candidate was believed to hold of the prompt, in tokens, one
    figure where it is the same for all.  matched_tokens: what needs no prefill.  predicted_tokens: what the engine will
    call cached, which is more where a slow tier holds it.  is_exact: known from KV events.  served_id: who answered,
    once recorded.  number: what peers know it by, 0 while none was told.  noted: what was predicted, None where nothing
    was.  ticket: with which it went through the gate, None where there is none.
    """

    __slots__ = (
        "arrived_at",
        "blocks",
        "decision",
        "dispatched_at",
        "ended_at",
        "expectation",
        "is_exact",
        "matched",
        "matched_tokens",
        "member",
        "noted",
        "number",
        "outcome",
        "output_tokens",
        "place",
        "predicted_tokens",
        "priority",
        "request",
        "served_id",
        "target_model",
        "ticket",
        "uncached_tokens",
        "work_tokens",
    )

    def __init__(self, request: Request, target_model: str, blocks: bytes, decision: Decision, now: float) -> None:
        self.request = request
        self.target_model = target_model
        self.blocks = blocks
        self.decision = decision
        self.arrived_at = self.dispatched_at = now
        self.ended_at: float | None = None
        self.outcome: Outcome | None = None
        self.member: Member | None = None
        self.matched: Given = 0.0
        self.matched_tokens = 0
        self.predicted_tokens = 0
        self.is_exact = False
        self.expectation: Expectation | None = None
        self.uncached_tokens = 0.0
        self.output_tokens = float(expected_output_tokens(request))
        self.served_id = ""
        self.work_tokens = 0.0
        self.place: Place | None = None
        self.number = 0
        self.noted: Noted | None = None
        self.priority = 0
        self.ticket: Ticket | None = None

    def engine_ttft_s(self, outcome: Outcome) -> float | None:
        """Return the time to first token that is the engine's, None when no token came.

        What the client took to send its request says nothing of the engine, nor what it waited here for its tokens or
        its turn.
        """
        ttft_s = outcome.ttft_s if outcome.engine_ttft_s is None else outcome.engine_ttft_s
        return None if ttft_s is None else max(0.0, ttft_s - (self.dispatched_at - self.arrived_at))


class Listener(Protocol):
    """Who is told of every change of the own bookings."""

    def booked(self, flight: Flight, member: Member) -> None: ...

    def moved(self, flight: Flight, member: Member) -> None: ...

    def released(self, flight: Flight) -> None: ...


class Books:
    """Bookings and releases on the fleet's columns.

    inflight: own requests.  listener: told of own bookings, None while nobody has to know.
    """

    __slots__ = ("_fleet", "_has_waits", "inflight", "listener")

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._has_waits = False
        self.inflight = 0
        self.listener: Listener | None = None

    def book(self, flight: Flight, member: Member, now: float) -> None:
        """Count the request on `member` from this instant."""
        flight.member = member
        flight.uncached_tokens = uncached = float(max(0, flight.request.prompt_tokens - flight.matched_tokens))
        flight.work_tokens = self.hold(member, uncached, flight.output_tokens, now) + uncached
        flight.place = member.line.join(now, uncached)
        self.inflight += 1
        if self.listener is not None:
            self.listener.booked(flight, member)

    def hold(self, member: Member, uncached_tokens: float, output_tokens: float, now: float) -> float:
        """Count one request in the columns; return the uncached tokens that are ahead of it."""
        cells, row = self._fleet.cells, member.row
        s_per_token = cells["prefill_s_per_token"][row]
        ahead_s = max(0.0, cells["clear_at"][row] - now)
        cells["clear_at"][row] = now + ahead_s + uncached_tokens * s_per_token
        cells["booked_uncached_tokens"][row] = booked = cells["booked_uncached_tokens"][row] + uncached_tokens
        cells["inflight_requests"][row] = requests = cells["inflight_requests"][row] + 1.0
        cells["inflight_output_tokens"][row] = output = cells["inflight_output_tokens"][row] + output_tokens
        if booked + output > cells["kv_capacity_tokens"][row]:
            self._has_waits = True
            cells["memory_s"][row] = _memory_s(
                booked + output, cells["kv_capacity_tokens"][row], _answer_s(member, output, requests)
            )
        return ahead_s / s_per_token

    def release(self, flight: Flight, now: float) -> None:
        """Take the request off the books; a second call does nothing."""
        member, flight.member = flight.member, None
        if member is None:
            return
        self.inflight -= 1
        member.ends.left(now)
        if flight.place is not None:
            flight.place.left_at = now
        self.free(member, flight.uncached_tokens, flight.output_tokens, now)
        if self.listener is not None:
            self.listener.released(flight)

    def free(self, member: Member, uncached_tokens: float, output_tokens: float, now: float) -> None:
        """Take out of the columns what `hold` counted; nothing when the endpoint left meanwhile."""
        if member.row < 0:
            return
        cells, row = self._fleet.cells, member.row
        left = cells["inflight_requests"][row] - 1.0
        if left < 0.5:
            # Sums of floats may leave a residue; an idle endpoint owes nothing.
            cells["inflight_requests"][row] = 0.0
            cells["inflight_output_tokens"][row] = 0.0
            cells["booked_uncached_tokens"][row] = 0.0
            cells["clear_at"][row] = 0.0
            cells["memory_s"][row] = 0.0
            return
        cells["inflight_requests"][row] = left
        cells["inflight_output_tokens"][row] = output = cells["inflight_output_tokens"][row] - output_tokens
        cells["booked_uncached_tokens"][row] = booked = cells["booked_uncached_tokens"][row] - uncached_tokens
        if cells["memory_s"][row]:
            cells["memory_s"][row] = _memory_s(
                booked + output, cells["kv_capacity_tokens"][row], _answer_s(member, output, left)
            )
        latest = now + booked * cells["prefill_s_per_token"][row]
        if latest < cells["clear_at"][row]:
            cells["clear_at"][row] = latest

    def read(self, member: Member, signals: Signals) -> None:
        """Note that requests wait in an engine whose cache is full: what running ones hold, the books do not know."""
        cells, row = self._fleet.cells, member.row
        requests, waiting = cells["inflight_requests"][row], signals.waiting or 0.0
        if not waiting or not requests or (signals.kv_usage_ratio or 0.0) < FULL_RATIO:
            cells["queued_s"][row] = 0.0
            return
        answer_s = _answer_s(member, cells["inflight_output_tokens"][row], requests)
        self._has_waits = True
        cells["queued_s"][row] = waiting / max(signals.running or 0.0, 1.0) * answer_s

    def move(self, flight: Flight, member: Member, now: float) -> None:
        """Book the request on the endpoint that really serves it."""
        if flight.member is None or flight.member is member:
            return
        if flight.place is not None:
            flight.place.tokens = 0.0
        listener, self.listener = self.listener, None
        self.release(flight, now)
        self.book(flight, member, now)
        self.listener = listener
        if listener is not None:
            listener.moved(flight, member)

    def prefill_s(self, now: float, mean_uncached_tokens: float) -> Floats:
        """Seconds until each endpoint has prefilled what is in flight there, foreign requests at the mean of ours.

        With the wait for memory, where more is in flight than the KV cache can hold.
        """
        waits = self.memory_s()
        work = self._work_s(now, mean_uncached_tokens)
        return work if waits is None else work + waits

    def memory_s(self) -> Floats | None:
        """Seconds until what is in flight to each endpoint has room in its KV cache, by the books or the engine.

        None when all has room.
        """
        if not self._has_waits:
            return None
        columns = self._fleet.columns
        waits: Floats = np.maximum(columns["memory_s"], columns["queued_s"])
        self._has_waits = bool(waits.any())
        return waits

    def uncached_tokens(self, now: float, mean_uncached_tokens: float) -> Floats:
        """Uncached prompt tokens in flight that each endpoint has not prefilled yet."""
        return self._work_s(now, mean_uncached_tokens) / self._fleet.columns["prefill_s_per_token"]

    def _work_s(self, now: float, mean_uncached_tokens: float) -> Floats:
        columns = self._fleet.columns
        booked: Floats = np.maximum(columns["clear_at"] - now, 0.0)
        if self._fleet.has_foreign:
            booked += columns["foreign_requests"] * columns["prefill_s_per_token"] * mean_uncached_tokens
        return booked


def _answer_s(member: Member, output_tokens: float, requests: float) -> float:
    """Return how long an endpoint takes for one answer.  output_tokens: of all that is in flight there."""
    return output_tokens / requests * member.pace.tpot_s


def _memory_s(held_tokens: float, capacity_tokens: float, answer_s: float) -> float:
    """Return how long what is in flight waits for KV cache to become free, 0.0 when all of it fits.

    held_tokens: what it will hold at its longest.  answer_s: of one answer: as long as one takes, each part of the
    cache is not free.
    """
    over = held_tokens - capacity_tokens
    return over / capacity_tokens * answer_s if over > 0.0 else 0.0
