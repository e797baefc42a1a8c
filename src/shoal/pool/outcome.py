"""How a request ended, or why it was never sent."""

from enum import StrEnum

import msgspec


class RefusalReason(StrEnum):
    """Why the pool does not serve a request.  `wire.errors` maps each to an HTTP status."""

    BAD_REQUEST = "bad-request"
    UNAUTHORIZED = "unauthorized"
    MODEL_NOT_FOUND = "model-not-found"
    BODY_TOO_LARGE = "body-too-large"
    NO_ENDPOINTS = "rejected-no-endpoints"
    SATURATED = "rejected-saturated"
    TTL_EXPIRED = "rejected-ttl-expired"
    OVER_BUDGET = "rejected-over-budget"
    CLIENT_GONE = "rejected-context-cancelled"
    SHUTTING_DOWN = "rejected-shutting-down"
    EVICTED = "evicted-priority"
    NOT_ADMITTED = "rejected-not-admitted"
    PRECONDITION_FAILED = "precondition-failed"
    ABORTED = "aborted"
    INTERNAL = "internal"


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A refusal as a value.

    message: for the client, says what to do.  retry_after_s: honest wait, None when retrying does not help.
    """

    reason: RefusalReason
    message: str
    retry_after_s: float | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one forwarded request.

    status: HTTP status the client got, 0 when no head was sent.  served_address: `ip:port` that really served.
    attempts: upstream tries.  ttft_s: request start to first body byte from the engine, None when none came.
    engine_ttft_s: the same without the client's upload, None too when the answer began before the upload ended.
    duration_s: request start to the last byte.  prompt_tokens, cached_tokens, completion_tokens: from the
    engine's usage, None when it did not say.  is_cut: the answer broke after it had begun.
    is_client_gone: the client left first.  is_upstream_failure: connect error, reset or 5xx of the engine.
    """

    status: int = 0
    served_address: str = ""
    attempts: int = 1
    ttft_s: float | None = None
    engine_ttft_s: float | None = None
    duration_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    is_estimated: bool = False
    response_bytes: int = 0
    is_cut: bool = False
    is_client_gone: bool = False
    is_upstream_failure: bool = False
    flags: str = ""

    @property
    def is_prefilled(self) -> bool:
        """Whether the engine that served has worked through the prompt."""
        # A gateway of somebody else tells no first byte; an answer that ran to its end was prefilled all the same.
        is_whole = not (self.is_cut or self.is_client_gone or self.is_upstream_failure)
        return (self.ttft_s is not None or is_whole) and 0 < self.status < 400

    @property
    def is_charged(self) -> bool:
        """Whether its tenant is charged for it: an engine answered, or was at work until the client left."""
        # The body of a refusal has a first byte, too.
        is_answered = self.status == 200 or (self.ttft_s is not None and self.status < 400)
        return is_answered or bool(self.completion_tokens) or self.is_client_gone


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What was predicted of a request on its endpoint when it was sent, and what its client asked for.

    is_trusted: whether predictions may decide, or are only made and compared.  slo_*: None where the client set none.
    """

    ttft_s: float
    tpot_s: float
    is_trusted: bool = False
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
