"""What Envoy reads once at its start; all else is in watched files and changes while it runs.

Also the one function that writes everything.
"""

from pathlib import Path

from shoal.hosts.envoy.certificates import write_certificates
from shoal.hosts.envoy.clusters import clusters
from shoal.hosts.envoy.endpoints import write_endpoints
from shoal.hosts.envoy.files import source, write_document, write_resources
from shoal.hosts.envoy.listeners import listeners
from shoal.hosts.envoy.routes import route_configuration
from shoal.hosts.envoy.settings import EnvoySettings
from shoal.hosts.envoy.typed import Document, extension
from shoal.kernel import ConfigError

_MAX_SOCKET_PATH = 107


def bootstrap(settings: EnvoySettings) -> Document:
    """Return the bootstrap document."""
    return {
        "node": {"id": "shoal", "cluster": "shoal"},
        "admin": {"address": {"pipe": {"path": settings.admin_socket, "mode": 0o600}}},
        "dynamic_resources": {
            "lds_config": source(settings.run_dir, "lds"),
            "cds_config": source(settings.run_dir, "cds"),
        },
        "overload_manager": _overload(settings),
        # The list of denied paths is one expression, about nine times as long as Envoy takes by default.
        "layered_runtime": {"layers": [{"name": "shoal", "static_layer": {"re2.max_program_size.error_level": 4096}}]},
    }


def _overload(settings: EnvoySettings) -> Document:
    limits = settings.limits
    connections = extension(
        "envoy.resource_monitors.global_downstream_max_connections",
        "extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        max_active_downstream_connections=limits.max_connections,
    )
    manager: Document = {"refresh_interval": "0.05s", "resource_monitors": [connections]}
    if limits.heap_bytes:
        heap = "envoy.resource_monitors.fixed_heap"
        manager["resource_monitors"].append(
            extension(
                heap,
                "extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig",
                max_heap_size_bytes=limits.heap_bytes,
            )
        )
        # Uploads are charged to accounts of their own, so the largest can be told from the rest.
        manager["buffer_factory_config"] = {"minimum_account_to_track_power_of_two": 20}
        manager["actions"] = [
            _action("shrink_heap", heap, 0.9),
            _action("stop_accepting_requests", heap, 0.95),
            _action("reset_high_memory_stream", heap, 0.98, 1.0),
        ]
        # That action knows only HTTP/2.  Here an HTTP/1 connection that goes on sending is answered and closed, while
        # those that only receive go on.
        shed = {"name": heap, "threshold": {"value": 0.98}}
        manager["loadshed_points"] = [
            {"name": "envoy.load_shed_points.http1_server_abort_dispatch", "triggers": [shed]}
        ]
    return manager


def _action(name: str, monitor: str, threshold: float, saturation: float | None = None) -> Document:
    if saturation is None:
        trigger: Document = {"name": monitor, "threshold": {"value": threshold}}
    else:
        scaled = {"scaling_threshold": threshold, "saturation_threshold": saturation}
        trigger = {"name": monitor, "scaled": scaled}
    return {"name": f"envoy.overload_actions.{name}", "triggers": [trigger]}


def write_config(settings: EnvoySettings) -> Path:
    """Write every file that Envoy reads, endpoints excepted once they exist; returns the bootstrap's path.

    A running Envoy takes over what changed, except the bootstrap.  Raises ConfigError.
    """
    for socket in (settings.admin_socket, *(picker.socket for picker in settings.pickers)):
        if len(socket.encode()) > _MAX_SOCKET_PATH:
            raise ConfigError(f"path of a unix socket is longer than {_MAX_SOCKET_PATH} bytes: {socket}")
    run_dir = settings.run_dir
    write_certificates(settings)
    if not (Path(run_dir) / "eds" / "eds.json").exists():
        write_endpoints(run_dir, ())
    write_resources(run_dir, "cds", clusters(settings))
    write_resources(run_dir, "rds", [route_configuration(settings)])
    write_resources(run_dir, "lds", listeners(settings))
    path = Path(run_dir) / "envoy.json"
    write_document(path, bootstrap(settings))
    return path
