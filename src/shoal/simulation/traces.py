"""Sessions from traces of real traffic: lengths and opaque block ids, as their publishers write them.

Owns the formats.  Mooncake (JSON lines: `timestamp` ms, `input_length`, `output_length`, `hash_ids` of 512-token
blocks, global), Azure (CSV: TIMESTAMP, ContextTokens, GeneratedTokens; no reuse), and Claude Code sessions (JSON, one
file per session: 64-token `hash_ids` of its own scope, `think_time`).  Reads no file: a host gives the bytes.
"""

import csv
import io
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import partial

import msgspec
import numpy as np

from shoal.kernel import InvalidInput
from shoal.simulation.prompts import UNIT_TOKENS, Prompt
from shoal.simulation.sessions import Session, Turn

MAX_TOKENS = 4_000_000
"""Longest prompt that is believed."""

_MOONCAKE_BLOCK = 512


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class _CodeRequest(msgspec.Struct):
    t: float = 0.0
    type: str = ""
    input: int = msgspec.field(default=0, name="in")
    out: int = 0
    hash_ids: list[int] = []
    think_time: float = 0.0
    requests: list["_CodeRequest"] = []


class _CodeSession(msgspec.Struct):
    id: str
    block_size: int = 64
    requests: list[_CodeRequest] = []


def mooncake(lines: Iterable[bytes], *, rate: float = 1.0, limit: int = 0) -> list[Session]:
    """Return one session per request, at its own time.  rate: how much faster than recorded.  limit: rows, 0 for all.

    Raises InvalidInput that names the line.
    """
    decoder = msgspec.json.Decoder(_MooncakeRow)
    sessions = []
    for number, line in enumerate(lines, 1):
        if limit and number > limit:
            break
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InvalidInput(f"line {number}: {error}") from error
        _check(row.input_length, number)
        made = partial(_blocks_once, tuple(row.hash_ids), _MOONCAKE_BLOCK, row.input_length, row.output_length, 0)
        sessions.append(Session(f"row-{number}", made, arrives_s=row.timestamp / 1000 / rate))
    return sessions


def azure(text: str, *, rate: float = 1.0, limit: int = 0) -> list[Session]:
    """Return one session per row, at its own time; no two prompts share anything, as the trace says nothing of it."""
    sessions: list[Session] = []
    start: datetime | None = None
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
        if limit and len(sessions) >= limit:
            break
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            tokens, out = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, ValueError, TypeError) as error:
            raise InvalidInput(f"line {number}: {error!r}") from error
        _check(tokens, number)
        start = start or at
        prompt = Prompt.empty(0).extend(number, max(1, tokens))
        arrives_s = (at - start).total_seconds() / rate
        sessions.append(Session(f"row-{number}", partial(_turn, prompt, max(1, out)), arrives_s=arrives_s))
    return sessions


def claude_code(files: Iterable[bytes], *, most_think_s: float = 60.0) -> list[Session]:
    """Return one session per file; subagents' requests follow in their place.

    Block ids compare inside a session only.  most_think_s: longer pauses are cut, as nobody's cache waits for them.
    """
    decoder = msgspec.json.Decoder(_CodeSession)
    sessions = []
    for number, data in enumerate(files, 1):
        try:
            read = decoder.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InvalidInput(f"file {number}: {error}") from error
        if read.block_size % UNIT_TOKENS or read.block_size < UNIT_TOKENS:
            raise InvalidInput(f"file {number}: block_size must be a multiple of {UNIT_TOKENS}, got {read.block_size}")
        sessions.append(Session(read.id, partial(_code_turns, read, number, most_think_s)))
    return sessions


def _code_turns(read: _CodeSession, scope: int, most_think_s: float) -> Iterator[Turn]:
    for request in _flat(read.requests):
        if request.input < 1 or request.input > MAX_TOKENS:
            continue
        prompt = _of_blocks(tuple(request.hash_ids), read.block_size, request.input, scope)
        yield Turn(prompt, max(1, request.out), min(max(0.0, request.think_time), most_think_s))


def _flat(requests: list[_CodeRequest]) -> Iterator[_CodeRequest]:
    for request in requests:
        if request.requests:
            yield from _flat(request.requests)
        else:
            yield request


def _blocks_once(ids: tuple[int, ...], block: int, tokens: int, out: int, scope: int) -> Iterator[Turn]:
    yield Turn(_of_blocks(ids, block, tokens, scope), max(1, out))


def _turn(prompt: Prompt, out: int) -> Iterator[Turn]:
    yield Turn(prompt, out)


def _of_blocks(ids: tuple[int, ...], block: int, tokens: int, scope: int) -> Prompt:
    """Return the prompt whose blocks of `block` tokens have these ids."""
    tokens = max(1, tokens)
    per_block = block // UNIT_TOKENS
    units = tokens // UNIT_TOKENS
    known = np.array(ids, np.uint64).repeat(per_block)[:units]
    places = np.arange(len(known), dtype=np.uint64) % np.uint64(per_block)
    content = known * np.uint64(per_block) + places + np.uint64(1)
    prompt = Prompt.empty(scope).units(content, len(known) * UNIT_TOKENS)
    return prompt.extend(1, tokens - prompt.tokens)


def _check(tokens: int, number: int) -> None:
    if not 0 <= tokens <= MAX_TOKENS:
        raise InvalidInput(f"line {number}: a prompt of {tokens} tokens; the limit is {MAX_TOKENS}")
