"""Exact keys: the same for a prompt and for an engine's events, different for whatever must not share a cache."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.prefix.hashing import read_blocks
from shoal.prefix.tokens import TokenHasher

HASHER = TokenHasher(7)

ids = st.lists(st.integers(0, 2**32 - 1), max_size=200)
extras = st.lists(st.one_of(st.none(), st.lists(st.text(max_size=3), max_size=3).map(tuple)), max_size=6)


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, "<u4").tobytes()


def keys_of(tokens: list[int], salt: str = "", size: int = 4, **more: object) -> list[int]:
    given_extras = more.get("extras")
    assert given_extras is None or isinstance(given_extras, list)
    model, adapter = str(more.get("model", "m")), str(more.get("adapter", ""))
    raw = HASHER.hash_tokens(packed(tokens), model, adapter, salt, size, given_extras)
    return read_blocks(raw).tolist()


@given(ids, extras, st.integers(1, 20), st.integers(0, 5))
def test_a_chain_can_be_continued_at_any_block(
    tokens: list[int], given_extras: list[tuple[str, ...] | None], size: int, cut: int
) -> None:
    whole = keys_of(tokens, size=size, extras=given_extras)
    assert len(whole) == len(tokens) // size
    head = whole[:cut]
    rest = np.array(tokens[len(head) * size : len(whole) * size], np.uint32)
    parent = head[-1] if head else HASHER.seed("m", "", size)
    digests = HASHER.digests(rest, size, given_extras[len(head) :]).tolist()
    assert head + HASHER.step(parent, digests) == whole


@given(st.lists(st.integers(0, 2**32 - 1), min_size=40, max_size=40), st.integers(0, 39), st.integers(1, 2**32 - 1))
def test_one_other_token_changes_its_block_and_all_after_it_and_none_before(
    tokens: list[int], place: int, change: int
) -> None:
    others = tokens.copy()
    others[place] = (others[place] + change) % 2**32
    block = place // 4
    ones, twos = keys_of(tokens), keys_of(others)
    assert ones[:block] == twos[:block]
    assert not set(ones[block:]) & set(twos[block:])


def test_what_does_not_share_a_cache_does_not_share_a_key() -> None:
    tokens = list(range(16))
    kinds = [
        keys_of(tokens),
        keys_of(tokens, model="n"),
        keys_of(tokens, adapter="l"),
        keys_of(tokens, model="ml"),
        keys_of(tokens, size=2),
        keys_of(tokens, salt="a"),
        keys_of(tokens, salt="b"),
        keys_of(tokens, extras=[("a", "b")]),
        keys_of(tokens, extras=[("ab",)]),
        read_blocks(TokenHasher(8).hash_tokens(packed(tokens), "m", "", "", 4)).tolist(),
    ]
    seen = [key for kind in kinds for key in kind]
    assert len(set(seen)) == len(seen)


def test_b13_a_salt_given_by_the_request_is_an_extra_of_the_first_block() -> None:
    tokens = list(range(16))
    assert keys_of(tokens, salt="a") == keys_of(tokens, extras=[("a",), None])
    images = [("img",), None, ("other",)]
    assert keys_of(tokens, salt="a", extras=images) == keys_of(tokens, extras=[("a", "img"), None, ("other",)])


def test_a_very_long_prompt_is_one_chain() -> None:
    tokens = np.random.default_rng(1).integers(0, 150_000, 20_001, dtype=np.uint32)
    found = read_blocks(HASHER.hash_tokens(tokens.tobytes(), "m", "", "", 1)).tolist()
    assert found == HASHER.step(HASHER.seed("m", "", 1), HASHER.digests(tokens, 1).tolist())


@pytest.mark.parametrize("size", [0, -1, 5000])
def test_a_block_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="4096"):
        HASHER.hash_tokens(b"1234", "m", "", "", size)
