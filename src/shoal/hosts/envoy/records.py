"""Access-log messages of Envoy as outcomes of requests.

Owns the reading of one gRPC access-log entry.  Whom a record belongs to is decided by the minted id that
it carries; engines' figures are input to be checked, never trusted.
"""

from typing import Any

import msgspec

from shoal.hosts.envoy.accesslog import ENGINE_TTFT_TAG, TTFT_TAG
from shoal.hosts.envoy.filters import METADATA
from shoal.hosts.envoy.usage import NAMESPACE
from shoal.pool import Outcome

# More tokens than any request can have: a figure above is a mistake or an attack.
MAX_TOKENS = 1 << 30

# Envoy's short names of the response flags, by field: https://www.envoyproxy.io (access log, RESPONSE_FLAGS).
_FLAGS = {
    "failed_local_healthcheck": "LH",
    "no_healthy_upstream": "UH",
    "upstream_request_timeout": "UT",
    "local_reset": "LR",
    "upstream_remote_reset": "UR",
    "upstream_connection_failure": "UF",
    "upstream_connection_termination": "UC",
    "upstream_overflow": "UO",
    "no_route_found": "NR",
    "delay_injected": "DI",
    "fault_injected": "FI",
    "rate_limited": "RL",
    "unauthorized_details": "UAEX",
    "rate_limit_service_error": "RLSE",
    "downstream_connection_termination": "DC",
    "upstream_retry_limit_exceeded": "URX",
    "stream_idle_timeout": "SI",
    "invalid_envoy_request_headers": "IH",
    "downstream_protocol_error": "DPE",
    "upstream_max_stream_duration_reached": "UMSDR",
    "response_from_cache_filter": "RFCF",
    "no_filter_config_found": "NFCF",
    "duration_timeout": "DT",
    "upstream_protocol_error": "UPE",
    "no_cluster_found": "NC",
    "overload_manager": "OM",
    "dns_resolution_failure": "DF",
    "downstream_remote_reset": "DR",
}
_GONE = {"DC", "DR"}
_CUT = "upstream_reset_after_response_started"
# A tunnel (WebSocket) has no end but a closed connection.
_SWITCHED = 101
_BROKEN = {"UR", "UF", "UC", "UPE", "UT"}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request.

    picker, request_id: as the picker wrote them, "" for a request that no picker saw.  path: without its query.
    is_refused: the picker answered it by itself.
    """

    picker: str
    request_id: str
    outcome: Outcome
    path: str = ""
    is_refused: bool = False


def decode_records(message: Any) -> list[Record]:
    """Return the records in one StreamAccessLogsMessage."""
    return [decode_record(entry) for entry in message.http_logs.log_entry]


def decode_record(entry: Any) -> Record:
    """Return what one HTTPAccessLogEntry says.  Never raises: odd values are left out."""
    common, response, request = entry.common_properties, entry.response, entry.request
    metadata = common.metadata.filter_metadata
    own = metadata[METADATA].fields if METADATA in metadata else {}
    flags = _flags(common)
    status = response.response_code.value
    served = _address(common)
    is_gone = not _GONE.isdisjoint(flags)
    details = response.response_code_details
    answered = details == "via_upstream"
    # The client got the engine's head (else Envoy's own error) and not the end.  A client that leaves is no such case.
    is_cut = details.startswith(_CUT) and status < 500 and status != _SWITCHED and not is_gone
    usage = _usage(metadata[NAMESPACE].fields) if NAMESPACE in metadata else (None, None, None)
    prompt, cached, completion = usage
    outcome = Outcome(
        status=status,
        served_address=served,
        attempts=min(common.upstream_request_attempt_count, 1000),
        ttft_s=_span(common, TTFT_TAG),
        engine_ttft_s=_span(common, ENGINE_TTFT_TAG),
        duration_s=_seconds(common.duration),
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        response_bytes=response.response_body_bytes,
        is_cut=is_cut,
        is_client_gone=is_gone,
        is_upstream_failure=_is_failure(served, flags, status, answered),
        flags=",".join(flags),
    )
    return Record(
        picker=own["picker"].string_value if "picker" in own else "",
        request_id=own["id"].string_value if "id" in own else "",
        outcome=outcome,
        path=request.path.partition("?")[0],
        is_refused="refused" in own,
    )


def _flags(common: Any) -> list[str]:
    if not common.HasField("response_flags"):
        return []
    return [_FLAGS.get(field.name, field.name) for field, _ in common.response_flags.ListFields()]


def _address(common: Any) -> str:
    if not common.HasField("upstream_remote_address"):
        return ""
    address = common.upstream_remote_address.socket_address
    host = f"[{address.address}]" if ":" in address.address else address.address
    return f"{host}:{address.port_value}" if host else ""


def _span(common: Any, tag: str) -> float | None:
    text = common.custom_tags.get(tag, "")
    return int(text) / 1e6 if text.isascii() and text.isdigit() and len(text) < 16 else None


def _seconds(duration: Any) -> float:
    return float(duration.seconds) + float(duration.nanos) / 1e9


def _tokens(fields: Any, key: str) -> int | None:
    if key not in fields:
        return None
    value = fields[key].number_value
    # Also false for NaN.
    return int(value) if fields[key].HasField("number_value") and 0 <= value <= MAX_TOKENS else None


def _usage(fields: Any) -> tuple[int | None, int | None, int | None]:
    """Return prompt, cached and completion tokens; prompt includes the cached ones in every API."""
    prompt, cached = _tokens(fields, "prompt"), _tokens(fields, "cached")
    completion = _tokens(fields, "completion")
    if prompt is None and (given := _tokens(fields, "input")) is not None:
        read, created = _tokens(fields, "cache_read"), _tokens(fields, "cache_created")
        prompt = given + (read or 0) + (created or 0)
        cached = read if read is not None else _tokens(fields, "input_cached")
    if completion is None:
        completion = _tokens(fields, "output")
    if cached is not None and (prompt is None or cached > prompt):
        cached = None
    return prompt, cached, completion


def _is_failure(served: str, flags: list[str], status: int, answered: bool) -> bool:
    """Whether the engine is to blame: not for what a client or the router itself ended."""
    if not served or status == _SWITCHED or not _GONE.isdisjoint(flags):
        return False
    # Silence until the idle timer fires is a stalled engine when no head came (then the status is 504).
    return not _BROKEN.isdisjoint(flags) or (answered and status >= 500) or ("SI" in flags and status == 504)
