"""What the direct data plane is told: limits, clocks, retries and how engines are dialled, each once with its reason.

Frozen values only.  Most come from the pool's configuration; engines' keys and certificates come in the backends file
(`backends`).
"""

import msgspec

from shoal.hosts.envoy.settings import Clocks, Retries
from shoal.routing.settings import PoolSettings

CONTROL_PREFIXES = ("x-shoal-internal-", "x-envoy-")
"""Beside `CONTROL_HEADERS` of the Envoy plane: headers with these beginnings are for the pool alone."""


class DirectClocks(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts in seconds; 0 switches `stream_s` off.

    headers_s: from the first byte of a request's head to its last.  upload_s: from there to the last of its body.
    connect_s: for a connection to an engine, TLS included.  stream_idle_s: no byte in either direction of one request;
    a long prefill is silent.  stream_s: from the first byte of a request to the last of its answer, whatever flows.
    hold_s: longest time that the head of an answer is held for its first body byte.
    connection_idle_s: an unused client connection.
    engine_idle_s: an unused engine connection; shorter than engines' own 5 s (uvicorn), or a reused connection dies
    under a request.  linger_s: after an answer that ends a connection, for the client to read it.
    """

    headers_s: float = 30.0
    upload_s: float = 300.0
    connect_s: float = 3.5
    stream_idle_s: float = 7200.0
    stream_s: float = 0.0
    hold_s: float = 600.0
    connection_idle_s: float = 3600.0
    engine_idle_s: float = 4.0
    linger_s: float = 2.0


class DirectSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the data plane of one worker needs to know.

    max_body_bytes: larger request bodies get 413.  max_buffered_bytes: request bodies and unread answers together.
    max_connections: open client connections of this worker; more are closed at once.
    max_idle_per_engine: unused connections that are kept to one engine.
    budget_ratio, min_retries: retries at a time, as a share of the requests in flight and at least; how often one
    request may be tried is the picker's.  status_codes: answers of an engine that are retried like a lost connection.
    shows_endpoint: whether answers say in `x-shoal-endpoint` which engine served.
    """

    max_body_bytes: int = 64 * 1024 * 1024
    max_buffered_bytes: int = 1024 * 1024 * 1024
    max_connections: int = 50_000
    max_idle_per_engine: int = 1024
    budget_ratio: float = 0.2
    min_retries: int = 128
    status_codes: tuple[int, ...] = (502, 503, 504)
    clocks: DirectClocks = DirectClocks()
    forward_client_key: bool = False
    are_all_paths_public: bool = False
    shows_endpoint: bool = True


def settings_of(pool: PoolSettings, workers: int = 1) -> DirectSettings:
    """Return what the pool's configuration says.  workers: how many share its connections."""
    limits, plain, clocks = pool.limits, Retries(), Clocks()
    return DirectSettings(
        max_body_bytes=limits.max_body_bytes,
        max_buffered_bytes=limits.max_buffered_bytes,
        max_connections=max(1, -(-limits.max_connections // max(1, workers))),
        budget_ratio=pool.retries.budget_ratio,
        min_retries=plain.min_concurrency,
        status_codes=plain.status_codes,
        clocks=DirectClocks(
            headers_s=clocks.headers_s,
            upload_s=limits.request_timeout_s,
            connect_s=clocks.connect_s,
            stream_idle_s=clocks.stream_idle_s,
            stream_s=limits.max_stream_duration_s,
            connection_idle_s=clocks.connection_idle_s,
        ),
        forward_client_key=pool.forward_client_key,
        are_all_paths_public=pool.public_paths == "all",
    )
