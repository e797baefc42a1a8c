"""What can happen to the router: past-tense events, the only door in.

Every event is a frozen struct with a tag, so a journal is a list of them.
"""

import msgspec

from shoal.pool import Endpoint, EndpointState, Outcome, Request, ServedModel, Signals
from shoal.pool.kvevents import KvState, Tier
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


class BlocksStored(msgspec.Struct, frozen=True, tag="stored"):
    """An engine holds these blocks now.  keys: exact keys, 8 bytes little-endian each; never token ids."""

    endpoint_id: str
    keys: bytes
    tier: Tier = Tier.GPU
    block_size_tokens: int = 16
    rank: int = 0


class BlocksRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """An engine holds these blocks no longer on that tier."""

    endpoint_id: str
    keys: bytes
    tier: Tier = Tier.GPU
    rank: int = 0


class BlocksCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """All that a publisher held is gone: it restarted, was reset, or has other weights.  rank: None for all ranks."""

    endpoint_id: str
    rank: int | None = None


class KvStreamChanged(msgspec.Struct, frozen=True, tag="kv-stream"):
    """How far an endpoint's KV events can be trusted from now on."""

    endpoint_id: str
    state: KvState


class Configured(msgspec.Struct, frozen=True, tag="configured"):
    """A new, already validated configuration document."""

    text: str


class Ticked(msgspec.Struct, frozen=True, tag="ticked"):
    """Time passed."""


Event = (
    Arrived
    | Ended
    | Recorded
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
