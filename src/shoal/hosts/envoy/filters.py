"""The HTTP filters of the public listener, in order.

Order is the point: client-set control headers go first, then the picker speaks, then the guard checks
that it did, then usage is read, then the request is forwarded.
"""

from shoal.hosts.envoy.settings import EnvoySettings, FailureMode
from shoal.hosts.envoy.typed import Document, extension, seconds, typed
from shoal.hosts.envoy.usage import usage_filters

EXT_PROC = "envoy.filters.http.ext_proc"
PICKERS_CLUSTER = "pickers"
GUARD = "envoy.filters.http.rbac"
METADATA = "shoal"
_PICKER_RETRIES = (
    *("connect-failure", "refused-stream", "reset-before-request"),
    *("unavailable", "cancelled", "resource-exhausted"),
)
CLIENT_KEYS = {"authorization": "shoal.client_authorization", "x-api-key": "shoal.client_api_key"}


def http_filters(settings: EnvoySettings) -> list[Document]:
    """Return the whole chain."""
    filters = [_strip_control_headers(settings), _picker(settings)]
    if settings.failure_mode is FailureMode.CLOSED:
        filters.append(_guard())
    if settings.forward_authorization:
        filters.append(_keep_client_key())
    filters += usage_filters(settings)
    filters.append(
        extension("envoy.filters.http.router", "extensions.filters.http.router.v3.Router", suppress_envoy_headers=True)
    )
    return filters


def _strip_control_headers(settings: EnvoySettings) -> Document:
    # Removal on the route would also remove what the picker sets.
    names = [{"remove": name} for name in settings.control_headers]
    prefixes = [{"remove_on_match": {"key_matcher": {"prefix": prefix}}} for prefix in settings.control_prefixes]
    return extension(
        "envoy.filters.http.header_mutation",
        "extensions.filters.http.header_mutation.v3.HeaderMutation",
        mutations={"request_mutations": names + prefixes},
    )


def _picker(settings: EnvoySettings) -> Document:
    return extension(
        EXT_PROC,
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={
            "envoy_grpc": {"cluster_name": PICKERS_CLUSTER},
            # A worker that just died refuses the connection; another one takes the request.
            "retry_policy": {
                "retry_on": ",".join(_PICKER_RETRIES),
                "num_retries": 3,
                "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.05s"},
                "retry_host_predicate": [
                    extension(
                        "envoy.retry_host_predicates.previous_hosts",
                        "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate",
                    )
                ],
                "host_selection_retry_max_attempts": 5,
            },
        },
        # Allowed in both modes: a picker that dies must not cut the streams that it once placed.  In closed mode the
        # guard behind this filter refuses what no picker saw.
        failure_mode_allow=True,
        message_timeout=seconds(settings.clocks.message_s),
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "request_trailer_mode": "SKIP",
            "response_header_mode": "SKIP",
            "response_body_mode": "NONE",
            # HTTP/1 engines' trailers are dropped, so none ever come; awaiting them keeps the picker's stream open to
            # the end of every request, with or without a body.
            "response_trailer_mode": "SEND",
        },
        mutation_rules={"allow_envoy": True},
        metadata_options={"receiving_namespaces": {"untyped": [METADATA, "envoy.lb"]}},
    )


def _guard() -> Document:
    seen = {"filter": METADATA, "path": [{"key": "id"}], "value": {"present_match": True}}
    policy = {"permissions": [{"any": True}], "principals": [{"sourced_metadata": {"metadata_matcher": seen}}]}
    return extension(
        GUARD,
        "extensions.filters.http.rbac.v3.RBAC",
        rules={"action": "ALLOW", "policies": {"picked": policy}},
    )


def _keep_client_key() -> Document:
    """Put the client's keys aside, where no record shows them; the pool's cluster gives them to engines without one."""
    return extension(
        "envoy.filters.http.set_filter_state",
        "extensions.filters.http.set_filter_state.v3.Config",
        on_request_headers=[
            {
                "object_key": state,
                "factory_key": "envoy.string",
                "format_string": {
                    "text_format_source": {"inline_string": f"%REQ({name})%"},
                    "omit_empty_values": True,
                },
                "shared_with_upstream": "TRANSITIVE",
                "skip_if_empty": True,
            }
            for name, state in CLIENT_KEYS.items()
        ],
    )


def headers_only() -> Document:
    """Return the picker's settings for a route whose body must not be held back."""
    return typed(
        "extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
        overrides={
            "processing_mode": {
                "request_header_mode": "SEND",
                "request_body_mode": "NONE",
                "response_header_mode": "SKIP",
                "response_body_mode": "NONE",
                "response_trailer_mode": "SEND",
            }
        },
    )
