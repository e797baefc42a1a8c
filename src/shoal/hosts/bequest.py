"""What a worker that is replaced knew of its requests, in a file for those who ask about them later.

Owns the file: one explanation a line as JSON, the latest first, within a byte budget.  It holds no prompt text; only
its user can read it, and it goes with the run directory.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.kernel import UNREADABLE

SUFFIX = ".bequest"
MAX_BYTES = 8 << 20

_json = msgspec.json.Encoder()


def path_of(admin_socket: Path) -> Path:
    """Return where the worker with this admin socket leaves it."""
    return admin_socket.with_suffix(SUFFIX)


def write(path: Path, explanations: Iterable[Mapping[str, Any]], max_bytes: int = MAX_BYTES) -> int:
    """Write explanations, the latest first, until the next one would not fit; returns how many.  Raises OSError."""
    lines, size = [], 0
    for each in explanations:
        line = _json.encode(each) + b"\n"
        size += len(line)
        if size > max_bytes:
            break
        lines.append(line)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.writelines(lines)
    return len(lines)


def find(path: Path, request_id: str) -> dict[str, Any] | None:
    """Return the latest explanation of a request by its own or its client's id; None when there is none, or no file."""
    try:
        data = path.read_bytes() if request_id else b""
    except OSError:
        return None
    wanted = _json.encode(request_id)
    at = data.find(wanted)
    while at >= 0:
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        found = _read(data[data.rfind(b"\n", 0, at) + 1 : end])
        if request_id in (found.get("request_id"), found.get("client_id")):
            return found
        at = data.find(wanted, end)
    return None


def _read(line: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
    except UNREADABLE:
        return {}
    return found
