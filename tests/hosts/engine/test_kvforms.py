"""The forms of KV events: key for key as real engines send them, and all saying the same."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from shoal.engine.changes import Change, Cleared, Removed, Stored
from shoal.hosts.engine.kvforms import KvEncoder, KvForm, digest
from shoal.pool.kvevents import KvCleared, KvRemoved, KvStored, Tier
from shoal.wire.kvevents import decode
from tests.hosts.engine.kv_reader import real

BIG = 2**63 + 5
FIRST = Stored((BIG, 7), None, bytes(4 * 8), 0)
NEXT = Stored((9,), 7, bytes(4 * 4), 2)
SALTED = Stored((11, 12), None, bytes(4 * 8), 0, salt="tenant-a")
ADAPTED = Stored((13,), None, bytes(4 * 4), 0, adapter="sql")
HOSTED = Stored((7, BIG), tier=Tier.CPU)
DESCRIBED = Stored((7,), BIG, bytes(4 * 4), 1, tier=Tier.CPU)


def wire(form: KvForm, *changes: Change, has_bytes: bool = False) -> list[Any]:
    """The batch of some changes, as it stands on the wire."""
    payload = KvEncoder(form, 4, {"sql": 3}.__getitem__, has_bytes=has_bytes).encode(changes, 12.5)
    assert payload is not None
    batch: list[Any] = msgspec.msgpack.decode(payload)
    assert batch[0] == 12.5
    return batch


def shape(event: dict[str, Any]) -> list[tuple[str, object]]:
    """Keys in order, with what kind of value they have."""
    return [(key, _kind(value)) for key, value in event.items()]


def _kind(value: object) -> object:
    if isinstance(value, list):
        return ("list", *sorted({str(_kind(each)) for each in value}))
    return type(value).__name__


def first(events: Iterable[Any], **wanted: object) -> dict[str, Any]:
    return next(each for each in events if all(each.get(key) == value for key, value in wanted.items()))


@pytest.mark.parametrize(
    ("capture", "change", "has_bytes", "wanted"),
    [
        ("vllm-0.32-maps", FIRST, False, {"type": "BlockStored"}),
        ("vllm-0.32-eviction", Removed(5), False, {"type": "BlockRemoved"}),
        ("vllm-0.32-maps", Cleared(False), False, {"type": "AllBlocksCleared"}),
        ("vllm-0.32-maps", SALTED, False, {"extra_keys": [["tenant-a"], None, None]}),
        ("vllm-0.32-digests-lora", ADAPTED, True, {"lora_id": 1}),
        ("vllm-0.32-digests-lora", FIRST, True, {"lora_id": None}),
        ("vllm-0.32-offload", DESCRIBED, False, {"medium": "CPU"}),
    ],
)
def test_an_event_has_keys_order_and_types_of_a_real_vllm(
    capture: str, change: Change, has_bytes: bool, wanted: dict[str, object]
) -> None:
    theirs = first(real(capture), **wanted)
    (ours,) = wire(KvForm.VLLM_MAP, change, has_bytes=has_bytes)[1]
    assert shape(ours) == shape(theirs)


@pytest.mark.parametrize(("change", "kind"), [(FIRST, "BlockStored"), (Cleared(False), "AllBlocksCleared")])
def test_an_event_has_keys_order_and_types_of_a_real_sglang(change: Change, kind: str) -> None:
    (ours,) = wire(KvForm.SGLANG, change)[1]
    assert shape(ours) == shape(first(real("sglang-0.5-maps"), type=kind))


def test_arrays_have_all_fields_of_their_time() -> None:
    events = wire(KvForm.VLLM_ARRAY, SALTED, ADAPTED, Removed(BIG), Cleared(False))[1]
    assert events == [
        ["BlockStored", [11, 12], None, [0] * 8, 4, None, "GPU", None, [["tenant-a"], None], 0, "full_attention", None],
        ["BlockStored", [13], None, [0] * 4, 4, 3, "GPU", "sql", [["sql"]], 0, "full_attention", None],
        ["BlockRemoved", [BIG], "GPU", 0],
        ["AllBlocksCleared"],
    ]
    batch = wire(KvForm.VLLM_ARRAY_OLD, FIRST, HOSTED, Removed(BIG), Removed(7, Tier.CPU))
    assert batch[1:] == [
        [["BlockStored", [BIG - 2**64, 7], None, [0] * 8, 4, None], ["BlockRemoved", [BIG - 2**64]]],
    ]
    assert wire(KvForm.SGLANG_ARRAY, NEXT)[1] == [["BlockStored", [9], 7, [0] * 4, 4, None, "GPU"]]


def test_a_form_without_a_word_for_a_batch_sends_none() -> None:
    assert KvEncoder(KvForm.VLLM_ARRAY_OLD, 4, len).encode([HOSTED], 0.0) is None


def test_sglang_joins_neighbours_and_names_salt_and_adapter() -> None:
    events = wire(KvForm.SGLANG, FIRST, NEXT, Removed(1), Removed(2), Removed(3, Tier.CPU), SALTED, ADAPTED)[1]
    assert [each["block_hashes"] for each in events] == [[BIG - 2**64, 7, 9], [1, 2], [3], [11, 12], [13]]
    assert len(events[0]["token_ids"]) == 12
    assert [each["medium"] for each in events[1:3]] == ["GPU", "CPU_PINNED"]
    assert (events[3]["cache_salt"], events[4]["lora_name"]) == ("tenant-a", "sql")


def test_a_placeholder_names_blocks_only() -> None:
    (event,) = wire(KvForm.VLLM_MAP, HOSTED)[1]
    assert event == {
        "type": "BlockStored",
        "block_hashes": [7, BIG],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 0,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
    }


def test_a_digest_ends_in_its_number() -> None:
    assert len(digest(BIG)) == 32
    assert int.from_bytes(digest(BIG)[-8:], "big") == BIG
    assert digest(1)[:24] != digest(2)[:24]


@pytest.mark.parametrize("has_bytes", [False, True])
@pytest.mark.parametrize("form", KvForm)
def test_every_form_reads_the_same(form: KvForm, has_bytes: bool) -> None:
    changes = [FIRST, Removed(BIG), Cleared(False), SALTED, ADAPTED]
    payload = KvEncoder(form, 4, {"sql": 3}.__getitem__, has_bytes=has_bytes).encode(changes, 12.5)
    assert payload is not None
    batch = decode(payload)
    assert (batch.ts, batch.skipped) == (12.5, 0)
    assert batch.rank == (None if form is KvForm.VLLM_ARRAY_OLD else 0)
    stored, removed, cleared, salted, adapted = batch.events
    assert isinstance(stored, KvStored)
    assert (stored.hashes, stored.parent, stored.tokens, stored.block_size) == ([BIG, 7], None, [0] * 8, 4)
    assert removed == KvRemoved([BIG])
    assert cleared == KvCleared()
    assert isinstance(salted, KvStored)
    assert isinstance(adapted, KvStored)
    if form not in (KvForm.VLLM_ARRAY_OLD, KvForm.SGLANG_ARRAY):
        assert salted.extras is not None
        assert salted.extras[0] == ("tenant-a",)
        assert (adapted.lora, stored.lora) == ("sql", "")
