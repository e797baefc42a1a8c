"""What latency a client asks for, read from its headers.

Owns the names and the bounds.  Such a header is a wish for the client's own request, so it needs no trust.
"""

from shoal.pool import Request

SLO_TTFT_HEADER = "x-llm-d-slo-ttft-ms"
SLO_TPOT_HEADER = "x-llm-d-slo-tpot-ms"
_MAX_MS = 86_400_000.0
_MAX_CHARS = 20


def slo_s(request: Request, header: str) -> float | None:
    """Return the milliseconds of `header` in seconds, None where it says nothing, or nothing between 0 and a day."""
    text = request.headers.get(header, "")
    if not text or len(text) > _MAX_CHARS:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value / 1000.0 if 0.0 < value <= _MAX_MS else None
