"""Whatever was seen before, the ids of a text are those that the tokenizer itself gives."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from shoal.hosts.tokens.prefixes import NODE_BYTES, PrefixedTokenizer
from tests.hosts.tokens.tiny_model import SPECIAL, TEXT, tokenizer, with_bos

BUDGET = 8 << 20
# What is special, half special, and around it.
PIECES = (
    *SPECIAL, "<|im_", "start|>", "<|", "|>", "<", ">", "|", " ", "  ", "\n", "a", "the", "fox", "é", "你", "😀",
    "\u0301", "<think>", "<stripped>", "<word>", "word", "<|im_end|>x", "ﬁ",
)  # fmt: skip


def word_pieces() -> Tokenizer:
    """Words and characters with a mark before the first of a text, as Llama 2 has it."""
    vocabulary = {"▁": 0, "<unk>": 1}
    for char in sorted(set(TEXT + "<|>_é你")):
        vocabulary.setdefault(char, len(vocabulary))
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.add_special_tokens(list(SPECIAL))
    return made


def prepending() -> Tokenizer:
    """A normaliser that puts a mark before each piece."""
    made = word_pieces()
    made.pre_tokenizer = None
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def folding() -> Tokenizer:
    """A normaliser that makes other characters, and added tokens of every kind."""
    made = tokenizer(
        AddedToken("<think>", normalized=True),
        AddedToken("<stripped>", lstrip=True, rstrip=True, normalized=False),
        AddedToken("<word>", single_word=True, normalized=False),
        AddedToken("<|im_end|>x", normalized=False),
    )
    made.normalizer = normalizers.NFKC()
    return made


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": tokenizer,
    "first": word_pieces,
    "prepend": prepending,
    "fold": folding,
}


def ids_of(made: PrefixedTokenizer, text: str, has_special_tokens: bool = False) -> list[int]:
    packed = made.encode(text, has_special_tokens=has_special_tokens)
    ids: list[int] = np.frombuffer(packed, "<u4").tolist()
    return ids


@pytest.mark.parametrize("name", MAKERS)
def test_ids_are_those_of_the_whole_text_whatever_was_seen_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.hosts.tokens.prefixes.MIN_PIECE_CHARS", 1)
    plain = MAKERS[name]()
    kept = PrefixedTokenizer(MAKERS[name](), BUDGET, 7)

    @given(st.lists(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), min_size=1, max_size=8))
    @settings(max_examples=80, deadline=None)
    def law(turns: list[str]) -> None:
        text = ""
        for turn in turns:
            text += turn
            assert ids_of(kept, text) == plain.encode(text, add_special_tokens=False).ids
        shorter = text[: len(text) // 2]
        assert ids_of(kept, shorter) == plain.encode(shorter, add_special_tokens=False).ids

    law()


def test_only_the_new_turn_of_a_conversation_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = PrefixedTokenizer(tokenizer(), BUDGET, 7)
    seen: list[int] = []
    encode = PrefixedTokenizer._encode

    def count(self: PrefixedTokenizer, text: str, *, has_special_tokens: bool = False) -> object:
        seen.append(len(text))
        return encode(self, text, has_special_tokens=has_special_tokens)

    monkeypatch.setattr(PrefixedTokenizer, "_encode", count)
    text = ""
    for turn in range(20):
        text += f"<|im_start|>user\n{TEXT * 10}{turn}<|im_end|>\n"
        kept.encode(f"{text}<|im_start|>assistant\n")
    assert len(text) > 30_000
    assert max(seen[1:]) < 3_000


def test_two_conversations_share_what_they_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = PrefixedTokenizer(tokenizer(), BUDGET, 7)
    system = f"<|im_start|>system\n{TEXT * 40}<|im_end|>\n"
    kept.encode(f"{system}<|im_start|>user\nfirst<|im_end|>\n")
    used = kept.used_bytes
    kept.encode(f"{system}<|im_start|>user\nsecond<|im_end|>\n")
    assert kept.used_bytes - used < 3 * NODE_BYTES


def test_what_is_remembered_keeps_to_its_budget_and_stays_right() -> None:
    plain = tokenizer()
    kept = PrefixedTokenizer(tokenizer(), 20 * NODE_BYTES, 7)
    for number in range(60):
        text = "".join(f"<|im_start|>{number}-{turn} {TEXT * 8}<|im_end|>\n" for turn in range(5))
        assert ids_of(kept, text) == plain.encode(text, add_special_tokens=False).ids
        assert kept.used_bytes <= 20 * NODE_BYTES
    assert kept.used_bytes > 0


def test_the_tokenizers_own_special_tokens_go_around_what_is_remembered() -> None:
    plain = with_bos(tokenizer())
    kept = PrefixedTokenizer(with_bos(tokenizer()), BUDGET, 7)
    for text in ("", "the fox", f"{TEXT * 20}<|im_end|>{TEXT}", f"{TEXT * 20}<|im_end|>{TEXT}and more"):
        assert ids_of(kept, text, has_special_tokens=True) == plain.encode(text, add_special_tokens=True).ids


def test_a_tokenizer_without_special_tokens_is_simply_asked() -> None:
    plain = tokenizer(special=())
    kept = PrefixedTokenizer(tokenizer(special=()), BUDGET, 7)
    assert ids_of(kept, TEXT) == plain.encode(TEXT, add_special_tokens=False).ids
    assert kept.used_bytes == 0


def test_limits_that_a_tokenizer_file_sets_do_not_apply() -> None:
    made = tokenizer()
    made.enable_truncation(5)
    made.enable_padding(length=50)
    assert ids_of(PrefixedTokenizer(made, BUDGET, 7), TEXT) == tokenizer().encode(TEXT, add_special_tokens=False).ids


def test_threads_may_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.hosts.tokens.prefixes.MIN_PIECE_CHARS", 1)
    plain = tokenizer()
    kept = PrefixedTokenizer(tokenizer(), 30 * NODE_BYTES, 7)
    texts = [
        "".join(f"<|im_start|>{turn % 3}{TEXT[: turn * 7]}<|im_end|>" for turn in range(size)) for size in range(30)
    ]
    expected = [plain.encode(text, add_special_tokens=False).ids for text in texts]
    wrong: list[int] = []

    def run(step: int) -> None:
        for round_ in range(60):
            number = (round_ * step) % len(texts)
            if ids_of(kept, texts[number]) != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(step,)) for step in (1, 7, 11, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert kept.used_bytes <= 30 * NODE_BYTES
