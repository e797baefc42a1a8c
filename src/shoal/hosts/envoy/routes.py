"""Routes: what is public goes to the one pool of engines; upgrades on a route without body buffering.

Which engine is not decided here but by the picker's header.
"""

from shoal.hosts.envoy.denied import denied_routes
from shoal.hosts.envoy.filters import EXT_PROC, METADATA, headers_only
from shoal.hosts.envoy.settings import EnvoySettings
from shoal.hosts.envoy.typed import Document, seconds, typed
from shoal.hosts.envoy.usage import JSON_FILTER, USAGE_PATHS

POOL_CLUSTER = "engines"
ROUTES = "routes"


def route_configuration(settings: EnvoySettings) -> Document:
    """Return the RDS resource."""
    limit = settings.limits.max_body_bytes
    off = {JSON_FILTER: typed("config.route.v3.FilterConfig", disabled=True)}
    upgrade = {
        "name": "upgrade",
        "match": {
            "prefix": "/",
            "headers": [{"name": "upgrade", "string_match": {"exact": "websocket", "ignore_case": True}}],
        },
        "route": {**_forward(settings), "upgrade_configs": [{"upgrade_type": "websocket"}]},
        "typed_per_filter_config": {EXT_PROC: headers_only(), **off},
    }
    counted = [{"name": "counted", "match": {"path": path}, "route": _forward(settings)} for path in USAGE_PATHS]
    everything = {
        "name": "everything",
        "match": {"prefix": "/"},
        "route": _forward(settings),
        "typed_per_filter_config": off,
    }
    host = {
        "name": "all",
        "domains": ["*"],
        "request_body_buffer_limit": limit,
        "response_headers_to_add": _answer_headers(settings),
        "routes": [*denied_routes(settings), upgrade, *counted, everything],
    }
    return typed("config.route.v3.RouteConfiguration", name=ROUTES, virtual_hosts=[host])


def _answer_headers(settings: EnvoySettings) -> list[Document]:
    # Responses never reach the picker, so what it wants to say stands in its metadata.
    values = {name: f"%DYNAMIC_METADATA({METADATA}:{name})%" for name in settings.response_headers}
    values["x-shoal-request-id"] = f"%DYNAMIC_METADATA({METADATA}:id)%"
    if settings.shows_endpoint:
        values["x-shoal-endpoint"] = "%UPSTREAM_REMOTE_ADDRESS%"
    return [
        {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        for name, value in values.items()
    ]


def _forward(settings: EnvoySettings) -> Document:
    retries = settings.retries
    return {
        "cluster": POOL_CLUSTER,
        "timeout": "0s",
        "idle_timeout": seconds(settings.clocks.stream_idle_s),
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset,reset-before-request,retriable-status-codes",
            "retriable_status_codes": list(retries.status_codes),
            "num_retries": max(retries.attempts - 1, 0),
            "per_try_timeout": "0s",
            "per_try_idle_timeout": "0s",
            "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.1s"},
        },
    }
