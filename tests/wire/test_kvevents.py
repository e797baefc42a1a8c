"""Payloads of KV events in every form that engines write, and bytes that are none.

The golden files named vllm-0.32 and sglang-0.5 are cut from what those engines published; the arrays of older ones and
the packed events were made after their message classes.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernel import InvalidInput
from shoal.pool.kvevents import KvCleared, KvEvent, KvRemoved, KvStored, Tier
from shoal.wire.kvevents import (
    END_OF_REPLAY,
    MAX_EVENTS,
    MAX_HASHES,
    MAX_PAYLOAD_BYTES,
    MAX_TOKENS,
    KvBatch,
    KvReading,
    decode,
    decode_all,
    read_frames,
)

GOLDEN = Path(__file__).parent / "golden"
pack = msgspec.msgpack.encode


def captured(name: str) -> Iterator[list[bytes]]:
    """The messages of a golden file: a count of frames, then each with its length before it."""
    data, at = (GOLDEN / f"{name}.bin").read_bytes(), 0
    while at < len(data):
        (count,) = struct.unpack_from(">I", data, at)
        at += 4
        frames = []
        for _ in range(count):
            (size,) = struct.unpack_from(">I", data, at)
            frames.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        yield frames


def as_document(frames: list[bytes]) -> dict[str, Any]:
    topic, sequence, payload = read_frames(frames)
    batch = decode(payload)
    events = [[type(event).__name__, msgspec.to_builtins(event)] for event in batch.events]
    head = {"topic": topic.decode(), "sequence": sequence, "ts": batch.ts, "rank": batch.rank, "skipped": batch.skipped}
    return {**head, "events": json.loads(json.dumps(events))}


def stored(**fields: Any) -> dict[str, Any]:
    """A BlockStored of two blocks as vLLM writes it."""
    return {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": list(range(8)),
        "block_size": 4,
        **fields,
    }


def one(event: Any) -> Any:
    """The single event of a batch that must be read whole."""
    batch = decode(pack([1.0, [event], 0]))
    assert batch.skipped == 0
    (event,) = batch.events
    return event


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.bin")))
def test_what_engines_published_is_read_as_it_was_before(name: str) -> None:
    expected = json.loads((GOLDEN / f"{name}.json").read_text())
    assert [as_document(frames) for frames in captured(name)] == expected


def fields_of(events: Sequence[KvEvent]) -> list[tuple[Any, ...]]:
    """What events say, whatever class of ours each is of."""
    return [msgspec.structs.astuple(event)[:9] for event in events]


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.bin")))
def test_messages_together_say_what_each_says_alone(name: str) -> None:
    payloads = [payload for frames in captured(name) if (payload := read_frames(frames)[2])]
    alone = [decode(payload) for payload in payloads]
    read = decode_all(payloads)
    assert fields_of(read.events) == [each for batch in alone for each in fields_of(batch.events)]
    assert (read.skipped, read.unreadable) == (sum(batch.skipped for batch in alone), 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_hashes": [-1, 2]},
        {"block_hashes": [b"digest", 2]},
        {"parent_block_hash": -5},
        {"medium": "cpu"},
        {"lora_name": "a"},
        {"lora_id": 3},
        {"extra_keys": [["salt"], None]},
        {"cache_salt": "salt"},
        {"locality": "REMOTE"},
        {"token_ids": None},
        {"kv_cache_spec_kind": None},
        {"group_idx": None},
    ],
)
def test_an_unusual_event_among_others_is_read_as_alone(fields: dict[str, Any]) -> None:
    events = [stored(), stored(**fields), {"type": "BlockRemoved", "block_hashes": [1]}]
    payloads = [pack([1.0, [event], 0]) for event in events]
    expected = [decode(payload).events[0] for payload in payloads]
    assert fields_of(decode_all(payloads).events) == fields_of(expected)


def test_a_message_that_cannot_be_read_costs_no_other() -> None:
    odd = pack([1.0, [stored(), {"type": "Later"}], 0])
    good = pack([1.0, [{"type": "AllBlocksCleared"}], 0])
    read = decode_all([good, b"\xc1", odd, pack(7), bytes(MAX_PAYLOAD_BYTES + 1), good])
    assert [type(event) for event in read.events] == [KvCleared, KvStored, KvCleared]
    assert (read.skipped, read.unreadable) == (1, 3)
    assert decode_all([]) == KvReading([], 0, 0)


def test_digests_and_numbers_of_one_engine_name_the_same_blocks() -> None:
    numbers = decode(next(captured("vllm-0.32-maps"))[2]).events[0]
    digests = decode(next(captured("vllm-0.32-digests-lora"))[2]).events[0]
    assert isinstance(numbers, KvStored)
    assert isinstance(digests, KvStored)
    assert digests.hashes == numbers.hashes[:2]


def test_arrays_and_maps_say_the_same() -> None:
    as_map = stored(lora_id=1, medium="CPU", lora_name="a", extra_keys=[["a"], None], group_idx=2)
    as_array = list(as_map.values())
    expected = KvStored([1, 2], None, list(range(8)), 4, Tier.CPU, "a", None, 2)
    assert one(as_map) == one(as_array) == one(pack(as_map)) == one(pack(as_array)) == expected


def test_an_array_may_end_early_or_go_on_with_fields_of_tomorrow() -> None:
    whole = ["BlockStored", [1], None, [5, 6], 2, None, "GPU", None, None, 0, "full_attention", None, "new", {"x": 1}]
    assert one(whole) == KvStored([1], None, [5, 6], 2, kind="full_attention")
    for length in range(5, len(whole)):
        assert one(whole[:length]).hashes == [1]
    assert one(["BlockStored", [1]]) == KvStored([1], None, [], 0)
    assert one(["BlockRemoved", [1]]) == KvRemoved([1])


def test_one_batch_may_mix_forms() -> None:
    events = [stored(), ["BlockRemoved", [1]], pack({"type": "AllBlocksCleared"})]
    assert [type(event) for event in decode(pack([1.0, events])).events] == [KvStored, KvRemoved, KvCleared]


def test_a_batch_may_be_a_map() -> None:
    fields = {"ts": 2.5, "events": [stored()], "later": 1}
    assert decode(pack({**fields, "data_parallel_rank": 3})) == KvBatch(2.5, [one(stored())], 3, 0)
    assert decode(pack({**fields, "attn_dp_rank": 1})).rank == 1
    assert decode(pack(fields)).rank is None


@pytest.mark.parametrize(("rank", "read"), [(0, 0), (7, 7), (None, None), (-1, None), (2**40, None), ("x", None)])
def test_a_rank_that_makes_no_sense_is_no_rank(rank: Any, read: int | None) -> None:
    assert decode(pack([1.0, [], rank])).rank == read


def test_hashes_are_the_low_64_bits_whatever_their_form() -> None:
    raw = [-1, 2**64 - 2, b"\x01", b"\xff" * 24 + (5).to_bytes(8, "big"), b"\0" * 8 + b"\x80" + b"\0" * 7]
    assert one({"type": "BlockRemoved", "block_hashes": raw}).hashes == [2**64 - 1, 2**64 - 2, 1, 5, 2**63]
    assert one(stored(parent_block_hash=-(2**63))).parent == 2**63
    assert one(stored(parent_block_hash=b"\xee" * 8 + b"\0" * 7 + b"\x09")).parent == 9


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("gpu", Tier.GPU),
        ("CPU", Tier.CPU),
        ("cpu_pinned", Tier.CPU),
        ("STORAGE", Tier.DISK),
        ("Disk", Tier.DISK),
        ("EXTERNAL", Tier.SHARED),
        ("shared", Tier.SHARED),
    ],
)
def test_media_have_a_tier_in_any_case(medium: str | None, tier: Tier) -> None:
    assert one(stored(medium=medium)).tier is tier
    assert one({"type": "BlockRemoved", "block_hashes": [1], "medium": medium}).tier is tier


def test_what_lies_remote_is_shared_and_an_unknown_medium_is_left_out() -> None:
    assert one(stored(medium="CPU", locality="REMOTE")).tier is Tier.SHARED
    assert one(stored(medium="CPU", locality="LOCAL")).tier is Tier.CPU
    assert one({"type": "BlockRemoved", "block_hashes": [1], "locality": "remote"}).tier is Tier.SHARED
    assert decode(pack([1.0, [stored(medium="TAPE"), stored()]])).skipped == 1


@pytest.mark.parametrize(
    ("fields", "extras"),
    [
        ({}, None),
        ({"extra_keys": None}, None),
        ({"extra_keys": [None, None]}, None),
        ({"extra_keys": [[], []]}, None),
        ({"extra_keys": [["a"], ["a"]], "lora_name": "a"}, None),
        ({"extra_keys": [["a", "salt"], ["a"]], "lora_name": "a"}, [("salt",), None]),
        ({"extra_keys": [["a", "a"], ["a"]], "lora_name": "a"}, [("a",), None]),
        ({"extra_keys": [["salt"], None]}, [("salt",), None]),
        ({"extra_keys": [[["img", 3]], [["img", -1], ["vid", 0]]]}, [("img",), ("img", "vid")]),
        ({"extra_keys": [["img"], ["img", "vid"]]}, [("img",), ("img", "vid")]),
        ({"extra_keys": [[b"\xab\xcd"], None]}, [("abcd",), None]),
        ({"cache_salt": "salt"}, [("salt",), None]),
        ({"cache_salt": "salt", "extra_keys": [[["img", 3]], None]}, [("img", "salt"), None]),
        ({"cache_salt": "salt", "parent_block_hash": 7}, None),
    ],
)
def test_extra_keys_have_one_form_without_the_adapter(fields: dict[str, Any], extras: Any) -> None:
    assert one(stored(**fields)).extras == extras


def test_blocks_of_an_adapter_without_a_name_are_no_blocks_of_the_base() -> None:
    assert one(stored(lora_id=4)).lora == "#4"
    assert one(stored(lora_id=4, lora_name="a")).lora == "a"


def test_blocks_without_tokens_are_read_as_such() -> None:
    placeholder = stored(token_ids=[], block_size=0, medium="CPU")
    assert one(placeholder) == KvStored([1, 2], None, [], 0, Tier.CPU)


BAD_EVENTS: list[Any] = [
    None,
    7,
    "BlockStored",
    [],
    {},
    {"type": "BlockUpdated", "block_hashes": [1]},
    ["SomethingNew", 1, 2],
    {"type": "BlockStored"},
    stored(block_hashes=[]),
    stored(block_hashes=["1"]),
    stored(block_hashes=[b""]),
    stored(token_ids=[-1, 0]),
    stored(token_ids=[2**32]),
    stored(token_ids=[1.5]),
    stored(block_size=0),
    stored(block_size=-16),
    stored(block_size=2**20),
    stored(group_idx=-1),
    stored(extra_keys=[["salt"]]),
    stored(extra_keys=[{"a": 1}, None]),
    stored(extra_keys=[[{"a": 1}], None]),
    stored(lora_name="x" * 10_000),
    stored(medium=5),
    pack(pack(stored())),
    b"\xc1",
    b"",
]


@pytest.mark.parametrize("bad", BAD_EVENTS, ids=lambda bad: repr(bad)[:60])
def test_b11_a_bad_event_is_counted_and_costs_no_other(bad: Any) -> None:
    for good in (stored(), list(stored().values())):
        batch = decode(pack([1.0, [good, bad, {"type": "BlockRemoved", "block_hashes": [1]}], 0]))
        assert batch.skipped == 1
        assert [type(event) for event in batch.events] == [KvStored, KvRemoved]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        pack(None),
        pack([]),
        pack([1.0]),
        pack(["now", []]),
        pack([1.0, {"a": 1}]),
        pack({"ts": 1.0}),
        pack([1.0, [stored()], 0])[:-5],
        pack([1.0, [stored()], 0]) + b"\0",
        pack([1.0, [None] * (MAX_EVENTS + 1)]),
        b"\x93\x01\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\xc0" * (MAX_PAYLOAD_BYTES + 1),
    ],
    ids=range(14),
)
def test_what_is_no_batch_says_so(payload: bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        decode(payload)
    assert len(str(caught.value)) < 300


def test_an_event_over_a_limit_is_left_out_alone() -> None:
    many_hashes = stored(block_hashes=[1] * (MAX_HASHES + 1))
    many_tokens = stored(token_ids=[1] * (MAX_TOKENS + 1))
    batch = decode(pack([1.0, [many_hashes, many_tokens, stored()]]))
    assert (batch.skipped, len(batch.events)) == (2, 1)
    most = decode(pack([1.0, [stored(block_hashes=[1] * MAX_HASHES, token_ids=[1] * MAX_TOKENS, block_size=8)]]))
    assert (most.skipped, len(most.events)) == (0, 1)


def test_deep_nesting_in_an_event_is_left_out() -> None:
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    assert decode(pack([1.0, [stored(extra_keys=[[deep], None]), stored()]])).skipped == 1


SEVEN = (7).to_bytes(8, "big")
END = b"\xff" * 8


@pytest.mark.parametrize(
    ("frames", "read"),
    [
        ([b"kv@m", SEVEN, b"p"], (b"kv@m", 7, b"p")),
        ([b"", SEVEN, b"p"], (b"", 7, b"p")),
        ([b"", b"kv@m", SEVEN, b"p"], (b"kv@m", 7, b"p")),
        ([b"", END, b""], (b"", END_OF_REPLAY, b"")),
        ([b"", b"", END, b""], (b"", END_OF_REPLAY, b"")),
    ],
)
def test_frames_of_live_messages_and_both_replays_are_read(frames: list[bytes], read: tuple[bytes, int, bytes]) -> None:
    assert read_frames(frames) == read


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"p"],
        [SEVEN, b"p"],
        [b"t", b"\x07", b"p"],
        [b"t", SEVEN + b"\0", b"p"],
        [b"t", b"\x80" + b"\0" * 7, b"p"],
        [b"id", b"", SEVEN, b"p"],
        [b"", b"", b"", SEVEN, b"p"],
    ],
)
def test_frames_of_another_kind_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(InvalidInput):
        read_frames(frames)


HASHES = st.one_of(st.integers(-(2**63), 2**64 - 1), st.binary(max_size=40))
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=9), st.binary(max_size=9)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=4,
)
KINDS = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])
FIELDS = st.fixed_dictionaries(
    {"type": KINDS},
    optional={
        "block_hashes": st.one_of(st.lists(HASHES, max_size=3), ANYTHING),
        "parent_block_hash": st.one_of(HASHES, ANYTHING),
        "token_ids": st.one_of(st.lists(st.integers(0, 2**32 - 1), max_size=9), ANYTHING),
        "block_size": st.one_of(st.integers(0, 64), ANYTHING),
        "medium": st.one_of(st.sampled_from(["GPU", "cpu", "DISK"]), ANYTHING),
        "lora_name": st.one_of(st.text(), ANYTHING),
        "extra_keys": st.one_of(st.lists(st.one_of(st.none(), st.lists(ANYTHING, max_size=2)), max_size=3), ANYTHING),
        "cache_salt": ANYTHING,
        "group_idx": ANYTHING,
    },
)
EVENTS = st.one_of(FIELDS, FIELDS.map(lambda fields: list(fields.values())), FIELDS.map(pack), ANYTHING)


@given(st.lists(EVENTS, max_size=4))
def test_of_any_events_each_is_read_or_counted_and_what_is_read_is_whole(events: list[Any]) -> None:
    batch = decode(pack([1.0, events, 0]))
    assert len(batch.events) + batch.skipped == len(events)
    for event in batch.events:
        if isinstance(event, KvStored | KvRemoved):
            assert event.hashes
            assert all(0 <= each < 2**64 for each in event.hashes)
        if isinstance(event, KvStored):
            assert all(0 <= token < 2**32 for token in event.tokens)
            assert event.parent is None or 0 <= event.parent < 2**64
            assert event.block_size > 0 or not event.tokens
            assert event.extras is None or len(event.extras) == len(event.hashes)


@given(st.one_of(st.binary(max_size=200), ANYTHING.map(pack)))
def test_any_bytes_are_a_batch_or_refused(payload: bytes) -> None:
    try:
        batch = decode(payload)
    except InvalidInput:
        return
    assert isinstance(batch, KvBatch)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_flipped_byte_of_a_real_payload_is_survived(at: int, value: int) -> None:
    payload = bytearray(next(captured("vllm-0.32-maps"))[2])
    payload[at % len(payload)] = value
    try:
        decode(bytes(payload))
    except InvalidInput:
        return


@given(st.lists(st.binary(max_size=10), max_size=6))
def test_any_frames_are_read_or_refused(frames: list[bytes]) -> None:
    try:
        _, sequence, _ = read_frames(frames)
    except InvalidInput:
        return
    assert sequence >= END_OF_REPLAY
