"""What is cached behind the last hash that matched."""

from shoal.prefix import BLOCK_TOKENS, Tail
from shoal.prefix.tail import open_tokens


def test_what_is_open_is_the_rest_of_the_span_that_did_not_match() -> None:
    assert open_tokens(3, 10_000) == 1 * BLOCK_TOKENS
    assert open_tokens(20, 10_000) == 4 * BLOCK_TOKENS
    assert open_tokens(20, 20 * BLOCK_TOKENS + 100) == 100
    assert open_tokens(256, 100_000) == 16 * BLOCK_TOKENS


def test_nothing_is_open_where_nothing_matched_or_all_did() -> None:
    assert open_tokens(0, 10_000) == 0
    assert open_tokens(10, 10 * BLOCK_TOKENS) == 0
    assert open_tokens(10, 9 * BLOCK_TOKENS) == 0


def test_until_an_answer_is_seen_nothing_is_thought_to_be_there() -> None:
    assert Tail().tokens(20, 10_000) == 0


def test_the_share_that_engines_find_is_learned_and_follows_a_change() -> None:
    tail = Tail()
    for _ in range(200):
        tail.learn(20, 10_000, 20 * BLOCK_TOKENS + 192.0)
    assert 180 <= tail.tokens(20, 10_000) <= 192
    for _ in range(200):
        tail.learn(20, 10_000, 20 * BLOCK_TOKENS)
    assert tail.tokens(20, 10_000) < 10


def test_more_than_the_whole_of_it_is_never_there() -> None:
    tail = Tail()
    for _ in range(200):
        tail.learn(20, 10_000, 9_000.0)
    assert tail.tokens(20, 10_000) <= 4 * BLOCK_TOKENS


def test_an_engine_that_dropped_what_was_matched_teaches_nothing() -> None:
    tail = Tail()
    for _ in range(200):
        tail.learn(20, 10_000, 20 * BLOCK_TOKENS + 256.0)
    before = tail.tokens(20, 10_000)
    for _ in range(200):
        tail.learn(20, 10_000, 0.0)
    assert tail.tokens(20, 10_000) == before
