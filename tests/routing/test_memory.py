"""An engine whose KV cache is full makes requests wait, and the default profile counts that wait."""

from collections import Counter

from tests.routing.script import Pool

SMALL, LARGE = "10.0.0.0:8000", "10.0.0.1:8000"


def pool_of_two(small_blocks: int) -> Pool:
    """Two engines that are known to be equally fast; the cache of the second is large."""
    pool = Pool(2)
    for number in range(40):
        pool.send(f"warm {number}").finish(
            prompt_tokens=640, cached_tokens=0, ttft_s=0.06, duration_s=2.6, completion_tokens=128
        )
        pool.now += 0.1
    for id, blocks in (("e0", small_blocks), ("e1", 100_000)):
        pool.load(id, waiting=0, running=0, kv_usage_ratio=0.0, num_blocks=blocks, block_size_tokens=16)
    return pool


def targets(pool: Pool, count: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for number in range(count):
        pool.now += 0.2
        found[pool.send(f"unique at {pool.now} {number}").target] += 1
    return found


def test_an_endpoint_gets_no_more_than_its_cache_holds_while_others_have_room() -> None:
    # 4,800 tokens are five prompts of 640 tokens with answers of 256.
    small = targets(pool_of_two(300), 40)
    assert 5 <= small[SMALL] <= 8
    large = targets(pool_of_two(100_000), 40)
    assert 18 <= large[SMALL] <= 22


def test_what_leaves_makes_room_again() -> None:
    pool = pool_of_two(300)
    sent = [pool.send(f"first {number}") for number in range(40)]
    assert sum(each.target == SMALL for each in sent) < 12
    done: Counter[str] = Counter()
    for each in sent:
        done[each.target] += 1
        ttft_s = 0.06 * done[each.target]
        each.finish(prompt_tokens=640, cached_tokens=0, ttft_s=ttft_s, completion_tokens=128, duration_s=3.0)
    assert targets(pool, 8)[SMALL] >= 3


def test_an_engine_that_says_requests_wait_for_memory_is_avoided_until_it_says_otherwise() -> None:
    pool = pool_of_two(100_000)
    assert set(targets(pool, 4)) == {SMALL, LARGE}
    pool.load("e0", waiting=1, running=1, kv_usage_ratio=0.97)
    assert targets(pool, 6) == {LARGE: 6}
    # What waits for its turn is in the books already.
    pool.load("e0", waiting=1, running=1, kv_usage_ratio=0.5)
    assert targets(pool, 6)[SMALL] == 6
