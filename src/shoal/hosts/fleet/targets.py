"""What an operator names: a URL of an engine with what is known of it beforehand.

A target with an IP address is one endpoint; one with a DNS name is as many as the name has addresses.
Looking names up is `resolver`; where targets come from is `sources`.
"""

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

import msgspec

from shoal.hosts.fleet.publishers import sources
from shoal.kernel import ConfigError
from shoal.pool import Endpoint

ENGINES = ("vllm", "sglang", "trtllm-serve", "triton-tensorrt-llm", "shoal")
DEFAULT_ENGINE = "vllm"
ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")

_HOST_NAME = re.compile(r"(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\.?")
_MAX_HOST_CHARS = 253
MAX_NAME_BYTES = 200
"""Of a target, in UTF-8; with the address behind it, no longer than what pickers tell each other."""

_NUMERIC_NAME = re.compile(r"([0-9.]*\.)?[0-9]+")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, or all engines behind one DNS name.

    host: IP literal without brackets, or a lower-case name.  name: chosen by the operator, "" for none.
    engine: one of ENGINES, "" to find it out.  api_key: sent as `Authorization: Bearer`.  ca_file: PEM that signs
    the engine's certificate, "" for the system's.  is_tls: dial with TLS.  kv_events, kv_replay: where it publishes,
    a port or an address for each rank; none to ask the engine.
    """

    host: str
    port: int
    is_tls: bool = False
    name: str = ""
    engine: str = ""
    labels: dict[str, str] = {}
    api_key: str = ""
    ca_file: str = ""
    kv_events: tuple[str, ...] = ()
    kv_replay: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Target({self.url!r}, name={self.name!r})"

    @property
    def url(self) -> str:
        """The URL without a path."""
        return f"{'https' if self.is_tls else 'http'}://{join_address(self.host, self.port)}"

    @property
    def is_literal(self) -> bool:
        """Whether the host is an IP address, so nothing needs looking up."""
        return _ip(self.host) is not None

    @property
    def known_engine(self) -> str:
        """The engine as configured or labelled, "" when it must be found out."""
        if self.engine:
            return self.engine
        labelled = (self.labels.get(key, "") for key in ENGINE_LABELS)
        return next((engine for engine in labelled if engine in ENGINES), "")

    def endpoint(self, ip: str) -> Endpoint:
        """The endpoint at one of the target's addresses."""
        address = join_address(ip, self.port)
        if self.name:
            endpoint_id = self.name if self.is_literal else f"{self.name}@{address}"
        else:
            endpoint_id = address
        engine = self.known_engine or DEFAULT_ENGINE
        return Endpoint(
            id=endpoint_id,
            address=address,
            engine=engine,
            labels=self.labels,
            is_tls=self.is_tls,
            kv_sources=sources(self.kv_events, self.kv_replay, self.labels, ip),
        )


def parse_url(
    text: str,
    *,
    name: str = "",
    engine: str = "",
    labels: dict[str, str] | None = None,
    api_key: str = "",
    ca_file: str = "",
    source: str = "--backend",
) -> Target:
    """Read `http://host:8000` or `https://host`.  Raises ConfigError that says what to write instead."""
    parts = _split(text, source)
    if engine and engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}", source=source)
    if not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise ConfigError("an API key is printable ASCII without spaces", source=source)
    if not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        raise ConfigError(f"a name has up to {MAX_NAME_BYTES} bytes, all of it printable", source=source)
    host, port = _host_and_port(parts, text, source)
    return Target(
        host=host,
        port=port,
        is_tls=parts.scheme == "https",
        name=name,
        engine=engine,
        labels=labels or {},
        api_key=api_key,
        ca_file=ca_file,
    )


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 literal."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(text: str, source: str) -> SplitResult:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(f"{text!r} is not a URL: only printable ASCII without spaces", source=source)
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a URL: {error}", source=source) from None
    if "@" in parts.netloc:
        # The text may hold a password, so it is not repeated.
        raise ConfigError("a URL with a user or password is not accepted; give an API key instead", source=source)
    if parts.scheme not in _DEFAULT_PORTS:
        raise ConfigError(f"{text!r} must begin with http:// or https://, as http://10.0.0.1:8000", source=source)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        plain = f"{parts.scheme}://{parts.netloc}"
        raise ConfigError(f"{text!r} has a path; write only the server, as {plain}", source=source)
    return parts


def _host_and_port(parts: SplitResult, text: str, source: str) -> tuple[str, int]:
    try:
        port = parts.port if parts.port is not None else _DEFAULT_PORTS[parts.scheme]
    except ValueError:
        port = 0
    if not 0 < port < 65536:
        raise ConfigError(f"{text!r}: the port must be a number of 1 to 65535", source=source)
    host = parts.hostname or ""
    ip = _ip(host)
    if ip is not None:
        if ip.is_unspecified:
            raise ConfigError(f"{text!r}: {host} is not an address one can call; use 127.0.0.1", source=source)
        return str(ip), port
    if len(host) > _MAX_HOST_CHARS or not _HOST_NAME.fullmatch(host) or _NUMERIC_NAME.fullmatch(host):
        raise ConfigError(f"{text!r}: {host!r} is neither an IP address nor a host name", source=source)
    return host, port


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return None if getattr(ip, "scope_id", None) else ip
