"""The public listener: who may connect, how requests are read, and what is timed.

Filters, routes and replies have modules of their own.
"""

from shoal.hosts.envoy.accesslog import access_loggers
from shoal.hosts.envoy.certificates import LISTENER_SECRET
from shoal.hosts.envoy.files import source
from shoal.hosts.envoy.filters import http_filters
from shoal.hosts.envoy.replies import local_replies
from shoal.hosts.envoy.routes import ROUTES
from shoal.hosts.envoy.settings import EnvoySettings
from shoal.hosts.envoy.typed import Document, extension, seconds, typed

_STREAM_WINDOW = 1024 * 1024
_CONNECTION_BUFFER = 1024 * 1024


def listeners(settings: EnvoySettings) -> list[Document]:
    """Return the LDS resources."""
    if not settings.is_open:
        return []
    chain: Document = {"filters": [_connection_manager(settings)]}
    if settings.tls is not None:
        chain["transport_socket"] = _tls(settings)
    return [
        typed(
            "config.listener.v3.Listener",
            name="public",
            address={"socket_address": {"address": settings.host, "port_value": settings.port}},
            # Routes raise this for a request that a filter holds whole; they cannot lower it.
            per_connection_buffer_limit_bytes=min(settings.limits.max_body_bytes, _CONNECTION_BUFFER),
            enable_reuse_port=True,
            tcp_backlog_size=4096,
            filter_chains=[chain],
        )
    ]


def _connection_manager(settings: EnvoySettings) -> Document:
    clocks = settings.clocks
    return extension(
        "envoy.filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="public",
        codec_type="AUTO",
        rds={"route_config_name": ROUTES, "config_source": source(settings.run_dir, "rds")},
        http_filters=http_filters(settings),
        access_log=access_loggers(settings),
        local_reply_config=local_replies(settings),
        server_name="shoal",
        server_header_transformation="APPEND_IF_ABSENT",
        use_remote_address=True,
        # The client's own id is kept byte for byte and given back; it is never ours.
        preserve_external_request_id=True,
        always_set_request_id_in_response=True,
        request_id_extension={
            "typed_config": typed("extensions.request_id.uuid.v3.UuidRequestIdConfig", pack_trace_reason=False)
        },
        max_request_headers_kb=96,
        stream_idle_timeout=seconds(clocks.stream_idle_s),
        request_timeout=seconds(clocks.upload_s),
        request_headers_timeout=seconds(clocks.headers_s),
        common_http_protocol_options={
            "idle_timeout": seconds(clocks.connection_idle_s),
            **({"max_stream_duration": seconds(clocks.stream_s)} if clocks.stream_s else {}),
        },
        http_protocol_options={"accept_http_10": True, "default_host_for_http_10": "shoal"},
        http2_protocol_options={
            "allow_connect": True,
            "max_concurrent_streams": 10_000,
            "initial_stream_window_size": _STREAM_WINDOW,
            "initial_connection_window_size": 16 * _STREAM_WINDOW,
        },
        # For routes without an engine, as denied paths: else Envoy answers an upgrade there with 403.
        upgrade_configs=[{"upgrade_type": "websocket"}],
        normalize_path=False,
        merge_slashes=False,
    )


def _tls(settings: EnvoySettings) -> Document:
    certificate = {"name": LISTENER_SECRET, "sds_config": source(settings.run_dir, "sds", LISTENER_SECRET)}
    return extension(
        "envoy.transport_sockets.tls",
        "extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        common_tls_context={
            "alpn_protocols": ["h2", "http/1.1"],
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
            "tls_certificate_sds_secret_configs": [certificate],
        },
    )
