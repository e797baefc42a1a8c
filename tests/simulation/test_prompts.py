"""Prompts without text: what begins alike has the same hashes, everywhere, and nothing else has."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.prefix import BLOCK_TOKENS, read_blocks
from shoal.prefix.hashing import hashes_within
from shoal.simulation import Prompt
from shoal.simulation.talks import talk

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


@given(parts, st.lists(st.tuples(st.integers(6, 9), st.integers(0, 300)), min_size=1, max_size=6), st.booleans())
def test_what_grows_at_once_is_what_comes_of_it_piece_by_piece(
    start: Parts, pieces: Parts, is_first_asked: bool
) -> None:
    grown, wanted = made(start).grow(*pieces), made(start)
    if is_first_asked:
        assert len(grown[0].chain) == grown[0].tokens // 16
    for found, piece in zip(grown, pieces, strict=True):
        wanted = wanted.extend(*piece)
        for each, same in ((found.extend(5, 40), wanted.extend(5, 40)), (found, wanted)):
            assert each.tokens == same.tokens
            assert each.hashes() == same.hashes()
            assert each.chain.tolist() == same.chain.tolist()
            assert [each.blocks(size) for size in (16, 64, 16)] == [same.blocks(size) for size in (16, 64, 16)]


def test_the_turns_of_a_talk_share_what_is_hashed() -> None:
    turns = list(talk(made([(1, 640)]), ((100, 60, 0.0), (100, 60, 1.0), (20, 10, 1.0)), 7))
    assert [turn.prompt.tokens for turn in turns] == [740, 900, 980]
    last = turns[-1].whole
    assert last is not None
    assert all(np.shares_memory(turn.prompt.chain, last.chain) for turn in turns)
    for turn, after in pairwise(turns):
        assert turn.whole is not None
        assert after.prompt.chain[: turn.whole.tokens // 16].tolist() == turn.whole.chain.tolist()


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
