"""Sessions from traces of real traffic: lengths and opaque block ids, as their publishers write them.

Owns the formats.  Mooncake (JSON lines: `timestamp` ms, `input_length`, `output_length`, `hash_ids` of 512-token
blocks, global), Azure (CSV: TIMESTAMP, ContextTokens, GeneratedTokens; no reuse), Claude Code sessions (JSON, one
file per session: 64-token `hash_ids` of its own scope, `think_time`), and TraceLab (JSON lines, one per round of an
agent: tokens in all, of which so many were cached, events with their times).  Reads no file: a host gives the bytes.
Journals of ours are `recorded`'s.
"""

import csv
import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.kernel import UNREADABLE, InvalidInput
from shoal.simulation.prompts import UNIT_TOKENS, Prompt
from shoal.simulation.sessions import Session, Turn, since_first

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


class _Asked(NamedTuple):
    """A request of a Claude Code session in its own memory: an id of a block takes 4 bytes, not 36."""

    tokens: int
    out: int
    think_s: float
    ids: npt.NDArray[np.uint32]


class _Event(msgspec.Struct):
    event_type: str = ""
    timestamp: str = ""


class _Round(msgspec.Struct):
    session_id: str
    input_tokens_total: int
    output_tokens: int
    round_index: int = 0
    provider: str = ""
    model: str = ""
    prefix_tokens: int = 0
    timing_events: list[_Event] = []


def mooncake(lines: Iterable[bytes], *, rate: float = 1.0, limit: int = 0, has_sessions: bool = False) -> list[Session]:
    """Return one session per request, at its time since the first.  rate: how much faster.  limit: rows, 0 for all.

    has_sessions: a request whose prompt continues that of an earlier one, and is longer than it and its answer, is a
    turn of the same session.  Then sessions begin `rate` times as often, and turns come as long after the first one as
    they did, but not before the answer to the one before.  Raises InvalidInput that names the line.
    """
    decoder = msgspec.json.Decoder(_MooncakeRow)
    chains: list[list[_MooncakeRow]] = []
    names: list[int] = []
    ends: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        if limit and number > limit:
            break
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except UNREADABLE as error:
            raise InvalidInput(f"line {number}: {error}") from error
        _check(row.input_length, number)
        _check(row.output_length, number, "an answer")
        if row.hash_ids and not 0 <= min(row.hash_ids) <= max(row.hash_ids) < 1 << 64:
            raise InvalidInput(f"line {number}: hash_ids must be 0 to 2**64 - 1")
        if not has_sessions or (place := _continued(row, chains, ends)) is None:
            place = len(chains)
            chains.append([])
            names.append(number)
        chains[place].append(row)
        if full := row.hash_ids[: row.input_length // _MOONCAKE_BLOCK]:
            ends[full[-1]] = place
    if has_sessions:
        since_first([row.timestamp / 1000 for chain in chains for row in chain], 1.0)
    times_s = since_first([chain[0].timestamp / 1000 for chain in chains], rate)
    return [
        Session(f"row-{number}", partial(_mooncake_turns, chain), arrives_s=at)
        for number, chain, at in zip(names, chains, times_s, strict=True)
    ]


def _continued(row: _MooncakeRow, chains: list[list[_MooncakeRow]], ends: dict[int, int]) -> int | None:
    """Return the place of the session that a row continues.  ends: of the last whole block of each, its place."""
    for block in reversed(row.hash_ids[: row.input_length // _MOONCAKE_BLOCK]):
        if block in ends:
            last = chains[ends[block]][-1]
            is_next = row.timestamp > last.timestamp and row.input_length >= last.input_length + last.output_length
            return ends.pop(block) if is_next else None
    return None


def _mooncake_turns(rows: list[_MooncakeRow]) -> Iterator[Turn]:
    for row in rows:
        prompt = _of_blocks(row.hash_ids, _MOONCAKE_BLOCK, row.input_length, 0)
        yield Turn(prompt, max(1, row.output_length), at_s=(row.timestamp - rows[0].timestamp) / 1000)


def azure(text: str, *, rate: float = 1.0, limit: int = 0) -> list[Session]:
    """Return one session per row, at its own time; no two prompts share anything, as the trace says nothing of it."""
    sessions: list[Session] = []
    times_s: list[float] = []
    for number, row in _table(text):
        if limit and len(sessions) >= limit:
            break
        try:
            at = _moment(row["TIMESTAMP"])
            tokens, out = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, ValueError, TypeError) as error:
            raise InvalidInput(f"line {number}: {error!r}") from error
        _check(tokens, number)
        _check(out, number, "an answer")
        prompt = Prompt.empty(0).extend(number, max(1, tokens))
        times_s.append(at.replace(tzinfo=UTC).timestamp())
        sessions.append(Session(f"row-{number}", partial(_turn, prompt, max(1, out))))
    times_s = since_first(times_s, rate)
    return [session._replace(arrives_s=at) for session, at in zip(sessions, times_s, strict=True)]


def _table(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Read rows with their numbers.  Raises InvalidInput that names the line."""
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    try:
        yield from enumerate(reader, 2)
    except csv.Error as error:
        raise InvalidInput(f"line {reader.line_num + 1}: {error}") from error


def claude_code(files: Iterable[bytes], *, most_think_s: float = 60.0) -> list[Session]:
    """Return one session per file; subagents' requests follow in their place.

    Block ids compare inside a session only.  most_think_s: longer pauses are cut, as nobody's cache waits for them.
    """
    decoder = msgspec.json.Decoder(_CodeSession)
    sessions = []
    for number, data in enumerate(files, 1):
        try:
            read = decoder.decode(data)
        except UNREADABLE as error:
            raise InvalidInput(f"file {number}: {error}") from error
        if read.block_size % UNIT_TOKENS or not UNIT_TOKENS <= read.block_size <= MAX_TOKENS:
            bounds = f"a multiple of {UNIT_TOKENS} up to {MAX_TOKENS}"
            raise InvalidInput(f"file {number}: block_size must be {bounds}, got {read.block_size}")
        try:
            asked = [
                _Asked(
                    each.input, min(max(1, each.out), MAX_TOKENS), each.think_time, np.array(each.hash_ids, np.uint32)
                )
                for each in _flat(read.requests)
                if 1 <= each.input <= MAX_TOKENS
            ]
        except OverflowError:
            raise InvalidInput(f"file {number}: hash_ids must be 0 to 2**32 - 1") from None
        sessions.append(Session(read.id, partial(_code_turns, asked, read.block_size, number, most_think_s)))
    return sessions


def _code_turns(asked: list[_Asked], block: int, scope: int, most_think_s: float) -> Iterator[Turn]:
    for tokens, out, think_s, ids in asked:
        yield Turn(_of_blocks(ids, block, tokens, scope), out, min(max(0.0, think_s), most_think_s))


def tracelab(lines: Iterable[bytes], *, limit: int = 0, most_think_s: float = 60.0) -> list[Session]:
    """Return one session per agent session of the trace.  limit: sessions, 0 for all.

    A round's prompt begins with all of the one before when it is longer, as an agent's context grows; when it is
    shorter, the context was cut, and it shares what the provider had cached of it.  What the first round of a session
    had in the cache is the same for all sessions of one model: its system prompt.  Pauses are from the end of an answer
    to the last tool's result or the user's message; longer ones than most_think_s are cut.  Raises InvalidInput that
    names the line.
    """
    decoder = msgspec.json.Decoder(_Round)
    found: dict[str, list[tuple[_Round, float, float]]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
            begun_s, ended_s = _times(row.timing_events)
        except (*UNREADABLE, ValueError) as error:
            raise InvalidInput(f"line {number}: {error}") from error
        _check(row.input_tokens_total, number)
        _check(row.prefix_tokens, number, "a prefix")
        _check(row.output_tokens, number, "an answer")
        if row.session_id not in found and limit and len(found) >= limit:
            continue
        found.setdefault(row.session_id, []).append((row, begun_s, ended_s))
    return [
        Session(name, partial(_rounds, sorted(rows, key=lambda each: each[0].round_index), number, most_think_s))
        for number, (name, rows) in enumerate(found.items(), 1)
    ]


def _times(events: list[_Event]) -> tuple[float, float]:
    """Return when a round was sent and when its answer ended, in seconds; 0 and 0 when it has no events."""
    moments = [
        (each.event_type, _moment(each.timestamp.replace("Z", "+00:00")).replace(tzinfo=UTC).timestamp())
        for each in events
    ]
    asked = [at for kind, at in moments if kind in ("user_message", "tool_result")]
    said = [at for kind, at in moments if kind not in ("user_message", "tool_result")]
    begun_s = max(asked, default=min(said, default=0.0))
    return begun_s, max(said, default=begun_s)


def _rounds(rows: list[tuple[_Round, float, float]], number: int, most_think_s: float) -> Iterator[Turn]:
    first = rows[0][0]
    opening = zlib.crc32(f"{first.provider} {first.model}".encode()) + (1 << 32)
    pieces: list[tuple[int, int]] = [(opening, first.prefix_tokens)]
    prompt, tokens, ended_s = _of_pieces(pieces), 0, rows[0][1]
    for place, (row, begun_s, answered_s) in enumerate(rows):
        total, reply = max(1, row.input_tokens_total), max(0, row.output_tokens)
        shared = min(prompt.tokens, total, prompt.tokens if total >= tokens else row.prefix_tokens)
        said = (number << 24) + 2 * place
        if shared < prompt.tokens:
            pieces = _first(pieces, shared)
            prompt = _of_pieces(pieces)
        asked, prompt = prompt.grow((said, total - shared), (said + 1, reply))
        pieces += [(said, total - shared), (said + 1, reply)]
        yield Turn(asked, max(1, reply), min(max(0.0, begun_s - ended_s), most_think_s), whole=prompt)
        tokens, ended_s = total, answered_s


def _first(pieces: list[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """Return what the first `tokens` tokens are made of."""
    kept = []
    for content, length in pieces:
        if tokens <= 0:
            break
        kept.append((content, min(length, tokens)))
        tokens -= length
    return kept


def _of_pieces(pieces: list[tuple[int, int]]) -> Prompt:
    prompt = Prompt.empty(0)
    for content, tokens in pieces:
        prompt = prompt.extend(content, tokens)
    return prompt


def _flat(requests: list[_CodeRequest]) -> Iterator[_CodeRequest]:
    for request in requests:
        if request.requests:
            yield from _flat(request.requests)
        else:
            yield request


def _turn(prompt: Prompt, out: int) -> Iterator[Turn]:
    yield Turn(prompt, out)


def _of_blocks(ids: Sequence[int] | npt.NDArray[np.uint32], block: int, tokens: int, scope: int) -> Prompt:
    """Return the prompt whose blocks of `block` tokens have these ids."""
    tokens = max(1, tokens)
    per_block = block // UNIT_TOKENS
    units = tokens // UNIT_TOKENS
    # Ids behind the prompt's end, as many as there may be, are none of it.
    known = np.array(ids[: -(-units // per_block)], np.uint64).repeat(per_block)[:units]
    places = np.arange(len(known), dtype=np.uint64) % np.uint64(per_block)
    content = known * np.uint64(per_block) + places + np.uint64(1)
    prompt = Prompt.empty(scope).units(content, len(known) * UNIT_TOKENS)
    return prompt.extend(1, tokens - prompt.tokens)


def _moment(text: str) -> datetime:
    """Read a time of any of the traces; all are in UTC, whether they say so or not, some to 100 nanoseconds."""
    seconds, _, rest = text.strip().partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    fraction = f".{rest[:digits][:6]:0<6}" if digits else ""
    zone = rest[digits:] if digits else ""
    return datetime.fromisoformat(seconds + fraction + zone).replace(tzinfo=None)


def _check(tokens: int, number: int, what: str = "a prompt") -> None:
    if not 0 <= tokens <= MAX_TOKENS:
        raise InvalidInput(f"line {number}: {what} of {tokens} tokens; it must be 0 to {MAX_TOKENS}")
