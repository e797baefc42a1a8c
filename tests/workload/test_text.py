"""Text is ASCII, as long as asked, and the same for the same seed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.workload import text


@given(seed=st.integers(0, 2**32), chars=st.integers(0, 5_000))
def test_text_has_exactly_the_length_that_was_asked_and_is_ascii(seed: int, chars: int) -> None:
    made = text(np.random.default_rng(seed), chars)
    assert len(made) == chars
    assert made.isascii()


@given(seed=st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_text(seed: int) -> None:
    assert text(np.random.default_rng(seed), 400) == text(np.random.default_rng(seed), 400)


def test_two_texts_of_one_stream_differ_from_their_first_block() -> None:
    rng = np.random.default_rng(1)
    assert text(rng, 400)[:64] != text(rng, 400)[:64]


def test_text_looks_like_sentences() -> None:
    made = text(np.random.default_rng(3), 2_000)
    sentences = made.split(". ")
    assert len(sentences) > 10
    assert all(sentence[:1].isupper() for sentence in sentences if sentence)
    assert 2.0 < np.mean([len(word) for word in made.split()]) < 9.0
