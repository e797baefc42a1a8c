"""From the accepted configuration to what each part of the pool needs to hear.

Pure translation: Envoy's settings, targets of the fleet, and which changes a running pool can only take over by a
restart of something.
"""

import os
import secrets
from pathlib import Path

import msgspec

from shoal.hosts.backends import read_api_key
from shoal.hosts.envoy import EnvoySettings, FailureMode, ListenerTls
from shoal.hosts.fleet import Target, kv_addresses, parse_url
from shoal.hosts.sharing import read_secret
from shoal.hosts.supervisor.options import Options
from shoal.kernel import ConfigError
from shoal.routing.config import RouterConfig
from shoal.routing.settings import Backend, PoolSettings


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """What stands from the start of a pool to its end.

    metrics_port: 0 for none.  data_plane: one of `planes.PLANES`.
    """

    host: str
    port: int
    metrics_port: int
    data_plane: str = "envoy"


def ground_of(options: Options, pool: PoolSettings) -> Ground:
    """Return where to listen: a flag wins over the configuration."""
    return Ground(
        host=options.host if options.host is not None else pool.listen.host,
        port=options.port if options.port is not None else pool.listen.port,
        metrics_port=options.metrics_port if options.metrics_port is not None else pool.metrics.port,
        data_plane=options.data_plane or pool.data_plane,
    )


def drain_s_of(options: Options, pool: PoolSettings) -> float:
    """Return the longest wait for requests in flight."""
    return options.drain_s if options.drain_s is not None else pool.drain_timeout_s


def envoy_settings(
    pool: PoolSettings, ground: Ground, run_dir: Path, response_headers: tuple[str, ...] = ("x-session-token",)
) -> EnvoySettings:
    """Return Envoy's settings, without pickers and TLS groups of engines.

    response_headers: those of the configuration, which its plugins may give.
    """
    plain = EnvoySettings(run_dir=str(run_dir), host=ground.host, port=ground.port, pickers=())
    limits, retries = pool.limits, pool.retries
    return msgspec.structs.replace(
        plain,
        # Keys are checked by the picker: letting requests past a dead one would let everybody in.
        failure_mode=FailureMode.CLOSED if pool.auth.keys_file else FailureMode(pool.failure_mode),
        tls=ListenerTls(certificate=pool.tls.cert, key=pool.tls.key) if pool.tls is not None else None,
        forward_authorization=pool.forward_client_key,
        are_all_paths_public=pool.public_paths == "all",
        limits=msgspec.structs.replace(
            plain.limits, max_body_bytes=limits.max_body_bytes, max_connections=limits.max_connections
        ),
        clocks=msgspec.structs.replace(
            plain.clocks, upload_s=limits.request_timeout_s, stream_s=limits.max_stream_duration_s
        ),
        retries=msgspec.structs.replace(
            plain.retries, attempts=retries.attempts + 1, budget_ratio=retries.budget_ratio
        ),
        response_headers=response_headers,
        concurrency=max(2, min(8, os.cpu_count() or 2)),
    )


def hash_key_of(pool: PoolSettings) -> str:
    """Return the key of the prompt hash, as hex: that of the shared secret, else one that only this pool has.

    Raises ConfigError when the secret cannot be read.
    """
    secret = pool.sharing.secret_file
    return read_secret(Path(secret)).hash_key if secret else secrets.token_hex(8)


def targets_of(pool: PoolSettings) -> tuple[Target, ...]:
    """Return the engines that the configuration names.  Raises ConfigError; reads key files and the environment."""
    return tuple(_target(backend, f"backends[{at}]") for at, backend in enumerate(pool.backends))


def needs_restart(ground: Ground, options: Options, before: RouterConfig, after: RouterConfig) -> list[str]:
    """Return the settings of `after` that only a restart of the pool brings into use.

    ground: what the pool was started with.  before: the configuration of the start.
    """
    wanted = ground_of(options, after.pool)
    found = []
    if wanted.host != ground.host:
        found.append("listen.host")
    if wanted.port not in (0, ground.port):
        found.append("listen.port")
    if wanted.metrics_port != ground.metrics_port:
        found.append("metrics.port")
    if wanted.data_plane != ground.data_plane:
        found.append("data_plane")
    if after.discovery != before.discovery:
        found.append("dataLayer.discovery")
    if after.pool.sharing != before.pool.sharing:
        found.append("sharing")
    return found


def needs_new_workers(before: PoolSettings, after: PoolSettings) -> list[str]:
    """Return the changed settings that a worker reads only at its start."""
    pairs = {
        "auth": (before.auth, after.auth),
        "journal": (before.journal, after.journal),
        "tracing": (before.tracing, after.tracing),
        "index": (before.index, after.index),
        "limits.max_body_bytes": (before.limits.max_body_bytes, after.limits.max_body_bytes),
    }
    return [name for name, (old, new) in pairs.items() if old != new]


def _target(backend: Backend, path: str) -> Target:
    try:
        key = read_api_key(Path(backend.api_key_file)) if backend.api_key_file else _from_environment(backend)
        kv_events, kv_replay = kv_addresses(backend.kv_events, backend.kv_replay)
        target = parse_url(
            backend.url,
            name=backend.name,
            engine=backend.engine or "",
            labels=dict(backend.labels),
            api_key=key,
            ca_file=backend.ca_file,
            source="",
        )
        return msgspec.structs.replace(target, kv_events=kv_events, kv_replay=kv_replay)
    except ConfigError as error:
        raise ConfigError(error.message, path=path) from None


def _from_environment(backend: Backend) -> str:
    if not backend.api_key_env:
        return ""
    key = os.environ.get(backend.api_key_env, "").strip()
    if not key:
        raise ConfigError(f"environment variable {backend.api_key_env} is not set")
    return key
