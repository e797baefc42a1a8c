"""What the router wants done: imperative commands that hold all a host needs."""

import msgspec

from shoal.pool import Api, Outcome, Refusal
from shoal.pool.outcome import Forecast
from shoal.routing.evictions import Evict as Evict


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Tokenise the prompt and return `Fetched` or `FetchFailed`; the router goes on without it at its own deadline.

    model: as the engines name it.  adapter: LoRA name, "" for none.  block_sizes: for which keys are wanted, in tokens.
    """

    request_id: str
    model: str
    adapter: str
    block_sizes: tuple[int, ...]


class Waited(msgspec.Struct, frozen=True, array_like=True):
    """Who waited in the queue, and how long, for those that count it.  endpoints: whether its model had any."""

    tenant_id: str
    priority: int
    model: str
    target_model: str
    queue_s: float
    has_endpoints: bool = True


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """The request waits in the queue until a Forward or a Refuse.  ahead: how many were there before it."""

    request_id: str
    priority: int = 0
    ahead: int = 0


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Send the request to the first endpoint; on a retry walk the list in order.

    endpoints: addresses `ip:port`.  response_headers: to add to the client's answer.  model: rewritten model name for
    the body, "" when the body goes as it came.  retry_allowed: whether another endpoint may be tried.  priority: the
    band.  waited: None when it went at once.
    """

    request_id: str
    endpoints: tuple[str, ...]
    response_headers: tuple[tuple[str, str], ...] = ()
    model: str = ""
    retry_allowed: bool = True
    priority: int = 0
    waited: Waited | None = None


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """Answer the client with a refusal.  waited: None when it came at once."""

    request_id: str
    refusal: Refusal
    api: Api = Api.OTHER
    priority: int = 0
    waited: Waited | None = None


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """End a forwarded request now, at its client and at its engine; it is booked until its `Ended`.

    refusal: for a client that has got nothing of the answer yet.
    """

    request_id: str
    refusal: Refusal
    api: Api = Api.OTHER


class Account(msgspec.Struct, frozen=True, tag="account"):
    """A forwarded request is closed: log it, count it, end its trace.  Holds no prompt text.

    endpoint_id: who served, "" when nobody did.  predicted_cached_tokens: what the index promised at dispatch.
    queue_s: arrival to dispatch.  trace_parent: the client's `traceparent`, kept when tracing is on.
    is_moved: another endpoint than the chosen one served it.
    is_recorded: False when the record never came and `outcome` is empty.  forecast: None where nothing was predicted.
    """

    request_id: str
    client_id: str
    api: Api
    model: str
    target_model: str
    tenant_id: str
    endpoint_id: str
    is_streaming: bool
    arrived_at: float
    queue_s: float
    prompt_tokens: int
    predicted_cached_tokens: int
    outcome: Outcome
    trace_parent: str = ""
    is_moved: bool = False
    is_recorded: bool = True
    priority: int = 0
    forecast: Forecast | None = None


Command = Fetch | Hold | Forward | Refuse | Cut | Evict | Account
