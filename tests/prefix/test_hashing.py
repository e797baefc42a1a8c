"""Block hashes: what two prompts share, they share from the first block on, and nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.prefix import BLOCK_BYTES, BlockHasher, read_blocks
from shoal.prefix.hashing import REACH

SEED = ("llama-3-8b", "", "")


def shared(first: bytes, second: bytes) -> int:
    hasher = BlockHasher(1)
    one, two = hasher.hash_prompt([first], SEED), hasher.hash_prompt([second], SEED)
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@given(st.binary(min_size=BLOCK_BYTES, max_size=5 * BLOCK_BYTES), st.binary(min_size=1, max_size=3 * BLOCK_BYTES))
def test_a_growing_conversation_keeps_all_full_blocks_it_had(prompt: bytes, turn: bytes) -> None:
    assert shared(prompt, prompt + turn) == len(prompt) // BLOCK_BYTES


@given(st.binary(min_size=4 * BLOCK_BYTES, max_size=4 * BLOCK_BYTES), st.integers(0, 4 * BLOCK_BYTES - 1))
def test_one_other_byte_changes_its_block_and_all_behind_it(prompt: bytes, at: int) -> None:
    changed = bytearray(prompt)
    changed[at] ^= 1
    one, two = (BlockHasher(1).hash_prompt([text], SEED) for text in (prompt, bytes(changed)))
    assert (one == two).tolist() == [block < at // BLOCK_BYTES for block in range(4)]


@given(st.integers(1, 600 * BLOCK_BYTES), st.integers(0, 600 * BLOCK_BYTES))
def test_of_a_long_prompt_at_most_a_quarter_of_what_is_shared_is_not_seen_as_shared(length: int, at: int) -> None:
    text = np.random.default_rng(1).bytes(length)
    changed = text[:at] + b"!" + text[at + 1 :] if at < length and text[at] != ord("!") else text
    seen = REACH[shared(text, changed)] * BLOCK_BYTES
    really = at if changed != text else length
    assert seen <= max(really, BLOCK_BYTES if length < BLOCK_BYTES and changed == text else 0)
    assert seen > really * 3 / 4 - BLOCK_BYTES


def test_a_prompt_of_a_hundred_thousand_tokens_has_few_hashes_that_cover_all_of_it() -> None:
    blocks = BlockHasher(1).hash_prompt([bytes(400_000)], SEED)
    assert len(blocks) < 200
    assert REACH[len(blocks)] > 400_000 / BLOCK_BYTES - 16


def test_only_full_blocks_count() -> None:
    assert len(BlockHasher(1).hash_prompt([bytes(3 * BLOCK_BYTES + 255)], SEED)) == 3


def test_identical_prompts_shorter_than_a_block_still_match() -> None:
    hasher = BlockHasher(1)
    assert hasher.hash_prompt([b"hi"], SEED).tolist() == hasher.hash_prompt([b"hi"], SEED).tolist()
    assert shared(b"hi", b"ho") == 0


def test_an_empty_prompt_has_no_blocks() -> None:
    assert len(BlockHasher(1).hash_prompt([], SEED)) == 0
    assert len(BlockHasher(1).hash_prompt([b"", b""], SEED)) == 0


@pytest.mark.parametrize(
    "other", [("llama-3-70b", "", ""), ("llama-3-8b", "sql", ""), ("llama-3-8b", "", "tenant"), ("llama-3-8b", "")]
)
def test_model_adapter_and_salt_part_the_caches(other: tuple[str, ...]) -> None:
    hasher = BlockHasher(1)
    text = bytes(2 * BLOCK_BYTES)
    assert not set(hasher.hash_prompt([text], SEED)) & set(hasher.hash_prompt([text], other))


def test_parts_do_not_run_into_each_other() -> None:
    hasher = BlockHasher(1)
    assert hasher.hash_prompt([b"x"], ("ab", "c")) != hasher.hash_prompt([b"x"], ("a", "bc"))


def test_another_pool_has_other_hashes() -> None:
    assert BlockHasher(1).hash_prompt([b"x"], SEED) != BlockHasher(2).hash_prompt([b"x"], SEED)


def test_hashes_are_the_same_in_every_process_and_version() -> None:
    blocks = BlockHasher(42).hash_prompt([bytes(range(256)) * 2, b"short"], ("model", "adapter", "salt"))
    assert blocks.tolist() == [3664826969156641321, 3677103796782574722, 0, 10236070172462672476]


def test_each_prompt_of_a_request_is_a_chain_of_its_own() -> None:
    hasher = BlockHasher(1)
    first, second = b"a" * 600, b"b" * 300
    both = hasher.hash_prompt([first, b"", second], SEED).tolist()
    assert both == [*hasher.hash_prompt([first], SEED).tolist(), 0, *hasher.hash_prompt([second], SEED).tolist()]


def test_the_cap_bounds_all_prompts_of_a_request_together() -> None:
    hasher = BlockHasher(1, max_blocks=5)
    blocks = hasher.hash_prompt([bytes(3 * BLOCK_BYTES), bytes(3 * BLOCK_BYTES), b"more"], SEED)
    assert np.count_nonzero(blocks) == 5
    assert len(hasher.hash_prompt([bytes(100 * BLOCK_BYTES)], SEED)) == 5


def test_token_ids_are_hashed_by_the_same_rule() -> None:
    tokens = np.arange(200, dtype="<u4")
    blocks = BlockHasher(1).hash_prompt([tokens.tobytes()], SEED)
    longer = BlockHasher(1).hash_prompt([np.arange(256, dtype="<u4").tobytes()], SEED)
    assert len(blocks) == 3
    assert blocks.tolist() == longer[:3].tolist()


def test_blocks_travel_as_bytes() -> None:
    blocks = BlockHasher(1).hash_prompt([bytes(700)], SEED)
    assert read_blocks(blocks.tobytes()).tolist() == blocks.tolist()
    with pytest.raises(ValueError):
        read_blocks(b"1234567")
