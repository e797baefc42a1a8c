"""What can happen to the router: past-tense events, the only door in.

Every event is a frozen struct with a tag, so a journal is a list of them.
"""

import msgspec

from shoal.pool import Endpoint, EndpointState, Outcome, Request, ServedModel, Signals


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """A request is complete.  blocks: its prefix-chained block hashes, 8 bytes little-endian each."""

    request: Request
    blocks: bytes = b""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The request's stream is over, however it ended.  Un-books; teaches nothing."""

    request_id: str


class Recorded(msgspec.Struct, frozen=True, tag="recorded"):
    """What was measured of a request; comes shortly after (rarely before) its end."""

    request_id: str
    outcome: Outcome


class EndpointJoined(msgspec.Struct, frozen=True, tag="joined"):
    """An endpoint was added, or its labels changed."""

    endpoint: Endpoint
    state: EndpointState = EndpointState.LOADING


class EndpointChanged(msgspec.Struct, frozen=True, tag="changed"):
    """An endpoint became ready, is draining, or was seen loading again."""

    endpoint_id: str
    state: EndpointState


class EndpointLeft(msgspec.Struct, frozen=True, tag="endpoint-left"):
    """An endpoint is gone; everything known of it is dropped."""

    endpoint_id: str


class ModelsSeen(msgspec.Struct, frozen=True, tag="models"):
    """What an endpoint's `/v1/models` says."""

    endpoint_id: str
    models: tuple[ServedModel, ...]


class LoadSeen(msgspec.Struct, frozen=True, tag="load"):
    """One reading of an endpoint's metrics."""

    endpoint_id: str
    signals: Signals


class Configured(msgspec.Struct, frozen=True, tag="configured"):
    """A new, already validated configuration document."""

    text: str


class Ticked(msgspec.Struct, frozen=True, tag="ticked"):
    """Time passed."""


Event = (
    Arrived
    | Ended
    | Recorded
    | EndpointJoined
    | EndpointChanged
    | EndpointLeft
    | ModelsSeen
    | LoadSeen
    | Configured
    | Ticked
)
