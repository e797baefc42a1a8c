"""How engines that have a key or TLS are dialled: from the fleet's targets to addresses and TLS groups.

Translation, and the file in which workers find it.  Targets are `hosts.fleet`'s; the shapes are the data planes'.
"""

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path

from shoal.hosts.backends import Backends, write_backends
from shoal.hosts.envoy import BackendTls, EndpointAddress
from shoal.hosts.fleet import Target
from shoal.pool import Endpoint

Targets = Mapping[str, Target]
"""Endpoint id -> what the operator named."""

BACKENDS = "backends.json"
"""Where in the run directory workers read how engines are dialled; it holds keys."""


def addresses_of(endpoints: Mapping[str, Endpoint], targets: Targets) -> list[EndpointAddress]:
    """Return how each endpoint is dialled."""
    return [_address(endpoint, targets.get(name)) for name, endpoint in endpoints.items()]


def groups_of(endpoints: Mapping[str, Endpoint], targets: Targets) -> dict[str, BackendTls]:
    """Return the TLS groups that the endpoints need, by name."""
    made = (tls_of(targets.get(name)) for name, endpoint in endpoints.items() if endpoint.is_tls)
    return {group.name: group for group in made}


def group_names(targets: Iterable[Target]) -> set[str]:
    """Return the names of the groups that any of the targets would need."""
    return {tls_of(target).name for target in targets if target.is_tls}


def tell_workers(run_dir: Path, endpoints: Mapping[str, Endpoint], targets: Targets) -> None:
    """Write how the endpoints are dialled; workers read it at once when they meet one."""
    dialled = [each for each in addresses_of(endpoints, targets) if each.tls or each.authorization]
    groups = groups_of(endpoints, targets)
    write_backends(run_dir / BACKENDS, Backends(endpoints=tuple(dialled), groups=tuple(groups.values())))


def marks_of(targets: Targets) -> dict[str, Hashable]:
    """Return what a data plane is shown of an endpoint besides its address, by id."""
    return {name: (target.api_key, target.ca_file, target.host) for name, target in targets.items()}


def tls_of(target: Target | None) -> BackendTls:
    """Return how the engines of a target are dialled with TLS."""
    sni = target.host if target is not None and not target.is_literal else ""
    ca = target.ca_file if target is not None else ""
    return BackendTls(name="tls-" + hashlib.sha256(f"{ca}\0{sni}".encode()).hexdigest()[:12], ca=ca, sni=sni)


def _address(endpoint: Endpoint, target: Target | None) -> EndpointAddress:
    group = tls_of(target).name if endpoint.is_tls else ""
    key = f"Bearer {target.api_key}" if target is not None and target.api_key else ""
    return EndpointAddress(address=endpoint.address, tls=group, authorization=key)
