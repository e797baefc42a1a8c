"""Prompts without text: what begins alike has the same hashes, everywhere, and nothing else has."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.prefix import BLOCK_TOKENS, read_blocks
from shoal.prefix.hashing import hashes_within
from shoal.simulation import Prompt

Parts = list[tuple[int, int]]
parts = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 700)), min_size=1, max_size=6)


def made(of: Parts, seed: int = 0) -> Prompt:
    prompt = Prompt.empty(seed)
    for content, tokens in of:
        prompt = prompt.extend(content, tokens)
    return prompt


@given(parts, parts)
def test_a_longer_prompt_begins_as_the_one_that_it_grew_from(start: Parts, more: Parts) -> None:
    short, grown = made(start), made(start + more)
    assert grown.chain[: len(short.chain)].tolist() == short.chain.tolist()
    assert len(grown.chain) == grown.tokens // 16
    for size in (16, 64):
        assert grown.blocks(size)[: len(short.blocks(size))] == short.blocks(size)
        assert len(grown.blocks(size)) == grown.tokens // size
    if short.tokens >= BLOCK_TOKENS:
        shared = hashes_within(short.tokens // BLOCK_TOKENS)
        assert read_blocks(grown.hashes())[:shared].tolist() == read_blocks(short.hashes()).tolist()


@given(parts, st.integers(0, 300), st.integers(0, 300))
def test_what_is_said_and_answered_at_once_is_what_comes_of_it_in_turn(start: Parts, say: int, reply: int) -> None:
    asked, whole = made(start).exchange(8, say, 9, reply)
    one_by_one = made(start).extend(8, say)
    for found, wanted in (
        (asked, one_by_one),
        (whole, one_by_one.extend(9, reply)),
        (asked.extend(7, 40), one_by_one.extend(7, 40)),
        (whole.extend(7, 40), one_by_one.extend(9, reply).extend(7, 40)),
    ):
        assert found.tokens == wanted.tokens
        assert found.chain.tolist() == wanted.chain.tolist()
        assert found.hashes() == wanted.hashes()


def test_other_content_another_seed_or_another_order_share_nothing() -> None:
    base = made([(1, 640), (2, 640)])
    for other in (made([(2, 640), (1, 640)]), made([(1, 640), (2, 640)], seed=1), made([(3, 1280)])):
        assert not set(base.chain.tolist()) & set(other.chain.tolist())


def test_prompts_part_where_their_content_does() -> None:
    one, two = made([(1, 640), (2, 640)]), made([(1, 640), (3, 640)])
    assert (one.chain == two.chain).tolist() == [True] * 40 + [False] * 40


def test_a_short_prompt_has_one_hash_of_its_own() -> None:
    hashes = [read_blocks(made([(1, tokens)]).hashes()).tolist() for tokens in (10, 20, 40)]
    assert [len(each) for each in hashes] == [1, 1, 1]
    assert len({each[0] for each in hashes}) == 3


def test_units_of_a_trace_chain_too() -> None:
    ids = np.array([7, 8, 9, 7], np.uint64)
    prompt = Prompt.empty(0).units(ids, 64)
    assert len(set(prompt.chain.tolist())) == 4
    assert prompt.chain[:3].tolist() == Prompt.empty(0).units(ids[:3], 48).chain.tolist()
