"""The flat table: fixed rows, oldest out first, one row per hash."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.prefix.sets import ID_BITS
from shoal.prefix.table import ROW_BYTES, BlockTable

KIB = 1024


def entry(stamp: int, set_id: int = 1) -> int:
    return stamp << ID_BITS | set_id


def put(table: BlockTable, hashes: np.ndarray, value: int) -> np.ndarray:
    return table.place(hashes, table.locate(hashes).buckets, value)


def hashes(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def test_what_was_placed_is_found_with_its_entry() -> None:
    table = BlockTable(16 * KIB)
    assert put(table, hashes(5, 6, 7), entry(3)).tolist() == [0, 0, 0]
    found, entries = table.find(hashes(9, 7, 5))
    assert found.tolist() == [1, 2]
    assert entries.tolist() == [entry(3)] * 2


def test_the_oldest_row_of_a_full_bucket_gives_way() -> None:
    table = BlockTable(8 * ROW_BYTES)
    for stamp in (4, 2, 9, 3, 8, 6, 5, 7):
        put(table, hashes(100 + stamp), entry(stamp))
    assert put(table, hashes(1), entry(20)).tolist() == [entry(2)]
    assert put(table, hashes(2), entry(21)).tolist() == [entry(3)]
    assert table.find(hashes(1, 2, 102, 103, 104))[0].tolist() == [0, 1, 4]


def test_hashes_that_meet_in_a_bucket_share_it() -> None:
    table = BlockTable(8 * ROW_BYTES)
    put(table, hashes(*range(1, 9)), entry(2))
    assert len(table.find(hashes(*range(1, 9)))[0]) == 8


def test_a_bucket_full_of_one_request_takes_no_more_of_it() -> None:
    table = BlockTable(8 * ROW_BYTES)
    assert len(put(table, hashes(*range(1, 21)), entry(2))) == 8
    assert len(table.find(hashes(*range(1, 21)))[0]) == 8


def test_an_erased_row_is_free() -> None:
    table = BlockTable(16 * KIB)
    put(table, hashes(5, 6), entry(3))
    table.erase(table.locate(hashes(5)).rows)
    assert table.find(hashes(5, 6))[0].tolist() == [1]


@given(st.lists(st.sets(st.integers(1, 2**64 - 1), min_size=1, max_size=60), max_size=12))
def test_no_hash_ever_has_two_rows(batches: list[set[int]]) -> None:
    table = BlockTable(64 * ROW_BYTES)
    for stamp, batch in enumerate(batches, 1):
        values = np.array(sorted(batch), np.uint64)
        place = table.locate(values)
        table.write(place.rows, entry(stamp))
        missing = np.ones(len(values), np.bool_)
        missing[place.found] = False
        table.place(values[missing], place.buckets[missing], entry(stamp))
        found, entries = table.find(values)
        assert len(np.unique(found)) == len(found)
        assert entries.tolist() == [entry(stamp)] * len(found)
