"""How changes of the cache look on the wire: the forms of KV events that vLLM and SGLang have sent over time.

Owns field order, optional fields, the type of a hash, and which changes share an event.  Frames and sockets are
`kvpublisher`'s.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum

import msgspec
import xxhash

from shoal.engine.changes import Change, Cleared, Removed, Stored
from shoal.hosts.engine.tokens import ids
from shoal.pool.kvevents import Tier

_KIND = "full_attention"
_MEDIA = {Tier.GPU: "GPU", Tier.CPU: "CPU"}
_SGLANG_MEDIA = {Tier.GPU: "GPU", Tier.CPU: "CPU_PINNED"}
_DIGEST_SALTS = (1, 2, 3)

Event = dict[str, object] | list[object]


class KvForm(StrEnum):
    """Whose events these are.

    VLLM_MAP: since 0.24, maps.  VLLM_ARRAY: up to 0.23, positional arrays of all fields.  VLLM_ARRAY_OLD: the first
    ones, signed hashes, no field after `lora_id`, no rank, no tier but the GPU's.  SGLANG: maps with SGLang's own keys.
    SGLANG_ARRAY: its older releases.
    """

    VLLM_MAP = "vllm-map"
    VLLM_ARRAY = "vllm-array"
    VLLM_ARRAY_OLD = "vllm-array-old"
    SGLANG = "sglang"
    SGLANG_ARRAY = "sglang-array"

    @property
    def is_sglang(self) -> bool:
        """Whether SGLang's rules hold: signed hashes, neighbours merged, an emptied cache told at once."""
        return self in (KvForm.SGLANG, KvForm.SGLANG_ARRAY)

    @property
    def is_array(self) -> bool:
        """Whether events are positional; engines of that time also answer a replay without the topic."""
        return self in (KvForm.VLLM_ARRAY, KvForm.VLLM_ARRAY_OLD, KvForm.SGLANG_ARRAY)


class _RemovedRun(msgspec.Struct, frozen=True):
    """Blocks that left one tier one after the other."""

    hashes: tuple[int, ...]
    tier: Tier


class KvEncoder:
    """Makes payloads of one form.

    block_size: tokens a block.  lora_id: the number of an adapter's name.  has_bytes: whether hashes are 32 bytes that
    end in the number, as with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0.
    """

    __slots__ = ("_block_size", "_encoder", "_form", "_has_bytes", "_is_signed", "_lora_id", "_rank")

    def __init__(
        self, form: KvForm, block_size: int, lora_id: Callable[[str], int], *, has_bytes: bool = False, rank: int = 0
    ) -> None:
        self._form = form
        self._block_size = block_size
        self._lora_id = lora_id
        self._has_bytes = has_bytes
        self._is_signed = form.is_sglang or form is KvForm.VLLM_ARRAY_OLD
        self._rank = rank
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, changes: Iterable[Change], now_s: float) -> bytes | None:
        """Return the payload of one batch, None when the form has no word for any of it.  now_s: unix seconds."""
        if self._form is KvForm.VLLM_ARRAY_OLD:
            changes = [each for each in changes if isinstance(each, Cleared) or each.tier is Tier.GPU]
        events = [self._event(change) for change in (_merge(changes) if self._form.is_sglang else changes)]
        if not events:
            return None
        batch = [now_s, events] if self._form is KvForm.VLLM_ARRAY_OLD else [now_s, events, self._rank]
        return self._encoder.encode(batch)

    def _event(self, change: Change | _RemovedRun) -> Event:
        if isinstance(change, Stored):
            fields = self._stored(change)
        elif isinstance(change, Cleared):
            fields = {"type": "AllBlocksCleared"}
        else:
            fields = self._removed(change)
        return list(fields.values()) if self._form.is_array else fields

    def _stored(self, run: Stored) -> dict[str, object]:
        adapter = run.adapter or None
        is_named_only = not run.tokens
        fields: dict[str, object] = {
            "type": "BlockStored",
            "block_hashes": [self._hash(each) for each in run.hashes],
            "parent_block_hash": None if run.parent is None else self._hash(run.parent),
            "token_ids": ids(run.tokens),
            "block_size": 0 if is_named_only else self._block_size,
            "lora_id": None if adapter is None else self._lora_id(adapter),
        }
        if self._form is KvForm.VLLM_ARRAY_OLD:
            return fields
        if self._form.is_sglang:
            fields["medium"] = _SGLANG_MEDIA[run.tier]
            if self._form is KvForm.SGLANG:
                fields |= {"cache_salt": run.salt} if run.salt else {}
                fields |= {"lora_name": adapter} if adapter else {}
            return fields
        fields["medium"] = _MEDIA[run.tier]
        fields["lora_name"] = adapter
        has_extras = run.tier is Tier.GPU
        if self._form is KvForm.VLLM_ARRAY:
            kind = None if is_named_only else _KIND
            extras = _extra_keys(run) if has_extras else None
            return fields | {"extra_keys": extras, "group_idx": 0 if kind else None, "kind": kind, "window": None}
        if has_extras:
            fields["extra_keys"] = _extra_keys(run)
        if not is_named_only:
            fields |= {"group_idx": 0, "kv_cache_spec_kind": _KIND}
        return fields

    def _removed(self, change: Removed | _RemovedRun) -> dict[str, object]:
        hashes = change.hashes if isinstance(change, _RemovedRun) else (change.block_hash,)
        fields: dict[str, object] = {"type": "BlockRemoved", "block_hashes": [self._hash(each) for each in hashes]}
        if self._form is KvForm.VLLM_ARRAY_OLD:
            return fields
        if self._form.is_sglang:
            return fields | {"medium": _SGLANG_MEDIA[change.tier]}
        return fields | {"medium": _MEDIA[change.tier], "group_idx": 0}

    def _hash(self, number: int) -> int | bytes:
        if self._has_bytes:
            return digest(number)
        return number - 2**64 if self._is_signed and number >= 2**63 else number


def digest(number: int) -> bytes:
    """Return the 32 bytes whose low 64 bits are `number`; the rest is made of it."""
    low = number.to_bytes(8, "big")
    return b"".join([xxhash.xxh3_64_digest(low, salt) for salt in _DIGEST_SALTS]) + low


def _extra_keys(run: Stored) -> list[list[str] | None]:
    """Return what each block depends on beside its tokens: the adapter, and on a prompt's first block its salt."""
    shared = [run.adapter] if run.adapter else []
    first = [*shared, run.salt] if run.salt and run.start == 0 else shared
    return [(first if position == 0 else shared) or None for position in range(len(run.hashes))]


def _merge(changes: Iterable[Change]) -> list[Change | _RemovedRun]:
    """Join runs that follow each other, and removals of one tier."""
    out: list[Change | _RemovedRun] = []
    for change in changes:
        last = out[-1] if out else None
        if isinstance(change, Removed):
            if isinstance(last, _RemovedRun) and last.tier is change.tier:
                out[-1] = _RemovedRun((*last.hashes, change.block_hash), change.tier)
            else:
                out.append(_RemovedRun((change.block_hash,), change.tier))
        elif (
            isinstance(change, Stored)
            and isinstance(last, Stored)
            and change.parent == last.hashes[-1]
            and (change.tier, change.adapter, change.salt) == (last.tier, last.adapter, last.salt)
        ):
            out[-1] = last._replace(hashes=last.hashes + change.hashes, tokens=last.tokens + change.tokens)
        else:
            out.append(change)
    return out
