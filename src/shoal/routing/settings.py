"""Settings of the pool that llm-d keeps elsewhere: the document `kind: Pool` of `shoal.dev/v1alpha1`.

Frozen values with their defaults, each with its meaning and unit.  The router reads a few (index, ejection,
aliases); the rest is for the hosts.  How a file becomes these is `config`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec

from shoal.kernel.marks import Quantity

MiB = 1024 * 1024


def _positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} must be above 0, got {value}")


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")


def _port(name: str, port: int) -> None:
    if not 0 <= port <= 65_535:
        raise ValueError(f"{name} must be 0 to 65535, got {port}")


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """Where clients connect."""

    host: Annotated[str, "address to bind; the default is reachable from this machine only"] = "127.0.0.1"
    port: Annotated[int, "public port; 0 takes a free one"] = 8080

    def __post_init__(self) -> None:
        _port("port", self.port)


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """TLS on the public listener; both files are read again when they change."""

    cert: Annotated[str, "PEM file with the certificate chain"]
    key: Annotated[str, "PEM file with the private key"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What clients may take."""

    max_body_bytes: Annotated[
        int, "larger request bodies get 413; fits the longest prompts with images", Quantity()
    ] = 64 * MiB
    max_buffered_bytes: Annotated[
        int, "request bodies that one picker worker holds at once; above it a new one gets 429", Quantity()
    ] = 1024 * MiB
    request_timeout_s: Annotated[float, "from the first byte of a request to its last, so slow uploads end"] = 300.0
    max_connections: Annotated[int, "open client connections; more are closed at once"] = 50_000
    max_stream_duration_s: Annotated[
        float, "longest life of one request with its answer, after which it is cut; 0 for no limit"
    ] = 0.0

    def __post_init__(self) -> None:
        _positive(
            max_body_bytes=self.max_body_bytes,
            max_buffered_bytes=self.max_buffered_bytes,
            request_timeout_s=self.request_timeout_s,
            max_connections=self.max_connections,
        )
        _not_negative(max_stream_duration_s=self.max_stream_duration_s)


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to a request that failed before its response head."""

    attempts: Annotated[int, "further tries after the first, each on the next endpoint; 0 for none"] = 2
    budget_ratio: Annotated[
        float, "share of the requests in flight that may be retries, so that a broken pool is not hit twice as hard"
    ] = 0.2
    fallbacks: Annotated[int, "endpoints named after the chosen one, the next best by score"] = 2

    def __post_init__(self) -> None:
        _not_negative(attempts=self.attempts, fallbacks=self.fallbacks)
        if not 0 <= self.budget_ratio <= 1:
            raise ValueError(f"budget_ratio must be 0 to 1, got {self.budget_ratio}")


class Auth(msgspec.Struct, frozen=True, kw_only=True):
    """Who may send requests."""

    keys_file: Annotated[str, "file of hashed API keys, read again when it changes; empty lets everyone in"] = ""


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Waiting in the pool's own queue instead of the engines'; how much and how is llm-d's `flowControl` document."""

    enabled: Annotated[
        bool,
        "queue what no endpoint can take now; llm-d's feature gate flowControl does the same with llm-d's policies",
    ] = False
    bands: Annotated[
        Literal["ageing", "strict"],
        "ageing: a lower band that waits gets its minimum share; strict: it waits while a higher one has requests",
    ] = "ageing"
    minimum_share_ratio: Annotated[float, "of the tokens for each lower band that waits, 0 to 0.9"] = 0.1
    eviction: Annotated[
        Literal["never", "before-first-byte", "always"] | None,
        "whether requests of a negative priority that run give way to a higher one: queued again while nothing of the "
        "answer was sent, or cut in the middle of it as well; llm-d's enableEviction is before-first-byte",
    ] = None
    trust_headers: Annotated[
        bool,
        "whether the objective and the tenant that a client names in its headers count; without it an objective can "
        "only lower its priority, and with `enabled` the tenant is nobody",
    ] = False

    def __post_init__(self) -> None:
        if not 0 <= self.minimum_share_ratio <= 0.9:
            raise ValueError(f"minimum_share_ratio must be 0 to 0.9, got {self.minimum_share_ratio:g}")


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant gets: the owner of an API key, by the key's name."""

    priority: Annotated[int | None, "its band; larger goes first; 0 by default"] = None
    objective: Annotated[str, "an InferenceObjective of this file that says the priority"] = ""
    weight: Annotated[float, "its share of the tokens, against the other tenants of its band"] = 1.0
    requests_per_s: Annotated[float, "requests that it may send; 0 for no limit"] = 0.0
    burst_requests: Annotated[float, "how many of them at once; 0 for those of one second"] = 0.0
    tokens_per_min: Annotated[float, "prompt and completion tokens that it may use; 0 for no limit"] = 0.0

    def __post_init__(self) -> None:
        _positive(weight=self.weight)
        _not_negative(
            requests_per_s=self.requests_per_s, burst_requests=self.burst_requests, tokens_per_min=self.tokens_per_min
        )
        if self.objective and self.priority is not None:
            raise ValueError("objective and priority cannot both be set")


class Agents(msgspec.Struct, frozen=True, kw_only=True):
    """What agents say of their requests beyond the API."""

    trust_hints: Annotated[
        bool,
        "whether hints are used: expected output, priority, that the session will be back; without it nobody's are",
    ] = False
    max_return_s: Annotated[float, "longest time for which an endpoint is preferred for a session"] = 600.0
    max_wait_s: Annotated[
        float, "how much longer than elsewhere a session that is back may have to wait for its endpoint"
    ] = 2.0

    def __post_init__(self) -> None:
        _positive(max_return_s=self.max_return_s)
        _not_negative(max_wait_s=self.max_wait_s)


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, or all engines behind one DNS name."""

    url: Annotated[str, "base URL, http or https"]
    name: Annotated[str, "how status and metrics call it; its address by default"] = ""
    api_key_file: Annotated[str, "file with the key that the engine wants"] = ""
    api_key_env: Annotated[str, "environment variable with that key"] = ""
    ca_file: Annotated[str, "PEM file that signs the engine's certificate; the system's by default"] = ""
    engine: Annotated[
        Literal["vllm", "sglang", "trtllm-serve", "shoal"] | None, "whose metric names it has; found out by default"
    ] = None
    labels: Annotated[Mapping[str, str], "labels for filters, as llm-d.ai/role"] = MappingProxyType({})
    kv_events: Annotated[
        object, "port or ZMQ address of its KV events, a list for several ranks; it is asked by default"
    ] = None
    kv_replay: Annotated[object, "the same of their replays"] = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url[:80]!r}")
        if self.api_key_file and self.api_key_env:
            raise ValueError("api_key_env and api_key_file cannot both be set")


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The index of who holds which prefix."""

    budget_bytes: Annotated[int, "hard limit of its memory; the least recently used entries go first", Quantity()] = (
        64 * MiB
    )

    def __post_init__(self) -> None:
        if not MiB <= self.budget_bytes <= 1 << 40:
            raise ValueError(f"budget_bytes must be 1Mi to 1Ti, got {self.budget_bytes}")


class Ejection(msgspec.Struct, frozen=True, kw_only=True):
    """When an engine that fails gets no requests for a while."""

    failures: Annotated[int, "failures in a row that eject it"] = 3
    base_s: Annotated[float, "first ejection; each further one is twice as long"] = 5.0
    max_s: Annotated[float, "longest ejection"] = 60.0

    def __post_init__(self) -> None:
        _positive(failures=self.failures, base_s=self.base_s, max_s=self.max_s)


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics page of the pool, on the loopback, never on the public port."""

    port: Annotated[int, "its port; 0 for none"] = 9090

    def __post_init__(self) -> None:
        _port("port", self.port)


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """A record of every event and decision, for `shoal replay`; holds block hashes and counts, no prompt text."""

    path: Annotated[str, "directory; empty for no journal"] = ""
    max_bytes: Annotated[int, "size of one file, after which the next begins", Quantity()] = 64 * MiB
    files: Annotated[int, "files per worker; when all are full, recording stops"] = 4
    total_bytes: Annotated[
        int, "of all journals in the directory; workers that start remove the oldest ended ones beyond it", Quantity()
    ] = 1024 * MiB
    runs: Annotated[int, "journals in the directory, one per start of a worker; as total_bytes"] = 200

    def __post_init__(self) -> None:
        _positive(max_bytes=self.max_bytes, files=self.files, total_bytes=self.total_bytes, runs=self.runs)


class Tracing(msgspec.Struct, frozen=True, kw_only=True):
    """OpenTelemetry traces by OTLP over HTTP."""

    otlp_endpoint: Annotated[str, "URL of the collector; empty for no traces"] = ""
    sample_ratio: Annotated[float, "share of requests traced when the client's own trace does not decide"] = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.sample_ratio <= 1:
            raise ValueError(f"sample_ratio must be 0 to 1, got {self.sample_ratio}")


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """Other pools' pickers that place requests on the same engines; the workers of one pool share without it."""

    listen: Annotated[
        str, "HOST:PORT of the first port that this pool's pickers listen on; empty to hear others without being heard"
    ] = ""
    ports: Annotated[int, "how many ports from there on are theirs: two a worker, twice that during an upgrade"] = 16
    peers: Annotated[
        tuple[str, ...], "HOST:PORT of the others; every address of a DNS name is one, its own among them does no harm"
    ] = ()
    secret_file: Annotated[str, "file with the secret that all of them share: encrypts, and keys the prompt hash"] = ""

    def __post_init__(self) -> None:
        if not 2 <= self.ports <= 256 or self.ports % 2:
            raise ValueError(f"ports must be an even number from 2 to 256, got {self.ports}")
        for name, place in (("listen", self.listen), *(("peers", each) for each in self.peers)):
            if place:
                _place(name, place, self.ports)
        if (self.listen or self.peers) and not self.secret_file:
            raise ValueError("secret_file is missing: bookings are shared over a network only with keys")
        if len(self.peers) > 64:
            raise ValueError(f"peers may name 64 places at most, got {len(self.peers)}")


def _place(name: str, place: str, ports: int) -> None:
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65_536 - ports:
        raise ValueError(f"{name} must be HOST:PORT with {ports} ports from there on, got {place[:80]!r}")


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything around the decisions: listener, limits, backends, records."""

    listen: Annotated[Listen, "where clients connect"] = Listen()
    tls: Annotated[Tls | None, "TLS of the listener; none by default"] = None
    data_plane: Annotated[
        Literal["envoy", "direct"], "what carries the bytes: an Envoy of the pool's own, or the workers themselves"
    ] = "envoy"
    limits: Annotated[Limits, "what clients may take"] = Limits()
    usage: Annotated[
        Literal["observe", "inject"],
        "observe reads the usage that engines send; inject asks streams for it, and then clients see it too",
    ] = "observe"
    failure_mode: Annotated[
        Literal["open", "closed"],
        "while no picker runs: open lets Envoy balance new requests by itself, closed answers 503; with API keys it is "
        "always closed; the direct data plane serves nobody without its workers",
    ] = "open"
    public_paths: Annotated[
        Literal["serving", "all"],
        "serving answers paths that are for operators of engines (metrics, sleep, weights, adapters) with 404; all "
        "passes them to an engine; behind a gateway of others that gateway decides",
    ] = "serving"
    retries: Annotated[Retries, "after a failure before the response head"] = Retries()
    auth: Annotated[Auth, "who may send requests"] = Auth()
    agents: Annotated[Agents, "what agents say of their requests"] = Agents()
    flow: Annotated[Flow, "waiting, priorities and fairness"] = Flow()
    tenants: Annotated[
        Mapping[str, Tenant], "tenant, or `*` for every other one: what it gets; tenants are the names of API keys"
    ] = MappingProxyType({})
    backends: Annotated[tuple[Backend, ...], "engines, beside those of the command line"] = ()
    aliases: Annotated[Mapping[str, str], "name that clients may use: name that engines serve"] = MappingProxyType({})
    forward_client_key: Annotated[bool, "send the client's own key to engines that have none configured"] = False
    index: Annotated[Index, "prefix index"] = Index()
    ejection: Annotated[Ejection, "of engines that fail"] = Ejection()
    metrics: Annotated[Metrics, "metrics page"] = Metrics()
    journal: Annotated[Journal, "record of decisions"] = Journal()
    tracing: Annotated[Tracing, "OpenTelemetry"] = Tracing()
    sharing: Annotated[Sharing, "other pickers over the same engines"] = Sharing()
    drain_timeout_s: Annotated[float, "longest wait for requests in flight when the pool stops"] = 30.0

    def __post_init__(self) -> None:
        _not_negative(drain_timeout_s=self.drain_timeout_s)
