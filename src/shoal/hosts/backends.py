"""What a worker must know of engines besides their addresses: their own keys, and how those with TLS are dialled.

The direct data plane sends requests by it, and whoever asks an engine for tokens asks by it.  Owns the backends file,
which the supervisor writes: `{"endpoints": [EndpointAddress...], "groups": [BackendTls...]}`.
It is read again when it changes, and at once when an address is asked for that was not in it, so that it need only be
written before the router is told of an endpoint.
"""

import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.hosts.envoy import BackendTls, EndpointAddress
from shoal.hosts.envoy.files import write_document
from shoal.hosts.filewatch import FollowedFiles, Mark, look_every, mark_of, read_small
from shoal.hosts.logs import Log
from shoal.kernel import UNREADABLE, ConfigError

log = Log("backends")


class Backends(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file.  endpoints: every engine with a key or TLS; others may be left out."""

    endpoints: tuple[EndpointAddress, ...] = ()
    groups: tuple[BackendTls, ...] = ()


class Backend(msgspec.Struct, frozen=True):
    """How one engine is dialled.

    tls: None for plain HTTP.  server_name: what its certificate must name, None to check the chain only.
    authorization: value of the header that it wants, "" for none.
    """

    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    authorization: str = ""


PLAIN = Backend()

_LOOK_S = 0.5
_MAX_KEY_BYTES = 4096


def read_api_key(path: Path) -> str:
    """Return the key in a one-line file.  Raises ConfigError, which never holds the content."""
    try:
        key = read_small(path, _MAX_KEY_BYTES).decode().strip()
    except OSError as error:
        raise ConfigError(f"API key file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"API key file {path} cannot be read: not text") from None
    if not key:
        raise ConfigError(f"API key file {path} is empty")
    return key


def write_backends(path: Path, backends: Backends) -> None:
    """Write the file, readable by its owner only."""
    write_document(path, msgspec.to_builtins(backends))


class BackendsFile:
    """The file as it was last read; without a path, no engine has a key or TLS.

    on_change: called after the answers of `of` may have changed.
    """

    def __init__(self, path: Path | None, on_change: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self.on_change = on_change
        self._backends: dict[str, Backend] = {}
        self._root_files: list[str] = []
        self._contexts: dict[tuple[BackendTls, Mark | None], ssl.SSLContext] = {}
        self._files = FollowedFiles("engines' keys and certificates", self._paths, self._reload, log)
        self.look()

    def of(self, address: str) -> Backend:
        """Return how the engine at `address` is dialled."""
        found = self._backends.get(address)
        if found is None and self._path is not None:
            self.look()
            found = self._backends.get(address)
        return PLAIN if found is None else found

    def look(self) -> None:
        """Read the file again if it, or a file of roots that it names, has changed.  A bad one changes nothing."""
        if self._files.look():
            self.on_change()

    async def follow(self) -> None:
        """Look now and then, until cancelled."""
        await look_every(_LOOK_S, self.look)

    def _paths(self) -> list[str | Path]:
        return [] if self._path is None else [self._path, *self._root_files]

    def _reload(self) -> None:
        assert self._path is not None
        content = _read(self._path)
        # Named before they are read, so that one that cannot be used now is looked at again.
        self._root_files = [group.ca for group in content.groups if group.ca and group.is_verified]
        contexts = {group.name: (self._context(group), group.sni or None) for group in content.groups}
        backends = {}
        for endpoint in content.endpoints:
            if endpoint.tls and endpoint.tls not in contexts:
                raise ConfigError(f"{endpoint.address} names the TLS group {endpoint.tls!r}, which is not in the file")
            tls, name = contexts[endpoint.tls] if endpoint.tls else (None, None)
            backends[endpoint.address] = Backend(tls, name, endpoint.authorization)
        used = {context for context, _ in contexts.values()}
        self._contexts = {key: context for key, context in self._contexts.items() if context in used}
        self._backends = backends

    def _context(self, group: BackendTls) -> ssl.SSLContext:
        """The context of a group; the same for as long as group and roots are, so that its connections can stay."""
        key = (group, mark_of(group.ca) if group.ca else None)
        if key not in self._contexts:
            self._contexts[key] = context_of(group)
        return self._contexts[key]


def context_of(group: BackendTls) -> ssl.SSLContext:
    """Return the client context of a TLS group.  Raises ConfigError when its roots cannot be used."""
    try:
        if group.ca:
            read_small(group.ca)
        context = ssl.create_default_context(cafile=group.ca or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"roots cannot be used: {error}", source=group.ca) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = bool(group.sni) and group.is_verified
    if not group.is_verified:
        context.verify_mode = ssl.CERT_NONE
    return context


def _read(path: Path) -> Backends:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Backends)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path)) from None
    except UNREADABLE as error:
        raise ConfigError(f"cannot be used: {error}", source=str(path)) from None
