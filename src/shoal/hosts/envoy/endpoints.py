"""The fleet as Envoy knows it: the EDS file, and whether Envoy has taken it over.

An endpoint may be offered to requests only once Envoy holds it; before, Envoy would not know its name
and would silently balance by itself.
"""

import asyncio
from collections.abc import Iterable

import msgspec
import xxhash

from shoal.hosts.envoy.admin import EnvoyAdmin
from shoal.hosts.envoy.clusters import TLS_MATCH_KEY
from shoal.hosts.envoy.files import write_resources
from shoal.hosts.envoy.routes import POOL_CLUSTER
from shoal.hosts.envoy.typed import Document, typed

_POLL_S = 0.02


class EndpointAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine listens.

    address: `ip:port` or `[v6]:port`, a literal.  tls: name of its TLS group, "" for plain HTTP.  authorization: value
    of the `authorization` header that this engine wants, "" for none.
    """

    address: str
    tls: str = ""
    authorization: str = ""


def write_endpoints(run_dir: str, endpoints: Iterable[EndpointAddress]) -> str:
    """Write the fleet; returns its version, for `loaded`.  Envoy takes it over by itself."""
    members = [_member(endpoint) for endpoint in sorted(endpoints, key=lambda one: one.address)]
    assignment = typed(
        "config.endpoint.v3.ClusterLoadAssignment",
        cluster_name=POOL_CLUSTER,
        endpoints=[{"lb_endpoints": members}] if members else [],
    )
    return write_resources(run_dir, "eds", [assignment])


async def loaded(admin: EnvoyAdmin, version: str, *, timeout_s: float = 10.0) -> bool:
    """Wait until Envoy holds the fleet of `version`; False when it does not within `timeout_s`.

    A fleet that was replaced before Envoy read it is never held: wait for the newest only.
    """
    wanted = xxhash.xxh64_intdigest(version.encode())
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        held = await admin.gauge(f"cluster.{POOL_CLUSTER}.version")
        if held == wanted:
            return True
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)


def _member(endpoint: EndpointAddress) -> Document:
    host, _, port = endpoint.address.rpartition(":")
    address = {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}
    # The cluster asks `shoal` of every engine whether it has a key, so the name is always there.
    own = {"authorization": endpoint.authorization} if endpoint.authorization else {"is_keyless": True}
    metadata: Document = {"shoal": own}
    if endpoint.tls:
        metadata["envoy.transport_socket_match"] = {TLS_MATCH_KEY: endpoint.tls}
    return {"endpoint": {"address": address}, "metadata": {"filter_metadata": metadata}}
