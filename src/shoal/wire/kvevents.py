"""KV events as vLLM and SGLang publish them: frames of ZMQ messages, MessagePack payloads, one form out of many.

Owns every form in the field: batches and events as arrays (vLLM up to 0.23, older SGLang) or maps (vLLM from 0.24,
SGLang), events packed once more as binary, hashes as numbers of either sign or as digests, both framings of a replay.
Which blocks that makes (parents, groups, adapters) is `prefix.ledger`; sequence and replay are a host's.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from shoal.kernel import UNREADABLE, InvalidInput
from shoal.pool.kvevents import KvCleared, KvEvent, KvRemoved, KvStored, Tier

MAX_PAYLOAD_BYTES = 16 << 20
"""One batch is what one engine step changed: a prompt of a million tokens is 7 MB."""
MAX_EVENTS = 1 << 17
MAX_HASHES = 1 << 17
MAX_TOKENS = 1 << 20
MAX_BLOCK_TOKENS = 1 << 16
END_OF_REPLAY = -1
"""Sequence number of the message that ends a replay."""

_ARRAY_32 = b"\xdd"
_MAX_U64 = 2**64 - 1
_MAX_NAME_CHARS = 512
_CLEARED = KvCleared()
_TIERS: dict[str | None, Tier] = {
    None: Tier.GPU,
    "GPU": Tier.GPU,
    "CPU": Tier.CPU,
    "CPU_PINNED": Tier.CPU,
    "STORAGE": Tier.DISK,
    "DISK": Tier.DISK,
    "EXTERNAL": Tier.SHARED,
    "SHARED": Tier.SHARED,
}

_Hash = int | bytes
_Hashes = Annotated[list[_Hash], Meta(min_length=1, max_length=MAX_HASHES)]
_Tokens = Annotated[list[Annotated[int, Meta(ge=0, le=2**32 - 1)]], Meta(max_length=MAX_TOKENS)]
_Name = Annotated[str, Meta(max_length=_MAX_NAME_CHARS)] | None
_Extras = Annotated[list[list[Any] | None], Meta(max_length=MAX_HASHES)] | None


# Fields stand in the order of the arrays, which is also the order of the maps: finding a key then costs least.
class _StoredRow(msgspec.Struct, tag="BlockStored", tag_field="type", array_like=True, gc=False):
    block_hashes: _Hashes
    parent_block_hash: _Hash | None = None
    token_ids: _Tokens | None = None
    block_size: Annotated[int, Meta(ge=0, le=MAX_BLOCK_TOKENS)] | None = None
    lora_id: Any = None
    medium: str | None = None
    lora_name: _Name = None
    extra_keys: _Extras = None
    group_idx: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    kv_cache_spec_kind: _Name = None


class _Stored(_StoredRow, tag="BlockStored", tag_field="type", array_like=False, gc=False):
    locality: str | None = None
    cache_salt: _Name = None


class _RemovedRow(msgspec.Struct, tag="BlockRemoved", tag_field="type", array_like=True, gc=False):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: Annotated[int, Meta(ge=0, le=2**31)] | None = None


class _Removed(_RemovedRow, tag="BlockRemoved", tag_field="type", array_like=False, gc=False):
    locality: str | None = None


class _ClearedRow(msgspec.Struct, tag="AllBlocksCleared", tag_field="type", array_like=True, gc=False):
    pass


class _Cleared(_ClearedRow, tag="AllBlocksCleared", tag_field="type", array_like=False, gc=False):
    pass


_Map = _Stored | _Removed | _Cleared
_Row = _StoredRow | _RemovedRow | _ClearedRow


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float | None
    events: Annotated[list[_Map], Meta(max_length=MAX_EVENTS)]
    rank: Any = None


class _RowBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float | None
    events: Annotated[list[_Row], Meta(max_length=MAX_EVENTS)]
    rank: Any = None


class _AnyBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float | None
    events: Annotated[list[Raw], Meta(max_length=MAX_EVENTS)]
    rank: Any = None


class _NamedBatch(msgspec.Struct, gc=False):
    events: Annotated[list[Raw], Meta(max_length=MAX_EVENTS)]
    ts: float | None = None
    data_parallel_rank: Any = None
    attn_dp_rank: Any = None


# What most messages are, decoded into our form at once.  What does not fit is read by the forms above: numbers below
# zero, adapters, other tiers.  No engine writes the names `tier`, `lora`, `extras`.  Token
# ids are looked at when they are packed, so nothing is asked of them here.
class _Usual(
    KvStored,
    frozen=True,
    gc=False,
    tag="BlockStored",
    tag_field="type",
    rename={"hashes": "block_hashes", "parent": "parent_block_hash", "tokens": "token_ids", "group": "group_idx",
            "kind": "kv_cache_spec_kind"}.get,
):  # fmt: skip
    hashes: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=MAX_HASHES)]
    parent: Annotated[int, Meta(ge=0)] | None
    tokens: Annotated[list[int], Meta(max_length=MAX_TOKENS)]
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_TOKENS)]
    group: Annotated[int, Meta(ge=0, le=2**31)] = 0
    kind: Annotated[str, Meta(max_length=_MAX_NAME_CHARS)] = ""
    medium: Literal["GPU", None] = None
    lora_id: None = None
    lora_name: None = None
    extra_keys: Annotated[list[None], Meta(max_length=MAX_HASHES)] | None = None
    locality: None = None
    cache_salt: None = None


class _UsualBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float | None
    events: Annotated[list[_Usual | _Removed | _Cleared], Meta(max_length=MAX_EVENTS)]
    rank: Any = None


_usual_batches = msgspec.msgpack.Decoder(list[_UsualBatch])
_map_batch = msgspec.msgpack.Decoder(_MapBatch)
_row_batch = msgspec.msgpack.Decoder(_RowBatch)
_any_batch = msgspec.msgpack.Decoder(_AnyBatch)
_named_batch = msgspec.msgpack.Decoder(_NamedBatch)
_map = msgspec.msgpack.Decoder(_Map)
_row = msgspec.msgpack.Decoder(_Row)
_packed = msgspec.msgpack.Decoder(bytes)
_UNREADABLE = (*UNREADABLE, ValueError, OverflowError)


class KvBatch(msgspec.Struct, frozen=True):
    """What one message says.

    ts: unix seconds of the engine's clock, 0 where it does not say.  rank: of data parallelism, None where it does not
    say.  skipped: events of unknown kinds and unreadable ones, which are not among `events`.
    """

    ts: float
    events: list[KvEvent]
    rank: int | None
    skipped: int


class KvReading(msgspec.Struct, frozen=True):
    """What several messages say together.

    events: in order.  skipped: events that are not among them, as in `KvBatch`.  unreadable: messages that are none.
    """

    events: list[KvEvent]
    skipped: int
    unreadable: int


def decode_all(payloads: Sequence[bytes]) -> KvReading:
    """Return what the payloads of one publisher say, one after the other: for many, half the cost of `decode` for each.

    Ids of tokens may be out of range, which the ledger finds.
    """
    try:
        if max(map(len, payloads), default=0) > MAX_PAYLOAD_BYTES:
            raise ValueError("a batch is too large")
        batches = _usual_batches.decode(b"".join((_ARRAY_32, len(payloads).to_bytes(4, "big"), *payloads)))
        events: list[KvEvent] = [
            event if type(event) is _Usual else _read(event)  # type: ignore[arg-type]
            for batch in batches
            for event in batch.events
        ]
        return KvReading(events, 0, 0)
    except _UNREADABLE:
        pass
    events, skipped, unreadable = [], 0, 0
    for payload in payloads:
        try:
            batch = decode(payload)
        except InvalidInput:
            unreadable += 1
        else:
            events += batch.events
            skipped += batch.skipped
    return KvReading(events, skipped, unreadable)


def decode(payload: bytes) -> KvBatch:
    """Return what one payload says, whatever form its engine writes.

    Raises InvalidInput when it is no batch at all.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InvalidInput(f"a batch of KV events has {len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}")
    batch: _MapBatch | _RowBatch
    try:
        batch = _map_batch.decode(payload)
    except _UNREADABLE:
        try:
            batch = _row_batch.decode(payload)
        except _UNREADABLE:
            return _decode_each(payload)
    skipped = 0
    try:
        events = [_stored(event) if type(event) is _Stored else _read(event) for event in batch.events]
    except ValueError:
        events = []
        for event in batch.events:
            try:
                events.append(_read(event))
            except ValueError:
                skipped += 1
    return KvBatch(batch.ts or 0.0, events, _rank(batch.rank), skipped)


def read_frames(frames: Sequence[bytes]) -> tuple[bytes, int, bytes]:
    """Return (topic, sequence, payload) of one ZMQ message.

    Takes live messages (topic, sequence, payload) and replies of a replay, which begin with an empty frame and have the
    topic (vLLM from 0.26, SGLang) or not.  The end of a replay has the sequence END_OF_REPLAY and an empty payload.
    Raises InvalidInput.
    """
    count = len(frames)
    if count == 3:
        # In a replay without topics the empty frame stands where the topic of a live message does.
        topic, number, payload = frames
    elif count == 4 and not frames[0]:
        _, topic, number, payload = frames
    else:
        raise InvalidInput(f"a message of KV events has {count} frames instead of topic, sequence and payload")
    if len(number) != 8:
        raise InvalidInput(f"the sequence number of KV events has {len(number)} bytes instead of 8")
    sequence = int.from_bytes(number, "big", signed=True)
    if sequence < END_OF_REPLAY:
        raise InvalidInput("the sequence number of KV events is out of range")
    return topic, sequence, payload


def _decode_each(payload: bytes) -> KvBatch:
    """Read event by event, so that one which cannot be read costs no other."""
    try:
        batch = _any_batch.decode(payload)
        ts, rank = batch.ts, batch.rank
        raws = batch.events
    except _UNREADABLE:
        try:
            named = _named_batch.decode(payload)
        except _UNREADABLE as error:
            # A validation error names a place and types, never a value.
            reason = str(error) if isinstance(error, msgspec.MsgspecError) else type(error).__name__
            raise InvalidInput(f"not a batch of KV events: {reason}") from None
        ts, raws = named.ts, named.events
        rank = named.data_parallel_rank if named.data_parallel_rank is not None else named.attn_dp_rank
    events: list[KvEvent] = []
    skipped = 0
    for raw in raws:
        try:
            events.append(_read(_decode_one(raw)))
        except _UNREADABLE:
            skipped += 1
    return KvBatch(ts or 0.0, events, _rank(rank), skipped)


def _decode_one(raw: Raw | bytes, *, may_be_packed: bool = True) -> _Map | _Row:
    """Return one event of any form.  Raises one of _UNREADABLE."""
    try:
        return _map.decode(raw)
    except _UNREADABLE:
        try:
            return _row.decode(raw)
        except _UNREADABLE:
            if not may_be_packed:
                raise
    return _decode_one(_packed.decode(raw), may_be_packed=False)


def _read(event: _Map | _Row) -> KvEvent:
    """Return the event in our form.  Raises ValueError when its parts do not fit together."""
    if isinstance(event, _StoredRow):
        return _stored(event)
    if isinstance(event, _RemovedRow):
        locality = event.locality if type(event) is _Removed else None
        return KvRemoved(_hashes(event.block_hashes), _tier(event.medium, locality), event.group_idx or 0)
    return _CLEARED


def _stored(event: _StoredRow) -> KvStored:
    hashes = _hashes(event.block_hashes)
    parent, tokens, block_size = event.parent_block_hash, event.token_ids or [], event.block_size or 0
    if tokens and not block_size:
        raise ValueError("tokens without a block size")
    lora = event.lora_name or ""
    if not lora and event.lora_id is not None:
        # Engines of before `lora_name`: nothing says which adapter it is, only that these are no blocks of the base.
        lora = f"#{event.lora_id}"[:_MAX_NAME_CHARS]
    locality, extras = None, event.extra_keys
    if type(event) is _Stored:
        locality = event.locality
        if event.cache_salt and parent is None:
            extras = _with_salt(extras, len(hashes), event.cache_salt)
    return KvStored(
        hashes,
        parent if parent is None or (type(parent) is int and parent >= 0) else _hash(parent),
        tokens,
        block_size,
        _TIERS.get(event.medium) or _tier(event.medium) if locality is None else _tier(event.medium, locality),
        lora,
        _extras(extras, lora, len(hashes)) if extras and any(extras) else None,
        event.group_idx or 0,
        event.kv_cache_spec_kind or "",
    )


def _hashes(raw: list[_Hash]) -> list[int]:
    try:
        if min(raw) >= 0:  # type: ignore[operator]
            return raw  # type: ignore[return-value]
    except TypeError:
        pass
    return [_hash(each) for each in raw]


def _hash(raw: _Hash) -> int:
    """The low 64 bits: SGLang's numbers are signed, digests are big-endian."""
    if isinstance(raw, int):
        return raw & _MAX_U64
    if not raw:
        raise ValueError("an empty hash")
    return int.from_bytes(raw[-8:], "big")


def _tier(medium: str | None, locality: str | None = None) -> Tier:
    if locality is not None and locality.upper() == "REMOTE":
        return Tier.SHARED
    tier = _TIERS.get(medium) or _TIERS.get(medium.upper() if medium else None)
    if tier is None:
        raise ValueError("unknown medium")
    return tier


def _with_salt(extras: list[list[Any] | None] | None, blocks: int, salt: str) -> list[list[Any] | None]:
    """SGLang's salt as vLLM writes it: among the extra keys of the first block."""
    extras = list(extras) if extras else [None] * blocks
    extras[0] = [*(extras[0] or ()), salt]
    return extras


def _extras(raw: list[list[Any] | None], lora: str, blocks: int) -> list[tuple[str, ...] | None] | None:
    """What each block depends on beside its tokens and the adapter; None when no block does on anything."""
    found = [_extra(keys, lora) if keys else None for keys in raw]
    if not any(found):
        return None
    if len(found) != blocks:
        raise ValueError("extra keys do not fit the blocks")
    return found


def _extra(keys: list[Any], lora: str) -> tuple[str, ...] | None:
    kept: list[str] = []
    for position, key in enumerate(keys):
        if isinstance(key, str):
            # The adapter comes first; a salt of the same name stands behind it.
            if position or key != lora or not lora:
                kept.append(key)
        elif isinstance(key, bytes):
            kept.append(key.hex())
        elif isinstance(key, list) and key and isinstance(key[0], str):
            # A medium and where it begins in the block, which its placeholder tokens say as well.
            kept.append(key[0])
        elif key is not None and not isinstance(key, int):
            raise ValueError("an extra key of an unknown form")
    return tuple(kept) or None


def _rank(rank: Any) -> int | None:
    return rank if type(rank) is int and 0 <= rank < 2**31 else None
