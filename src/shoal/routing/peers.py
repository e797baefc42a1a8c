"""The other pickers of the pool: what they have in flight counts here as one's own does, and what they sent is known.

Owns their bookings, one set per peer, and when those of a lost peer expire.  What they are told is gathered by
`outbox`; messages, order and silence are for the host.
"""

from shoal.kernel import InvalidInput
from shoal.prefix import EstimatedIndex, read_blocks
from shoal.routing.books import Books
from shoal.routing.events import EndpointKnown, PeerEvent, PeerJoined, PeerLeft, PeerSynced, PeerTaught, PeerTold
from shoal.routing.fleet import TRIAL_RECORDS, Fleet, Member
from shoal.routing.lessons import Lessons
from shoal.routing.line import Place
from shoal.routing.news import (
    News,
    PeerBooked,
    PeerExpects,
    PeerForgot,
    PeerLearnt,
    PeerMeasured,
    PeerMoved,
    PeerReleased,
)
from shoal.routing.returns import Returns
from shoal.routing.status import PeerGauges

EXPIRY_S = 2.0
"""How long the bookings of a lost peer still count: it may be back, and its streams may go on without it."""

MAX_PEERS = 256
MAX_BOOKINGS = 65_536
"""Of one peer."""


ENDPOINTS_PER_PART = 64
"""Endpoints in one part of what a beginner is taught: 30 KB, a millisecond for the giver."""


class _Booking:
    """One request of a peer.  member: where it counts, None while its endpoint is not known here.  place: its there."""

    __slots__ = ("endpoint_id", "member", "output_tokens", "place", "uncached_tokens")

    def __init__(self, booked: PeerBooked) -> None:
        self.endpoint_id = booked.endpoint_id
        self.uncached_tokens = float(booked.uncached_tokens)
        self.output_tokens = float(booked.output_tokens)
        self.member: Member | None = None
        self.place: Place | None = None


class _Peer:
    """expires_at: None while it is heard."""

    __slots__ = ("bookings", "expires_at", "slots")

    def __init__(self) -> None:
        self.bookings: dict[int, _Booking] = {}
        self.expires_at: float | None = None
        self.slots: list[int] = []


class Peers:
    """Bookings of peers in the fleet's columns, their prompts in the index, and the sessions that they expect.

    lost_at: when bookings of a lost peer expired last, minus infinity before.
    """

    __slots__ = ("_books", "_fleet", "_ignored", "_index", "_lessons", "_orphans", "_peers", "_returns", "lost_at")

    def __init__(self, fleet: Fleet, books: Books, index: EstimatedIndex, lessons: Lessons, returns: Returns) -> None:
        self._fleet = fleet
        self._books = books
        self._index = index
        self._lessons = lessons
        self._returns = returns
        self._peers: dict[str, _Peer] = {}
        self._ignored = 0
        self._orphans: dict[str, int] = {}
        self.lost_at = float("-inf")

    def handle(self, event: PeerEvent, now: float) -> None:
        """Apply one event."""
        if type(event) is PeerTold:
            peer = self._heard(event.peer)
            if peer is not None:
                for news in event.news:
                    self._apply(peer, news, now)
        elif isinstance(event, PeerJoined):
            self._heard(event.peer)
        elif isinstance(event, PeerSynced):
            self._sync(event, now)
        elif isinstance(event, PeerTaught):
            self._learn(event)
        elif isinstance(event, PeerLeft):
            lost = self._peers.get(event.peer)
            if lost is not None and lost.expires_at is None:
                lost.expires_at = now + EXPIRY_S

    @property
    def is_connected(self) -> bool:
        """Whether any peer is heard."""
        return any(peer.expires_at is None for peer in self._peers.values())

    def deadline(self) -> float | None:
        """When the bookings of a lost peer expire, None when none is lost."""
        if not self._peers:
            return None
        return min((peer.expires_at for peer in self._peers.values() if peer.expires_at is not None), default=None)

    def expire(self, now: float) -> None:
        """Drop lost peers whose time is over, with their bookings."""
        gone = [name for name, peer in self._peers.items() if peer.expires_at is not None and peer.expires_at <= now]
        for name in gone:
            peer = self._peers.pop(name)
            self.lost_at = now
            self._orphans.clear()
            for booking in peer.bookings.values():
                self._orphans[booking.endpoint_id] = self._orphans.get(booking.endpoint_id, 0) + 1
                self._release(booking, now)

    def orphans(self, endpoint_id: str) -> int:
        """Requests that the peer lost last had on an endpoint when they expired; they may still run."""
        return self._orphans.get(endpoint_id, 0)

    def endpoint_joined(self, member: Member, now: float) -> None:
        """Count what peers have booked on an endpoint that was not known until now."""
        for peer in self._peers.values():
            for booking in peer.bookings.values():
                if booking.member is None and booking.endpoint_id == member.endpoint.id:
                    self._hold(booking, now)

    def gauges(self) -> PeerGauges:
        """Return how many peers there are, and what they have in flight."""
        return PeerGauges(
            peers=sum(peer.expires_at is None for peer in self._peers.values()),
            bookings=sum(len(peer.bookings) for peer in self._peers.values()),
            ignored=self._ignored,
        )

    # ------------------------------------------------------------------ what a peer tells

    def _heard(self, name: str) -> _Peer | None:
        peer = self._peers.get(name)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                self._ignored += 1
                return None
            peer = self._peers[name] = _Peer()
        peer.expires_at = None
        return peer

    def _apply(self, peer: _Peer, news: News, now: float) -> None:
        if type(news) is PeerBooked:
            self._book(peer, news, now)
        elif type(news) is PeerReleased:
            booking = peer.bookings.pop(news.number, None)
            if booking is not None:
                self._release(booking, now)
        elif type(news) is PeerMoved:
            booking = peer.bookings.get(news.number)
            if booking is not None:
                self._release(booking, now)
                booking.endpoint_id = news.endpoint_id
                self._hold(booking, now)
        elif type(news) is PeerForgot:
            member = self._fleet.get(news.endpoint_id)
            if member is not None and _is_whole(news.blocks):
                self._index.forget(member.slot, read_blocks(news.blocks), news.keep)
        elif type(news) is PeerLearnt:
            self._add(self._fleet.get(news.endpoint_id), news.blocks)
        elif type(news) is PeerMeasured:
            member = self._fleet.get(news.endpoint_id)
            if member is not None:
                self._lessons.measured(member, float(news.work_tokens), news.work_us / 1e6, news.tpot_us / 1e6)
        elif type(news) is PeerExpects:
            self._returns.told(news, now)

    def _book(self, peer: _Peer, booked: PeerBooked, now: float) -> None:
        """Count a booking once, however often it is told."""
        if booked.number in peer.bookings:
            return
        if len(peer.bookings) >= MAX_BOOKINGS:
            self._ignored += 1
            return
        booking = peer.bookings[booked.number] = _Booking(booked)
        self._hold(booking, now)
        self._add(booking.member, booked.blocks)

    def _add(self, member: Member | None, blocks: bytes) -> None:
        if member is not None and blocks and _is_whole(blocks):
            self._index.add(member.slot, read_blocks(blocks))

    def _hold(self, booking: _Booking, now: float) -> None:
        booking.member = member = self._fleet.get(booking.endpoint_id)
        if member is None:
            return
        self._books.hold(member, booking.uncached_tokens, booking.output_tokens, now)
        booking.place = member.line.join(now, booking.uncached_tokens)
        cells, row = self._fleet.cells, member.row
        cells["peer_requests"][row] += 1.0
        cells["peer_uncached_tokens"][row] += booking.uncached_tokens

    def _release(self, booking: _Booking, now: float) -> None:
        member, booking.member = booking.member, None
        if booking.place is not None:
            booking.place.left_at = now
        if member is None or member.row < 0:
            return
        self._books.free(member, booking.uncached_tokens, booking.output_tokens, now)
        cells, row = self._fleet.cells, member.row
        cells["peer_requests"][row] -= 1.0
        cells["peer_uncached_tokens"][row] -= booking.uncached_tokens

    def _sync(self, event: PeerSynced, now: float) -> None:
        """Make the bookings of a range of numbers those that are told; what is known of them stays as it is."""
        peer = self._heard(event.peer)
        if peer is None:
            return
        told = {booked.number: booked for booked in event.bookings}
        until = event.until
        gone = [
            number
            for number in peer.bookings
            if number > event.after and (until is None or number <= until) and number not in told
        ]
        for number in gone:
            self._release(peer.bookings.pop(number), now)
        for number, booked in told.items():
            known = peer.bookings.get(number)
            if known is None:
                self._book(peer, booked, now)
            elif known.endpoint_id != booked.endpoint_id:
                self._apply(peer, PeerMoved(number, booked.endpoint_id), now)

    # ------------------------------------------------------------------ what a beginner is taught

    def _learn(self, event: PeerTaught) -> None:
        """Take over a part of a peer's index; parts that make no sense are counted and left."""
        peer = self._heard(event.peer)
        if peer is None:
            return
        try:
            if event.clock:
                self._begin_learning(peer, event)
            self._index.take(event.rows, peer.slots)
        except InvalidInput:
            self._ignored += 1

    def _begin_learning(self, peer: _Peer, event: PeerTaught) -> None:
        horizons = []
        for known in event.endpoints:
            member = self._fleet.get(known.endpoint_id)
            if known.slot >= len(peer.slots):
                peer.slots += [-1] * (known.slot + 1 - len(peer.slots))
            if member is None:
                continue
            peer.slots[known.slot] = member.slot
            horizons.append((member.slot, known.horizon))
            if member.pace.records < known.pace.records:
                member.pace.take(known.pace)
                self._lessons.refit(member)
            if known.pace.records >= TRIAL_RECORDS:
                self._fleet.end_trial(member)
        self._index.begin_taking(event.clock, horizons)


def teach(peer: str, fleet: Fleet, index: EstimatedIndex, at: int, clock: int) -> tuple[PeerTaught, int | None]:
    """Return what is known of endpoints from the `at`-th on, and where to go on; see `Router.teach`."""
    members = fleet.rows[at : at + ENDPOINTS_PER_PART]
    known = tuple(
        EndpointKnown(member.endpoint.id, member.slot, index.horizon(member.slot), member.pace.state())
        for member in members
    )
    more = at + len(members)
    return PeerTaught(peer, clock or index.clock, known), more if more < len(fleet.rows) else None


def _is_whole(blocks: bytes) -> bool:
    return len(blocks) % 8 == 0
