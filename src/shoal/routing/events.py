"""What can happen to the router: past-tense events, the only door in.

Every event is a frozen struct with a tag, so a journal is a list of them.
"""

import msgspec

from shoal.pool import Endpoint, EndpointState, Outcome, Request, ServedModel, Signals
from shoal.routing.cacheevents import BlocksCleared as BlocksCleared
from shoal.routing.cacheevents import BlocksRemoved as BlocksRemoved
from shoal.routing.cacheevents import BlocksStored as BlocksStored
from shoal.routing.cacheevents import KvStreamChanged as KvStreamChanged
from shoal.routing.evictions import Evicted as Evicted
from shoal.routing.evictions import Kept as Kept
from shoal.routing.peerevents import EndpointKnown as EndpointKnown
from shoal.routing.peerevents import PeerEvent as PeerEvent
from shoal.routing.peerevents import PeerJoined as PeerJoined
from shoal.routing.peerevents import PeerLeft as PeerLeft
from shoal.routing.peerevents import PeerSynced as PeerSynced
from shoal.routing.peerevents import PeerTaught as PeerTaught
from shoal.routing.peerevents import PeerTold as PeerTold


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """A request is complete.  blocks: its prefix-chained block hashes, 8 bytes little-endian each."""

    request: Request
    blocks: bytes = b""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The request's stream is over, however it ended.  Un-books.

    outcome: what was measured of it, where the host knows it by then; else it teaches nothing, and a record follows.
    """

    request_id: str
    outcome: Outcome | None = None


class Recorded(msgspec.Struct, frozen=True, tag="recorded"):
    """What was measured of a request; comes shortly after (rarely before) its end."""

    request_id: str
    outcome: Outcome


class SessionAborted(msgspec.Struct, frozen=True, tag="session-aborted"):
    """An operator wants no answer to any request of a session any more.

    tenant_id: only those of this tenant, None for all: session ids are the clients' choice.
    """

    session_id: str
    tenant_id: str | None = None


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


class TokenKeys(msgspec.Struct, frozen=True):
    """The exact keys of a prompt at one block size: 8 bytes little-endian each, full blocks only."""

    block_size_tokens: int
    keys: bytes


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """The tokens that `Fetch` asked for, as keys.  prompt_tokens: their exact number."""

    request_id: str
    prompt_tokens: int
    keys: tuple[TokenKeys, ...]


class FetchFailed(msgspec.Struct, frozen=True, tag="fetch-failed"):
    """The tokens cannot be had; the request goes by the estimate.  reason: a word for metrics."""

    request_id: str
    reason: str = ""


class Configured(msgspec.Struct, frozen=True, tag="configured"):
    """A new, already validated configuration document."""

    text: str


class Ticked(msgspec.Struct, frozen=True, tag="ticked"):
    """Time passed."""


Event = (
    Arrived
    | Ended
    | Recorded
    | Evicted
    | Kept
    | SessionAborted
    | EndpointJoined
    | EndpointChanged
    | EndpointLeft
    | ModelsSeen
    | LoadSeen
    | Fetched
    | FetchFailed
    | BlocksStored
    | BlocksRemoved
    | BlocksCleared
    | KvStreamChanged
    | PeerJoined
    | PeerTold
    | PeerSynced
    | PeerTaught
    | PeerLeft
    | Configured
    | Ticked
)
