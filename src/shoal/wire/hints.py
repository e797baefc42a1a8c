"""What an agent says of its request beyond the API: the answer's length, how urgent it is, that it will be back.

Owns the names and the bounds; what is out of bounds is as if it were not there.  All of it is a claim, which the router
sees only where the configuration trusts it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from shoal.kernel import UNREADABLE
from shoal.pool.request import Hints

PRIORITY_HEADER = "x-shoal-priority"
OUTPUT_HEADER = "x-shoal-expected-output-tokens"
RETURN_HEADER = "x-shoal-returns-within-ms"
HINT_HEADERS = (PRIORITY_HEADER, OUTPUT_HEADER, RETURN_HEADER)

MAX_PRIORITY = 1_000_000
MAX_OUTPUT_TOKENS = 1 << 20
MAX_RETURN_MS = 3_600_000
_MAX_CHARS = 12


class _AgentHints(msgspec.Struct, gc=False):
    """`nvext.agent_hints`, as Dynamo's clients send it.  osl: expected output tokens."""

    priority: Any = None
    osl: Any = None


class _Extension(msgspec.Struct, gc=False):
    agent_hints: _AgentHints | None = None


_DECODER = msgspec.json.Decoder(_Extension)


def read_hints(headers: Mapping[str, str], extension: Raw | None = None) -> Hints | None:
    """Return the hints of a request, None where it has none.  extension: the body's `nvext`; headers go first."""
    said = _agent_hints(extension)
    priority = _number(headers.get(PRIORITY_HEADER), -MAX_PRIORITY, MAX_PRIORITY)
    output = _number(headers.get(OUTPUT_HEADER), 1, MAX_OUTPUT_TOKENS)
    return_ms = _number(headers.get(RETURN_HEADER), 1, MAX_RETURN_MS)
    if said is not None:
        priority = _number(said.priority, -MAX_PRIORITY, MAX_PRIORITY) if priority is None else priority
        output = _number(said.osl, 1, MAX_OUTPUT_TOKENS) if output is None else output
    if priority is None and output is None and return_ms is None:
        return None
    returns_within_s = None if return_ms is None else return_ms / 1000.0
    return Hints(priority=priority, output_tokens=output, returns_within_s=returns_within_s)


def _agent_hints(extension: Raw | None) -> _AgentHints | None:
    if not extension:
        return None
    try:
        return _DECODER.decode(extension).agent_hints
    except UNREADABLE:
        return None


def _number(value: Any, least: int, most: int) -> int | None:
    """A whole number between the bounds, also as text; None for anything else."""
    if isinstance(value, str):
        text = value.strip()
        if len(text) > _MAX_CHARS or not text.removeprefix("-").isdecimal():
            return None
        value = int(text)
    return value if type(value) is int and least <= value <= most else None
