"""What this picker's peers have to hear, gathered in order until its host takes it.

Owns the numbers by which peers know a booking.  Costs nothing while it is closed, as with one picker alone.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import islice

from shoal.routing.books import Books, Flight
from shoal.routing.fleet import Member
from shoal.routing.news import (
    MAX_BOOKINGS_PER_PART,
    MAX_EXPECTED_MS,
    News,
    PeerBooked,
    PeerExpects,
    PeerForgot,
    PeerLearnt,
    PeerMeasured,
    PeerMoved,
    PeerReleased,
)


class Outbox:
    """A list of changes while open.  flights: the router's, by request id, oldest first."""

    __slots__ = ("_books", "_flights", "_last", "_news", "is_open")

    def __init__(self, books: Books, flights: Mapping[str, Flight]) -> None:
        self._books = books
        self._flights = flights
        self._news: list[News] = []
        self._last = 0
        self.is_open = False

    def __len__(self) -> int:
        return len(self._news)

    def open(self) -> None:
        """Gather from now on; what is in flight gets its numbers, for `bookings`."""
        if self.is_open:
            return
        self.is_open = True
        self._books.listener = self
        for flight in self._flights.values():
            if flight.member is not None and not flight.number:
                self._number(flight)

    def close(self) -> None:
        """Gather nothing more and forget what was not taken; numbers stay."""
        self.is_open = False
        self._books.listener = None
        self._news.clear()

    def take(self) -> list[News]:
        """Return what came since the last call."""
        news, self._news = self._news, []
        return news

    def bookings(self, after: int, now: float) -> tuple[list[PeerBooked], int | None]:
        """Return a part of what is in flight, numbers above `after` in order, and the last number it covers.

        None stands for all that there are.  Without blocks; a prompt that is prefilled by now owes no tokens.
        """
        live = (each for each in self._flights.values() if each.number > after and each.member is not None)
        found = sorted(islice(live, MAX_BOOKINGS_PER_PART), key=_number_of)
        until = found[-1].number if len(found) == MAX_BOOKINGS_PER_PART else None
        return list(_told(found, now)), until

    # ------------------------------------------------------------------ what the router tells

    def booked(self, flight: Flight, member: Member) -> None:
        """Note a new booking."""
        self._last += 1
        flight.number = self._last
        self._news.append(
            PeerBooked(
                self._last, member.endpoint.id, int(flight.uncached_tokens), int(flight.output_tokens), flight.blocks
            )
        )

    def moved(self, flight: Flight, member: Member) -> None:
        """Note that another endpoint serves a request."""
        self._news.append(PeerMoved(flight.number, member.endpoint.id))

    def released(self, flight: Flight) -> None:
        """Note the end of a booking."""
        self._news.append(PeerReleased(flight.number))

    def forgot(self, member: Member, blocks: bytes, keep: int) -> None:
        """Note that an endpoint did not get a prompt."""
        if self.is_open:
            self._news.append(PeerForgot(member.endpoint.id, blocks, keep))

    def learnt(self, member: Member, blocks: bytes) -> None:
        """Note that an endpoint got a prompt that was meant for another."""
        if self.is_open:
            self._news.append(PeerLearnt(member.endpoint.id, blocks))

    def measured(self, member: Member, work_tokens: float, work_s: float, tpot_s: float) -> None:
        """Note how fast an endpoint worked on one request."""
        if self.is_open:
            self._news.append(
                PeerMeasured(member.endpoint.id, int(work_tokens), round(work_s * 1e6), round(tpot_s * 1e6))
            )

    def expects(self, session: bytes, endpoint_id: str, within_s: float, tokens: float) -> None:
        """Note where a session is expected, or that it is expected no more where endpoint_id is ""."""
        if self.is_open:
            within_ms = min(max(0, math.ceil(within_s * 1e3)), MAX_EXPECTED_MS)
            self._news.append(PeerExpects(session, endpoint_id, within_ms, int(tokens)))

    def _number(self, flight: Flight) -> None:
        self._last += 1
        flight.number = self._last


def _number_of(flight: Flight) -> int:
    return flight.number


def _told(flights: Iterable[Flight], now: float) -> Iterable[PeerBooked]:
    for flight in flights:
        member = flight.member
        if member is None:
            continue
        is_prefilled = now - flight.dispatched_at > flight.work_tokens * member.pace.s_per_token
        uncached = 0 if is_prefilled else int(flight.uncached_tokens)
        yield PeerBooked(flight.number, member.endpoint.id, uncached, int(flight.output_tokens))
