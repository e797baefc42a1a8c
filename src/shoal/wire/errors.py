"""Answers that Shoal gives itself: one table from refusal reasons to status, headers and error body.

Owns the error shapes of the OpenAI and Anthropic APIs.  Error bodies of engines are not made or changed here.
"""

import math
from typing import NamedTuple

import msgspec

from shoal.kernel import InvalidInput
from shoal.pool import Api, Refusal, RefusalReason
from shoal.wire.limits import BodyTooLarge

DROPPED_REASON_HEADER = "x-llm-d-request-dropped-reason"
_SATURATED_RETRY_S = 1.0
"""What a 429 says when the router had no better estimate: clients treat one without Retry-After as fatal."""


class LocalAnswer(NamedTuple):
    """A whole HTTP answer."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class _Shape(NamedTuple):
    status: int
    openai_type: str
    anthropic_type: str
    code: str
    param: str | None = None


_SHAPES = {
    RefusalReason.BAD_REQUEST: _Shape(400, "invalid_request_error", "invalid_request_error", "bad_request"),
    RefusalReason.UNAUTHORIZED: _Shape(401, "authentication_error", "authentication_error", "invalid_api_key"),
    RefusalReason.MODEL_NOT_FOUND: _Shape(404, "not_found_error", "not_found_error", "model_not_found", "model"),
    # Clients try most others again by themselves.
    RefusalReason.ABORTED: _Shape(410, "invalid_request_error", "invalid_request_error", "aborted"),
    RefusalReason.PRECONDITION_FAILED: _Shape(
        412, "invalid_request_error", "invalid_request_error", "precondition_failed"
    ),
    RefusalReason.BODY_TOO_LARGE: _Shape(413, "invalid_request_error", "request_too_large", "body_too_large"),
    RefusalReason.SATURATED: _Shape(429, "rate_limit_error", "rate_limit_error", "rate_limit_exceeded"),
    RefusalReason.TTL_EXPIRED: _Shape(429, "rate_limit_error", "rate_limit_error", "queue_timeout"),
    RefusalReason.OVER_BUDGET: _Shape(429, "rate_limit_error", "rate_limit_error", "rate_limit_exceeded"),
    RefusalReason.EVICTED: _Shape(429, "rate_limit_error", "rate_limit_error", "evicted"),
    RefusalReason.NOT_ADMITTED: _Shape(429, "rate_limit_error", "rate_limit_error", "rate_limit_exceeded"),
    RefusalReason.CLIENT_GONE: _Shape(503, "service_unavailable_error", "overloaded_error", "client_gone"),
    RefusalReason.INTERNAL: _Shape(500, "server_error", "api_error", "internal_error"),
    RefusalReason.NO_ENDPOINTS: _Shape(503, "service_unavailable_error", "overloaded_error", "no_endpoints"),
    RefusalReason.SHUTTING_DOWN: _Shape(503, "service_unavailable_error", "overloaded_error", "shutting_down"),
}


def answer(refusal: Refusal, api: Api, request_id: str) -> LocalAnswer:
    """Return what the client gets for `refusal`, in the error format of `api`."""
    shape = _SHAPES[refusal.reason]
    headers = [("content-type", "application/json")]
    if refusal.reason.value.startswith(("rejected-", "evicted-")):
        headers.append((DROPPED_REASON_HEADER, refusal.reason.value))
    wait_s = refusal.retry_after_s
    if wait_s is None and shape.status == 429:
        wait_s = _SATURATED_RETRY_S
    if wait_s is not None:
        headers.append(("retry-after", str(max(1, math.ceil(wait_s)))))
    if refusal.reason is RefusalReason.UNAUTHORIZED:
        headers.append(("www-authenticate", "Bearer"))
    return LocalAnswer(shape.status, tuple(headers), error_body(shape, refusal.message, api, request_id))


def error_body(shape: _Shape, message: str, api: Api, request_id: str) -> bytes:
    """Return the JSON error object of `api`."""
    if api is Api.MESSAGES:
        error = {"type": shape.anthropic_type, "message": message}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})
    return msgspec.json.encode(
        {"error": {"message": message, "type": shape.openai_type, "param": shape.param, "code": shape.code}}
    )


def refusal_of(error: InvalidInput) -> Refusal:
    """Return the refusal for a request that `decode` could not read."""
    is_size = isinstance(error, BodyTooLarge)
    reason = RefusalReason.BODY_TOO_LARGE if is_size else RefusalReason.BAD_REQUEST
    return Refusal(reason=reason, message=str(error))
