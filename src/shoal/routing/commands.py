"""What the router wants done: imperative commands that hold all a host needs."""

import msgspec

from shoal.pool import Refusal


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Send the request to the first endpoint; on a retry walk the list in order.

    endpoints: addresses `ip:port`.  headers: to set on the upstream request.  response_headers: to add for the client.
    model: rewritten model name for the body, "" when the body goes as it came.
    """

    request_id: str
    endpoints: tuple[str, ...]
    headers: tuple[tuple[str, str], ...] = ()
    response_headers: tuple[tuple[str, str], ...] = ()
    model: str = ""


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """Answer the client with a refusal."""

    request_id: str
    refusal: Refusal


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """The set of endpoints that the data plane may use by itself (fail-open) changed."""

    addresses: tuple[str, ...]


Command = Forward | Refuse | Offer
