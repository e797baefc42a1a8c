"""Envoy's own answers as OpenAI error bodies.

Covers only what Envoy says by itself.  Answers of engines pass through unchanged, and so do refusals by
the picker, which marks them in its metadata.
"""

from typing import Any

from shoal.hosts.envoy.settings import EnvoySettings
from shoal.hosts.envoy.typed import Document, typed

REFUSED_KEY = "refused"


def _error(status: int, kind: str, code: str, message: str, when: Document | None = None, **extra: Any) -> Document:
    # The outer `type` makes the same body an Anthropic error too.
    body = {"type": "error", "error": {"message": message, "type": kind, "param": None, "code": code}}
    return {
        "filter": when or status_is(status),
        "body_format_override": {"json_format": body, "content_type": "application/json"},
        **extra,
    }


def status_is(status: int) -> Document:
    """Return the log filter that matches answers with `status`."""
    return _status("EQ", status)


def _status(op: str, status: int) -> Document:
    return {"status_code_filter": {"comparison": {"op": op, "value": {"default_value": status, "runtime_key": "_"}}}}


def metadata_is_present(key: str) -> Document:
    """Return the log filter that matches requests for which the picker set `shoal.<key>`."""
    matcher = {"filter": "shoal", "path": [{"key": key}], "value": {"present_match": True}}
    return {"metadata_filter": {"matcher": matcher, "match_if_key_not_found": False}}


def _is_without_route() -> Document:
    return {"and_filter": {"filters": [status_is(404), {"response_flag_filter": {"flags": ["NR"]}}]}}


def _details_begin(text: str) -> Document:
    """Return the filter that matches what Envoy itself says of its reason; response flags are not set so early."""
    expression = f"response.code_details.startsWith('{text}')"
    cel = typed("extensions.access_loggers.filters.cel.v3.ExpressionFilter", expression=expression)
    return {"extension_filter": {"name": "envoy.access_loggers.extension_filters.cel", "typed_config": cel}}


def local_replies(settings: EnvoySettings) -> Document:
    """Return the mapping from Envoy's status codes to error bodies."""
    limit = settings.limits.max_body_bytes
    clocks = settings.clocks
    longest = f", or no end within {clocks.stream_s:g} s" if clocks.stream_s else ""
    invalid, server = "invalid_request_error", "server_error"
    as_it_is = {
        "filter": metadata_is_present(REFUSED_KEY),
        "body_format_override": {
            "text_format_source": {"inline_string": "%LOCAL_REPLY_BODY%"},
            "content_type": "application/json",
        },
    }
    return {
        "mappers": [
            as_it_is,
            _error(400, invalid, "bad_request", "The request is not valid HTTP."),
            # A request that the picker did not see, in closed failure mode: the guard's 403 is an outage.
            _error(
                403,
                server,
                "picker_unavailable",
                "The router has no picker at the moment. Try again shortly.",
                when=_details_begin("rbac_access_denied"),
                status_code=503,
                headers_to_add=[{"header": {"key": "retry-after", "value": "1"}}],
            ),
            _error(403, invalid, "upgrade_not_served", "This upgrade is not served: only websockets are."),
            _error(404, invalid, "not_found", "There is nothing at this path.", when=_is_without_route()),
            _error(
                404,
                invalid,
                "path_not_public",
                "This path is for the operators of an engine and not served on the public port. Send the request to "
                "the engine itself, or set `public_paths: all` in the pool's configuration.",
            ),
            _error(
                408,
                invalid,
                "request_timeout",
                f"The request was not received in time: {clocks.headers_s:g} s for its head, "
                f"{clocks.upload_s:g} s for its body, {clocks.stream_idle_s:g} s of silence.",
            ),
            _error(
                413,
                invalid,
                "body_too_large",
                f"The request body is larger than the limit of {limit} bytes ({limit / 1048576:g} MiB).",
            ),
            # An HTTP/1 connection that went on sending while memory was short.
            _error(
                500,
                server,
                "overloaded",
                "The router is short of memory. Try again shortly.",
                when=_details_begin("overload"),
                status_code=503,
            ),
            _error(429, "rate_limit_error", "rate_limited", "Too many requests. Try again later."),
            _error(426, invalid, "http_version", "Send the request as HTTP/1.1, HTTP/1.0 or HTTP/2."),
            _error(431, invalid, "headers_too_large", "The request's headers are too large."),
            _error(500, server, "router_error", "The router could not handle the request."),
            _error(501, invalid, "unknown_transfer_coding", "Send the body chunked or with its length, nothing else."),
            _error(502, server, "bad_gateway", "The engine's answer is not valid HTTP."),
            _error(
                503,
                server,
                "engine_unavailable",
                "No engine could be reached, or the router is overloaded. Try again shortly.",
            ),
            _error(504, server, "gateway_timeout", f"No answer within {clocks.stream_idle_s:g} s of silence{longest}."),
            _error(0, server, "router_error", "The router refused the request.", when=_status("GE", 400)),
        ]
    }
