"""What pickers that share a pool tell each other: single changes of bookings and of the estimated index.

Values only, with the limits that what a peer sends must keep.  Own ones are gathered by `outbox`, those of others are
booked by `peers`; how they travel is for the hosts.
"""

from typing import Annotated

import msgspec

from shoal.prefix.hashing import MAX_BLOCKS
from shoal.prefix.sets import MAX_SLOTS

MAX_NEWS = 20_000
"""Changes in one message."""

MAX_BOOKINGS_PER_PART = 3000
"""Bookings in one part of a picker's state: 110 KB, 2 ms for the giver; with the longest names less than a megabyte."""

MAX_EXPECTED_MS = 3_600_000
"""Longest time for which a session is expected."""

Name = Annotated[str, msgspec.Meta(max_length=256)]
"""Ids of endpoints have no more bytes of UTF-8 than this from where they are made: messages keep their limit by it."""

Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 52)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
Hashes = Annotated[bytes, msgspec.Meta(max_length=8 * 2 * MAX_BLOCKS)]


class PeerBooked(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """A peer sent a request to an endpoint.

    number: its name among the peer's bookings, counting up.  blocks: the prompt's hashes as in `Arrived`, which that
    endpoint holds from now on.
    """

    number: Number
    endpoint_id: Name
    uncached_tokens: Tokens
    output_tokens: Tokens
    blocks: Hashes = b""


class PeerReleased(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """That request is over."""

    number: Number


class PeerMoved(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    """Another endpoint than the chosen one serves that request."""

    number: Number
    endpoint_id: Name


class PeerForgot(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """An endpoint did not get a prompt after all; `keep` leading blocks were there before."""

    endpoint_id: Name
    blocks: Hashes
    keep: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0


class PeerLearnt(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """An endpoint got a prompt that was meant for another."""

    endpoint_id: Name
    blocks: Hashes


class PeerMeasured(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """How fast an endpoint worked: uncached tokens and the time that they took, and the time per output token.

    Pickers that judge one machine by different samples send the same prompt to different machines.  work_tokens,
    tpot_us: 0 when they say nothing.
    """

    endpoint_id: Name
    work_tokens: Tokens
    work_us: Number
    tpot_us: Number = 0


class PeerExpects(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """A session said that it will be back, or is back, and then endpoint_id is "".

    session: a digest of its tenant and id.  tokens: of what the endpoint holds of it.
    """

    session: Annotated[bytes, msgspec.Meta(max_length=16)]
    endpoint_id: Name = ""
    within_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_EXPECTED_MS)] = 0
    tokens: Tokens = 0


News = PeerBooked | PeerReleased | PeerMoved | PeerForgot | PeerLearnt | PeerMeasured | PeerExpects


class PaceState(msgspec.Struct, frozen=True, array_like=True):
    """How fast an endpoint was seen to work: the sums of `pace.Pace`, in its order, and its two results."""

    records: Annotated[int, msgspec.Meta(ge=0, le=1 << 52)] = 0
    sums: tuple[float, float, float] = (0.0, 0.0, 0.0)
    s_per_token: Annotated[float, msgspec.Meta(gt=0, le=1.0)] = 1e-4
    base_s: Annotated[float, msgspec.Meta(ge=0, le=3600.0)] = 0.0
    tpot_s: Annotated[float, msgspec.Meta(ge=0, le=3600.0)] = 0.0


Endpoints = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_SLOTS)]
