from hypothesis import given
from hypothesis import strategies as st

from shoal.prefix import BLOCK_TOKENS, Match
from shoal.prefix.match import Run

SETS = st.sets(st.integers(0, 69), min_size=1, max_size=40)


@given(st.lists(st.tuples(SETS, st.integers(1, 50)), max_size=3), st.integers(0, 4_000))
def test_what_is_held_is_told_in_blocks_and_tokens(stretches: list[tuple[set[int], int]], prompt_tokens: int) -> None:
    runs = [Run(sum(1 << slot for slot in slots), blocks, 1) for slots, blocks in stretches]
    match = Match(200, runs, 70)
    held = [sum(blocks for slots, blocks in stretches if slot in slots) for slot in range(70)]
    assert match.blocks.tolist() == held == [match.held(slot) for slot in range(70)]
    assert match.tokens(prompt_tokens).tolist() == [min(blocks * BLOCK_TOKENS, prompt_tokens) for blocks in held]
