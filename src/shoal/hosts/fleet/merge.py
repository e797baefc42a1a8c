"""Many sources, one fleet: which endpoints the targets of all sources make together."""

from collections.abc import Callable, Iterable

from shoal.hosts.fleet.targets import Target
from shoal.pool import Endpoint

Desired = dict[str, tuple[Target, Endpoint]]


def merge(targets: Iterable[Target], addresses: Callable[[str], tuple[str, ...]]) -> tuple[Desired, list[Endpoint]]:
    """Return the endpoints by id, and those left out because an earlier one has the same id or address.

    addresses: the known addresses of a DNS name.
    """
    desired: Desired = {}
    ids_by_address: dict[str, str] = {}
    clashing: list[Endpoint] = []
    for target in targets:
        for endpoint in endpoints_of(target, addresses):
            if endpoint.id in desired or endpoint.address in ids_by_address:
                clashing.append(endpoint)
                continue
            desired[endpoint.id] = (target, endpoint)
            ids_by_address[endpoint.address] = endpoint.id
    return desired, clashing


def endpoints_of(target: Target, addresses: Callable[[str], tuple[str, ...]]) -> list[Endpoint]:
    """The endpoints of one target: one per address."""
    return [target.endpoint(ip) for ip in ((target.host,) if target.is_literal else addresses(target.host))]
