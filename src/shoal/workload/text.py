"""ASCII text that looks like prose and costs little to make.

Words come from a fixed vocabulary of made-up syllables, so no corpus is shipped and no text means anything.
"""

from itertools import product

import numpy as np

_ONSETS = ("b", "d", "f", "k", "l", "m", "n", "p", "r", "s", "t", "v", "st", "tr", "gl", "h")
_VOWELS = ("a", "e", "i", "o")
_CODAS = ("", "n", "r", "l", "s", "t", "m", "nd")
_SYLLABLES = tuple("".join(parts) for parts in product(_ONSETS, _VOWELS, _CODAS))
_SENTENCE_WORDS = 12


def _vocabulary() -> tuple[str, ...]:
    count = len(_SYLLABLES)
    short = _SYLLABLES[::3]
    two = tuple(_SYLLABLES[i] + _SYLLABLES[(i * 37 + 11) % count] for i in range(count))
    three = tuple(word + _SYLLABLES[(i * 61 + 5) % count] for i, word in enumerate(two[::2]))
    return short + two + three


_WORDS = _vocabulary()
_MEAN_WORD_CHARS = sum(len(word) + 1 for word in _WORDS) / len(_WORDS)


def text(rng: np.random.Generator, chars: int) -> str:
    """Return exactly `chars` ASCII characters of made-up sentences; about four characters make a token."""
    pieces: list[str] = []
    length = 0
    while length < chars:
        count = int((chars - length) / _MEAN_WORD_CHARS) + _SENTENCE_WORDS
        words = [_WORDS[i] for i in rng.integers(0, len(_WORDS), size=count).tolist()]
        for start in range(0, count, _SENTENCE_WORDS):
            sentence = " ".join(words[start : start + _SENTENCE_WORDS]).capitalize() + ". "
            pieces.append(sentence)
            length += len(sentence)
    return "".join(pieces)[:chars]
