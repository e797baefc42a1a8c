"""The KV block pool: reuse by hash, least recently released first, tail before head."""

from shoal.engine.blocks import BlockPool
from shoal.engine.hashing import hash_blocks


def test_a_released_block_is_found_again_by_its_hash() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.seal([blocks[0]], [11], 0, 1)
    pool.seal([blocks[1]], [12], 0, 1)
    pool.release(blocks)
    assert pool.num_free == 4
    assert pool.match((11, 12, 13), 3) == blocks
    assert pool.usage_ratio == 0.0


def test_a_match_stops_at_the_first_missing_block_and_at_the_limit() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.seal(blocks, (1, 2, 3), 0, 3)
    assert pool.match((1, 9, 3), 3) == blocks[:1]
    assert pool.match((1, 2, 3), 2) == blocks[:2]


def test_the_tail_of_a_request_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    pool.seal(blocks, (1, 2, 3), 0, 3)
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.match((1, 2, 3), 3) == blocks[:2]


def test_the_least_recently_released_request_is_evicted_first() -> None:
    pool = BlockPool(2)
    old, new = pool.allocate(2)
    pool.seal([old], [1], 0, 1)
    pool.seal([new], [2], 0, 1)
    pool.release([old])
    pool.release([new])
    pool.hold([old])
    pool.release([old])
    assert pool.allocate(1) == [new]
    assert pool.match((1,), 1) == [old]


def test_a_shared_block_is_free_only_when_the_last_holder_leaves() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.hold(blocks)
    pool.release(blocks)
    assert (pool.num_held, pool.references(blocks[0])) == (1, 1)
    pool.release(blocks)
    assert pool.num_held == 0


def test_a_fresh_copy_takes_the_hash_over_from_an_idle_one() -> None:
    pool = BlockPool(3)
    old = pool.allocate(1)[0]
    pool.seal([old], [7], 0, 1)
    pool.release([old])
    fresh = pool.allocate(1)[0]
    pool.seal([fresh], [7], 0, 1)
    assert pool.match((7,), 1) == [fresh]
    pool.allocate(2)
    assert pool.match((7,), 1) == [fresh], "evicting the idle copy must not forget the fresh one"


def test_the_cache_is_not_dropped_under_a_request() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.seal([blocks[0]], [5], 0, 1)
    assert pool.reset() is False
    pool.release(blocks)
    assert pool.reset() is True
    assert pool.match((5,), 1) == []


def test_a_block_hash_covers_everything_before_it() -> None:
    first = bytes(64) + b"a" * 64
    second = b"b" * 64 + b"a" * 64
    assert len(hash_blocks(first, 16)) == 2
    assert hash_blocks(first, 16)[1] != hash_blocks(second, 16)[1]
    assert hash_blocks(first, 16) == hash_blocks(first + b"tail", 16)
    assert hash_blocks(first, 16) != hash_blocks(first, 16, salt="tenant")
    assert hash_blocks(first, 32)[0] not in hash_blocks(first, 16)
