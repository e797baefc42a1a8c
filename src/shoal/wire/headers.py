"""Facts that stand in a request's headers, under llm-d's present and older names.

Owns the names of inbound control headers.  Which of them a client may send at all is decided at the door by the
data plane; what they mean is decided by the router.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

MAX_ID_CHARS = 256
"""Longer identities are cut: they become keys of tables that live for minutes."""

SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")
TENANT_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
NO_RETRY_HEADER = "x-shoal-no-retry"

KEPT_HEADERS = (
    ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"),
    ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
    ("x-session-token", ""),
    ("prefer", ""),
    ("epp-profile", ""),
)
"""(name under which the value is kept, older name or "")."""


MAX_KEPT_CHARS = 4096
"""What is kept of a header: these go into plugins' tables and into the journal."""


COOKIE = "cookie:"


_TELLING = frozenset((*SESSION_HEADERS, *TENANT_HEADERS, *OBJECTIVE_HEADERS, NO_RETRY_HEADER, *sum(KEPT_HEADERS, ())))


class HeaderFacts(NamedTuple):
    """What the headers say; "" where they say nothing.  kept: goes to `Request.headers`."""

    client_id: str
    tenant_id: str
    session_id: str
    objective: str
    retry_allowed: bool
    kept: dict[str, str]


def together(name: str, before: str, value: str) -> str:
    """Return the value of a field that came twice (RFC 9110, 5.3; cookies: RFC 9113, 8.2.3)."""
    return f"{before}; {value}" if name == "cookie" else f"{before}, {value}"


def joined(fields: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return fields by name, those of one name as one list."""
    found: dict[str, str] = {}
    for name, value in fields:
        found[name] = together(name, found[name], value) if name in found else value
    return found


def read_headers(headers: Mapping[str, str], extra: tuple[str, ...] = ()) -> HeaderFacts:
    """Read `headers` (lower-case names).  extra: further names to keep; `cookie:NAME` keeps a digest of one cookie.

    A cookie's value is a secret of its user's session, and what is kept stands in journals: the digest tells sessions
    apart as well.
    """
    client_id = headers.get("x-request-id", "")[:MAX_ID_CHARS]
    if not extra and _TELLING.isdisjoint(headers):
        return HeaderFacts(client_id, "", "", "", True, {})
    kept: dict[str, str] = {}
    for name, older in KEPT_HEADERS:
        value = headers.get(name) or (headers.get(older) if older else None)
        if value:
            kept[name] = value[:MAX_KEPT_CHARS]
    for name in extra:
        value = _cookie(headers, name[len(COOKIE) :]) if name.startswith(COOKIE) else headers.get(name)
        if value:
            kept[name] = value[:MAX_KEPT_CHARS]
    return HeaderFacts(
        client_id,
        _first(headers, TENANT_HEADERS),
        _first(headers, SESSION_HEADERS),
        _first(headers, OBJECTIVE_HEADERS),
        headers.get(NO_RETRY_HEADER, "").strip().lower() not in ("true", "1", "yes"),
        kept,
    )


def _cookie(headers: Mapping[str, str], wanted: str) -> str:
    """The digest of one cookie's value, "" when it is not there."""
    for pair in headers.get("cookie", "").split(";"):
        name, _, value = pair.strip().partition("=")
        if name == wanted and value.strip():
            return hashlib.sha256(value.strip().encode()).hexdigest()[:32]
    return ""


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    for name in names:
        value = headers.get(name)
        if value:
            return value.strip()[:MAX_ID_CHARS]
    return ""
