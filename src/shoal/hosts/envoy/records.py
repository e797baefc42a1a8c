"""Access-log messages of Envoy as outcomes of requests.

Owns the reading of one gRPC access-log entry.  Whom a record belongs to is decided by the minted id that
it carries; engines' figures are input to be checked, never trusted.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from shoal.hosts.envoy.accesslog import RECORD_FIELDS, RECORD_TAG
from shoal.kernel import UNREADABLE
from shoal.pool import Outcome

# More tokens than any request can have: a figure above is a mistake or an attack.
MAX_TOKENS = 1 << 30

T = TypeVar("T")
# How Envoy writes what is not there.
_NOTHING = ("", "-")
# Envoy's short names of the response flags: https://www.envoyproxy.io (access log, RESPONSE_FLAGS).
_GONE = {"DC", "DR"}
_CUT = "upstream_reset_after_response_started"
# A tunnel (WebSocket) has no end but a closed connection.
_SWITCHED = 101
_BROKEN = {"UR", "UF", "UC", "UPE", "UT"}


class _Own(msgspec.Struct, frozen=True):
    """What the picker said of a request."""

    id: str = ""
    picker: str = ""
    refused: bool = False


class _Usage(msgspec.Struct, frozen=True):
    """What `usage` found in an answer: numbers, as far as an engine is to be believed."""

    prompt: Any = None
    completion: Any = None
    cached: Any = None
    input: Any = None
    output: Any = None
    input_cached: Any = None
    cache_read: Any = None
    cache_created: Any = None


_NOBODYS, _NO_USAGE = _Own(), _Usage()
_own_of = msgspec.json.Decoder(_Own).decode
_usage_of = msgspec.json.Decoder(_Usage).decode
_LAST_FIELD = len(RECORD_FIELDS) - 1


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request.

    picker, request_id: as the picker wrote them, "" for a request that no picker saw.  is_refused: the picker answered
    it by itself.
    """

    picker: str
    request_id: str
    outcome: Outcome
    is_refused: bool = False


def decode_records(message: Any) -> list[Record]:
    """Return the records in one StreamAccessLogsMessage."""
    return [decode_record(entry) for entry in message.http_logs.log_entry]


def decode_record(entry: Any) -> Record:
    """Return what one HTTPAccessLogEntry says.  Never raises: odd values are left out."""
    common = entry.common_properties
    fields = common.custom_tags.get(RECORD_TAG, "").split("\t", _LAST_FIELD)
    if len(fields) <= _LAST_FIELD:
        return Record(picker="", request_id="", outcome=Outcome())
    own_text, usage_text, code, served, attempts, ttft, engine_ttft, size, flags, details = fields
    own = _NOBODYS if own_text in _NOTHING else _decoded(_own_of, own_text, _NOBODYS)
    usage = _NO_USAGE if usage_text in _NOTHING else _decoded(_usage_of, usage_text, _NO_USAGE)
    prompt, cached, completion = _tokens(usage)
    status = _count(code)
    served = "" if served in _NOTHING else served
    flags = "" if flags in _NOTHING else flags
    is_gone = bool(flags) and not _GONE.isdisjoint(flags.split(","))
    duration = common.duration
    outcome = Outcome(
        status=status,
        served_address=served,
        attempts=min(_count(attempts), 1000),
        ttft_s=_span(ttft),
        engine_ttft_s=_span(engine_ttft),
        duration_s=duration.seconds + duration.nanos / 1e9,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        response_bytes=_count(size),
        # The client got the engine's head (else Envoy's own error) and not the end.  A client that leaves is no such
        # case.
        is_cut=details.startswith(_CUT) and status < 500 and status != _SWITCHED and not is_gone,
        is_client_gone=is_gone,
        is_upstream_failure=_is_failure(served, flags, status, details == "via_upstream", is_gone),
        flags=flags,
    )
    return Record(picker=own.picker, request_id=own.id, outcome=outcome, is_refused=own.refused)


def _decoded(decode: Callable[[str], T], text: str, otherwise: T) -> T:
    try:
        return decode(text)
    except (*UNREADABLE, UnicodeError):
        return otherwise


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def _span(text: str) -> float | None:
    return int(text) / 1e6 if text.isascii() and text.isdigit() and len(text) < 16 else None


def _sane(value: Any) -> int | None:
    # Also false for NaN.
    return int(value) if type(value) in (int, float) and 0 <= value <= MAX_TOKENS else None


def _tokens(usage: _Usage) -> tuple[int | None, int | None, int | None]:
    """Return prompt, cached and completion tokens; prompt includes the cached ones in every API."""
    prompt, cached, completion = _sane(usage.prompt), _sane(usage.cached), _sane(usage.completion)
    if prompt is None and (given := _sane(usage.input)) is not None:
        read = _sane(usage.cache_read)
        prompt = given + (read or 0) + (_sane(usage.cache_created) or 0)
        cached = read if read is not None else _sane(usage.input_cached)
    if completion is None:
        completion = _sane(usage.output)
    if cached is not None and (prompt is None or cached > prompt):
        cached = None
    return prompt, cached, completion


def _is_failure(served: str, flags: str, status: int, answered: bool, is_gone: bool) -> bool:
    """Whether the engine is to blame: not for what a client or the router itself ended."""
    if not served or status == _SWITCHED or is_gone:
        return False
    if answered and status >= 500:
        return True
    if not flags:
        return False
    names = flags.split(",")
    # Silence until the idle timer fires is a stalled engine when no head came (then the status is 504).
    return not _BROKEN.isdisjoint(names) or (status == 504 and "SI" in names)
