"""Clusters: the pool of engines, the pickers together, and each picker alone for its records.

Owns connection limits and the load balancing that is used when no picker has chosen.
"""

from typing import Any

from shoal.hosts.envoy.accesslog import picker_cluster
from shoal.hosts.envoy.certificates import system_roots, trust_secret
from shoal.hosts.envoy.files import source
from shoal.hosts.envoy.filters import CLIENT_KEYS, PICKERS_CLUSTER
from shoal.hosts.envoy.routes import POOL_CLUSTER
from shoal.hosts.envoy.settings import BackendTls, EnvoySettings, Picker
from shoal.hosts.envoy.typed import Document, extension, seconds, typed

TARGET_HEADER = "x-gateway-destination-endpoint"
TLS_MATCH_KEY = "tls"
# An error in it, as for an engine without metadata, gives no header.
_CLIENT_KEY_IF_NONE_CONFIGURED = (
    "%CEL('authorization' in xds.upstream_host_metadata.filter_metadata['shoal'] ? '' : filter_state['{}'])%"
)


def clusters(settings: EnvoySettings) -> list[Document]:
    """Return the CDS resources."""
    pickers = _pickers(settings, PICKERS_CLUSTER, settings.pickers)
    pickers |= {
        "health_checks": [
            {
                "timeout": "3s",
                "interval": "1s",
                "no_traffic_interval": "1s",
                "unhealthy_interval": "0.25s",
                "unhealthy_threshold": 3,
                "healthy_threshold": 1,
                "grpc_health_check": {},
            }
        ],
        "common_lb_config": _health(merge_s=0.0),
    }
    alone = [_pickers(settings, picker_cluster(picker), (picker,)) for picker in settings.pickers]
    for cluster in alone:
        # Records are dropped, not held, once a stream is behind by this much.
        cluster["per_connection_buffer_limit_bytes"] = 16 * 1024 * 1024
    return [_pool(settings), pickers, *alone]


def _health(merge_s: float) -> Document:
    # By default Envoy keeps a change of health from its threads for a second.  With no healthy member, all are tried.
    return {"healthy_panic_threshold": {"value": 1}, "update_merge_window": seconds(merge_s)}


def _breakers(limit: int, **extra: Any) -> Document:
    everything = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), limit)
    return {"thresholds": [{**everything, **extra}]}


def _pool(settings: EnvoySettings) -> Document:
    retries = settings.retries
    budget = {"budget_percent": {"value": retries.budget_ratio * 100}, "min_retry_concurrency": retries.min_concurrency}
    balanced = typed("extensions.load_balancing_policies.least_request.v3.LeastRequest")
    policy = extension(
        "envoy.load_balancing_policies.override_host",
        "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"header": TARGET_HEADER}],
        fallback_policy={
            "policies": [
                {"typed_extension_config": {"name": "envoy.load_balancing_policies.least_request", **_config(balanced)}}
            ]
        },
    )
    return typed(
        "config.cluster.v3.Cluster",
        name=POOL_CLUSTER,
        type="EDS",
        eds_cluster_config={"service_name": POOL_CLUSTER, "eds_config": source(settings.run_dir, "eds")},
        connect_timeout=seconds(settings.clocks.connect_s),
        circuit_breakers=_breakers(settings.limits.max_streams, retry_budget=budget),
        load_balancing_policy={"policies": [{"typed_extension_config": policy}]},
        # Only the balancing without a picker looks at this; the header's choice does not.
        outlier_detection={
            "consecutive_5xx": 5,
            "consecutive_local_origin_failure": 2,
            "split_external_local_origin_errors": True,
            "enforcing_consecutive_local_origin_failure": 100,
            "enforcing_success_rate": 0,
            "enforcing_local_origin_success_rate": 0,
            "interval": "1s",
            "base_ejection_time": "5s",
            "max_ejection_time": "30s",
            "max_ejection_percent": 50,
        },
        common_lb_config=_health(merge_s=0.1),
        typed_extension_protocol_options=_protocol(
            {"explicit_http_config": {"http_protocol_options": {}}, "http_filters": _engine_filters(settings)},
            # Shorter than the keep-alive of engines (uvicorn: 5 s), or a reused connection dies under a request.
            idle_timeout="4s",
        ),
        transport_socket_matches=[_tls_match(settings, group) for group in settings.backend_tls]
        + [{"name": "plain", "match": {}, "transport_socket": _plain()}],
    )


def _engine_filters(settings: EnvoySettings) -> list[Document]:
    # Runs per try, when the engine is known; what an earlier try set must not reach this engine.
    mutations: list[Document] = [{"remove": "authorization"}, {"remove": "x-api-key"}]
    if settings.forward_authorization:
        mutations += [
            _header(name, _CLIENT_KEY_IF_NONE_CONFIGURED.format(state)) for name, state in CLIENT_KEYS.items()
        ]
    mutations.append(_header("authorization", "%UPSTREAM_METADATA(shoal:authorization)%"))
    return [
        extension(
            "envoy.filters.http.header_mutation",
            "extensions.filters.http.header_mutation.v3.HeaderMutation",
            mutations={"request_mutations": mutations},
        ),
        extension("envoy.filters.http.upstream_codec", "extensions.filters.http.upstream_codec.v3.UpstreamCodec"),
    ]


def _header(name: str, value: str) -> Document:
    return {
        "append": {
            "header": {"key": name, "value": value},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
        }
    }


def _config(message: Document) -> Document:
    return {"typed_config": message}


def _plain() -> Document:
    return extension("envoy.transport_sockets.raw_buffer", "extensions.transport_sockets.raw_buffer.v3.RawBuffer")


def _tls_match(settings: EnvoySettings, group: BackendTls) -> Document:
    context: Document = {}
    if group.is_verified and group.ca:
        context["validation_context_sds_secret_config"] = {
            "name": trust_secret(group.name),
            "sds_config": source(settings.run_dir, "sds", trust_secret(group.name)),
        }
    elif group.is_verified:
        roots: Document = {"trusted_ca": {"filename": system_roots()}}
        if group.sni:
            roots["match_typed_subject_alt_names"] = [{"san_type": "DNS", "matcher": {"exact": group.sni}}]
        context["validation_context"] = roots
    socket = extension(
        "envoy.transport_sockets.tls",
        "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        common_tls_context=context,
        **({"sni": group.sni} if group.sni else {}),
    )
    return {"name": f"tls-{group.name}", "match": {TLS_MATCH_KEY: group.name}, "transport_socket": socket}


def _pickers(settings: EnvoySettings, name: str, pickers: tuple[Picker, ...]) -> Document:
    endpoints = [{"endpoint": {"address": {"pipe": {"path": picker.socket}}}} for picker in pickers]
    return typed(
        "config.cluster.v3.Cluster",
        name=name,
        type="STATIC",
        connect_timeout="1s",
        lb_policy="ROUND_ROBIN",
        load_assignment={"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        circuit_breakers=_breakers(settings.limits.max_streams, max_retries=settings.limits.max_streams),
        typed_extension_protocol_options=_protocol(
            {
                "explicit_http_config": {
                    "http2_protocol_options": {
                        "max_concurrent_streams": settings.limits.max_streams,
                        # It sends data in frames as long as the picker allows; the other codec cuts it to 16 KiB.
                        "use_oghttp2_codec": True,
                        "initial_stream_window_size": 1024 * 1024,
                        "initial_connection_window_size": 64 * 1024 * 1024,
                        # A stopped or stuck process holds its requests for as long as a queue may last.
                        "connection_keepalive": {"interval": "2s", "timeout": "6s"},
                    }
                }
            }
        ),
    )


def _protocol(config: Document, **common: Any) -> Document:
    name = "extensions.upstreams.http.v3.HttpProtocolOptions"
    if common:
        config = {**config, "common_http_protocol_options": common}
    return {f"envoy.{name}": typed(name, **config)}
