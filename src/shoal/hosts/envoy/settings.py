"""What our own Envoy is told: every limit and clock, once, with the reason for its value.

Frozen values only.  How they become Envoy's configuration is `listeners`, `routes`, `clusters` and
`bootstrap`; where the files lie is `files`.
"""

from enum import StrEnum

import msgspec

CONTROL_HEADERS = (
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-served",
    "x-gateway-destination-endpoint-subset",
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
    "x-shoal-request-id",
    "x-shoal-endpoint",
)


class FailureMode(StrEnum):
    """What happens to new requests while no picker answers.  Running streams go on in both."""

    OPEN = "open"
    CLOSED = "closed"


class Picker(msgspec.Struct, frozen=True, kw_only=True):
    """One picker worker.

    id: what it writes as `shoal.picker`; names a slot, so a restarted worker keeps it.  socket: its unix socket.
    """

    id: str
    socket: str


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on what clients may take.

    max_body_bytes: larger request bodies get 413.  max_connections: open client connections, the rest are closed at
    once.  heap_bytes: Envoy's own memory; above 95 % new requests get 503, above 98 % uploads are ended.
    0 leaves it unbounded.  max_streams: requests in flight per cluster; Envoy's own default of 1,024 would let
    requests past the picker.  max_usage_event_bytes: larger SSE events are not searched for usage.
    """

    max_body_bytes: int = 64 * 1024 * 1024
    max_connections: int = 50_000
    heap_bytes: int = 4 * 1024 * 1024 * 1024
    max_streams: int = 1_000_000
    max_usage_event_bytes: int = 1024 * 1024


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts in seconds; 0 switches a timer off.

    message_s: the picker's time for one answer; must exceed the longest queue wait, Envoy's limit is 3600.
    stream_idle_s: no byte in either direction of one request; a long prefill or a queued request is silent.
    stream_s: from the first byte of a request to the last one of its answer, whatever flows.
    upload_s: from the first byte of a request to its last.  headers_s: the same for its head.
    connect_s: for a TCP connection to an engine; leaves room for two lost SYN packets, as bursts lose them.
    connection_idle_s: an unused client connection.
    records_flush_s: longest wait of a finished request's record.  drain_s: how long connections of a replaced
    listener live on; streams that outlive it are cut.
    """

    message_s: float = 3600.0
    stream_idle_s: float = 7200.0
    stream_s: float = 0.0
    upload_s: float = 300.0
    headers_s: float = 30.0
    connect_s: float = 3.5
    connection_idle_s: float = 3600.0
    records_flush_s: float = 0.05
    drain_s: int = 7200


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """How a request that failed before its response head is tried elsewhere.

    attempts: tries in total.  budget_ratio: share of requests in flight that may be retries.  min_concurrency: retries
    at a time that are always allowed, so that all requests of a dying engine in a small pool find another.
    status_codes: answers of an engine that are retried like a lost connection.
    """

    attempts: int = 3
    budget_ratio: float = 0.2
    min_concurrency: int = 128
    status_codes: tuple[int, ...] = (502, 503, 504)


class ListenerTls(msgspec.Struct, frozen=True, kw_only=True):
    """Certificate chain and key (PEM files) of the public listener."""

    certificate: str
    key: str


class BackendTls(msgspec.Struct, frozen=True, kw_only=True):
    """How engines of one TLS group are dialled.

    name: what `EndpointAddress.tls` names.  ca: PEM file with the roots to trust, "" for the system's.
    sni: server name that is sent and must be in the certificate, "" checks the chain only.  is_verified: False
    trusts any certificate.
    """

    name: str = "default"
    ca: str = ""
    sni: str = ""
    is_verified: bool = True


class EnvoySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that our own Envoy needs to know.

    run_dir: absolute directory for configuration and sockets; paths of sockets must stay under 108 bytes.
    pickers: the workers; the first also gets the records of requests that no picker saw.  concurrency: Envoy's
    worker threads.  control_headers, control_prefixes: removed from every client request before the picker runs.
    response_headers: names that the picker may give the client's answer, by writing `shoal.<name>` in its metadata.
    shows_endpoint: whether answers say in `x-shoal-endpoint` which engine served.
    forward_authorization: whether the client's own `authorization` reaches an engine that has no key configured.
    are_all_paths_public: whether clients reach the paths of engines that are for operators; see `denied`.
    is_open: whether clients may connect; a pool opens its port when pickers can answer.
    """

    run_dir: str
    port: int
    pickers: tuple[Picker, ...]
    host: str = "127.0.0.1"
    failure_mode: FailureMode = FailureMode.OPEN
    limits: Limits = Limits()
    clocks: Clocks = Clocks()
    retries: Retries = Retries()
    tls: ListenerTls | None = None
    backend_tls: tuple[BackendTls, ...] = ()
    concurrency: int = 2
    control_headers: tuple[str, ...] = CONTROL_HEADERS
    control_prefixes: tuple[str, ...] = ("x-shoal-internal-", "x-envoy-")
    response_headers: tuple[str, ...] = ("x-session-token",)
    shows_endpoint: bool = True
    forward_authorization: bool = False
    are_all_paths_public: bool = False
    is_open: bool = True

    @property
    def admin_socket(self) -> str:
        """Where Envoy's admin API listens: never on a port."""
        return f"{self.run_dir}/envoy-admin.sock"
