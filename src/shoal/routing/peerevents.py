"""What can happen to the router through its peers; a part of `events`, which is where to take them from.

What a peer tells is in `news`.
"""

from typing import Annotated

import msgspec

from shoal.prefix.handover import IndexRows
from shoal.prefix.horizon import HorizonState
from shoal.prefix.sets import MAX_SLOTS
from shoal.routing.news import Name, News, PaceState, PeerBooked


class PeerJoined(msgspec.Struct, frozen=True, tag="peer-joined"):
    """Another picker of the pool is heard.  peer: the name of its run, which no later process shares."""

    peer: str


class PeerTold(msgspec.Struct, frozen=True, tag="peer-told"):
    """A peer told what it booked, released and learnt, in its order."""

    peer: str
    news: tuple[News, ...]


class PeerSynced(msgspec.Struct, frozen=True, tag="peer-synced"):
    """All that a peer has in flight with numbers above `after`, up to `until`, None for all that there are."""

    peer: str
    bookings: tuple[PeerBooked, ...]
    after: int = 0
    until: int | None = None


class EndpointKnown(msgspec.Struct, frozen=True, array_like=True):
    """What a peer knows of an endpoint.  slot: its bit in the peer's sets."""

    endpoint_id: Name
    slot: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]
    horizon: HorizonState
    pace: PaceState


class PeerTaught(msgspec.Struct, frozen=True, tag="peer-taught"):
    """A part of a peer's estimated index, for a picker that begins.

    clock: the peer's, above 0 in the first part alone, which names the endpoints that the rows of all parts mean.
    """

    peer: str
    clock: int = 0
    endpoints: tuple[EndpointKnown, ...] = ()
    rows: IndexRows = IndexRows()


class PeerLeft(msgspec.Struct, frozen=True, tag="peer-left"):
    """A peer is heard no more; its bookings expire a little later unless it is heard again."""

    peer: str


PeerEvent = PeerJoined | PeerTold | PeerSynced | PeerTaught | PeerLeft
