"""What the record of a request teaches: who failed, how fast the endpoint is, what its cache really held.

Owns the moment of learning; the figures it changes live in `candidates` (health), `pace`, `fleet` and the prefix index.
"""

from shoal.pool import Api, Outcome
from shoal.prefix import EstimatedIndex, Tail, read_blocks
from shoal.routing.books import Books, Flight
from shoal.routing.candidates import Candidates
from shoal.routing.fleet import TRIAL_RECORDS, Fleet, Member
from shoal.routing.health import EjectionPolicy
from shoal.routing.outbox import Outbox
from shoal.routing.pace import Decoding, pool_s_per_token, request_s

# The pool's medians move slowly; they are taken again after this many records.
RECORDS_PER_REFIT = 16
# The APIs whose usage says what was cached, where the engine is told to.
CACHE_REPORTING = (Api.CHAT, Api.COMPLETIONS)
# Below this many output tokens the mean time per token says more about the network than about decoding.
MIN_TPOT_TOKENS = 5


class Lessons:
    """Learning from records."""

    __slots__ = (
        "_books",
        "_candidates",
        "_decoding",
        "_fleet",
        "_index",
        "_outbox",
        "_pool_token_s",
        "_since_refit",
        "_tail",
    )

    def __init__(
        self, fleet: Fleet, books: Books, candidates: Candidates, index: EstimatedIndex, tail: Tail, outbox: Outbox
    ) -> None:
        self._outbox = outbox
        self._fleet = fleet
        self._books = books
        self._candidates = candidates
        self._index = index
        self._tail = tail
        self._since_refit = 0
        self._decoding = Decoding()
        self._pool_token_s = pool_s_per_token(())

    def learn(self, flight: Flight, outcome: Outcome, policy: EjectionPolicy, now: float) -> bool:
        """Charge failed attempts to those who failed, and teach from the one who served.

        Returns whether the chosen endpoint prefilled the prompt.
        """
        fleet = self._fleet
        first = fleet.get(flight.decision.chosen[0])
        served = fleet.at_address(outcome.served_address) if outcome.served_address else None
        if outcome.attempts > 1 or outcome.is_upstream_failure:
            self._blame(flight, served, outcome, policy, now)
        if served is not None and outcome.status and not outcome.is_upstream_failure:
            self._candidates.succeeded(served)
        is_prefilled = self._credit(flight, first, served, outcome, now)
        ttft_s = flight.engine_ttft_s(outcome)
        if served is not None and not outcome.is_upstream_failure and ttft_s is not None:
            self._measure(flight, served, outcome, ttft_s)
        return is_prefilled and served is first

    def _blame(
        self, flight: Flight, served: Member | None, outcome: Outcome, policy: EjectionPolicy, now: float
    ) -> None:
        chosen = [self._fleet.get(name) for name in flight.decision.chosen]
        for member in chosen[: max(0, outcome.attempts - 1)]:
            if member is not None and member is not served:
                self._candidates.failed(member, policy, now)
        if outcome.is_upstream_failure:
            blamed = served or chosen[min(max(outcome.attempts, 1), len(chosen)) - 1]
            if blamed is not None:
                self._candidates.failed(blamed, policy, now)

    def taken_back(self, flight: Flight) -> None:
        """A request was taken back before its answer began: its prompt may lie nowhere."""
        member, expected = self._fleet.get(flight.decision.chosen[0]), flight.expectation
        if flight.place is not None:
            flight.place.tokens = 0.0
        if member is not None and expected is not None:
            self._index.forget(member.slot, read_blocks(flight.blocks), expected.blocks)
            self._outbox.forgot(member, flight.blocks, expected.blocks)

    def _credit(
        self, flight: Flight, first: Member | None, served: Member | None, outcome: Outcome, now: float
    ) -> bool:
        """Give the prompt's blocks to the endpoint that prefilled them, and to no other; return whether any did."""
        is_prefilled = outcome.is_prefilled
        expected = flight.expectation
        if not is_prefilled and flight.place is not None:
            flight.place.tokens = 0.0
        if expected is not None and first is not None and (served is not first or not is_prefilled):
            self._index.forget(first.slot, read_blocks(flight.blocks), expected.blocks)
            self._outbox.forgot(first, flight.blocks, expected.blocks)
        if served is None or served is first:
            return is_prefilled
        self._books.move(flight, served, now)
        if flight.blocks and is_prefilled:
            self._index.add(served.slot, read_blocks(flight.blocks))
            self._outbox.learnt(served, flight.blocks)
        return is_prefilled

    def _measure(self, flight: Flight, served: Member, outcome: Outcome, ttft_s: float) -> None:
        request = flight.request
        is_chosen = served.endpoint.id == flight.decision.chosen[0]
        own_tokens = flight.uncached_tokens
        if outcome.prompt_tokens is not None:
            served.prompt_tokens_total += outcome.prompt_tokens
            if outcome.cached_tokens is not None:
                served.reports_cached_tokens = True
            elif served.reports_cached_tokens is None and request.api in CACHE_REPORTING:
                served.reports_cached_tokens = False
        if outcome.cached_tokens is not None and outcome.prompt_tokens:
            served.cached_tokens_total += outcome.cached_tokens
            cached_ratio = min(1.0, outcome.cached_tokens / outcome.prompt_tokens)
            own_tokens = request.prompt_tokens * (1.0 - cached_ratio)
            if is_chosen and flight.expectation is not None:
                self._index.correct(flight.expectation, outcome.cached_tokens, outcome.prompt_tokens)
                self._tail.learn(flight.expectation.blocks, request.prompt_tokens, request.prompt_tokens - own_tokens)
        served.ttft_s_avg = ttft_s if served.ttft_s_avg is None else 0.9 * served.ttft_s_avg + 0.1 * ttft_s
        # A plain answer's first byte comes with its last: only streams tell the time of prefill.
        if request.is_streaming and is_chosen and request.prompt_tokens and outcome.status == 200:
            tpot_s = 0.0
            if not outcome.is_cut and (outcome.completion_tokens or 0) >= MIN_TPOT_TOKENS:
                tokens = outcome.completion_tokens or MIN_TPOT_TOKENS
                first_s = ttft_s if outcome.ttft_s is None else outcome.ttft_s
                tpot_s = max(0.0, outcome.duration_s - first_s) / (tokens - 1)
            work = seconds = 0.0
            place = flight.place
            turn = served.line.reach(place, flight.dispatched_at + ttft_s, own_tokens) if place is not None else None
            if turn is not None:
                work, seconds = turn.tokens, served.pace.worked_s(turn)
            self._outbox.measured(served, work, seconds, tpot_s)
            self.measured(served, work, seconds, tpot_s)
        else:
            self.refit(served)

    def measured(self, member: Member, tokens: float, seconds: float, tpot_s: float) -> None:
        """Learn an endpoint's speed from one request, whichever picker saw it.

        tokens, seconds: of prefill.  tokens, tpot_s: 0.0 when they say nothing.
        """
        if tokens > 0.0:
            member.pace.learn(tokens, seconds, self._pool_token_s)
        if tpot_s > 0.0:
            requests = float(self._fleet.cells["inflight_requests"][member.row])
            member.pace.learn_tpot(tpot_s, self._decoding.usual_s(requests))
            self._decoding.learn(requests, tpot_s)
        self.refit(member)

    def _assume(self, member: Member) -> None:
        """Take an endpoint that was never seen at work for one like the others, also once its trial is over."""
        member.pace.s_per_token = self._pool_token_s
        self._fleet.cells["prefill_s_per_token"][member.row] = self._pool_token_s
        self._fleet.cells["request_s"][member.row] = request_s(member.pace, self._pool_token_s)

    def refit(self, member: Member) -> None:
        """Bring the columns of an endpoint, and now and then the pool's medians, up to what was learnt."""
        self._since_refit += 1
        if self._since_refit >= RECORDS_PER_REFIT:
            self._since_refit = 0
            self._pool_token_s = pool_s_per_token(m.pace for m in self._fleet)
            for other in self._fleet:
                if not other.pace.records:
                    self._assume(other)
        cells, row, pace = self._fleet.cells, member.row, member.pace
        cells["prefill_s_per_token"][row] = pace.s_per_token
        cells["request_s"][row] = request_s(pace, self._pool_token_s)
        if pace.records >= TRIAL_RECORDS or member.requests_total >= 4 * TRIAL_RECORDS:
            self._fleet.end_trial(member)
