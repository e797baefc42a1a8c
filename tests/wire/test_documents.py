"""YAML of strangers is read in bounded time, and what it does not say plainly is refused with its line."""

import pytest

from shoal.kernel import ConfigError
from shoal.wire.documents import MAX_DEPTH, compose, plain, read_document


def laughs(levels: int) -> str:
    """A mapping of aliases that stands for 9 ** levels values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


def test_a_few_lines_of_aliases_cannot_stand_for_billions_of_values() -> None:
    assert read_document(laughs(4), "f")["a3"][8][8][8][8] == "x"
    with pytest.raises(ConfigError, match="stands for more than 1,000,000 values"):
        compose(laughs(40), "f")


@pytest.mark.parametrize("text", ["a: " + "[" * 100 + "]" * 100, "a: " + "[" * 100_000, "a: &a [*a]"])
def test_what_is_nested_too_deep_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"nested too deep|not YAML"):
        read_document(text, "f")


def test_what_is_as_deep_as_may_be_is_read() -> None:
    value = read_document("a: " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1), "f")["a"]
    for _ in range(MAX_DEPTH - 2):
        (value,) = value
    assert value == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", "f:3: a: duplicate key, first in line 1"),
        ("a: 1\n---\na: 2\n", "f:3: holds 2 documents"),
        ("- a\n", "f:1: a document must be a mapping"),
        ("? [a]\n: 1\n", "a key must be a plain string"),
        ("a: !!bool maybe\n", "f:1: cannot be read"),
        ("b: 1\na: {c: !!int ''}\n", "f:2: cannot be read"),
        ("a: !!timestamp x\n", "cannot be read"),
        ("a: 2026-13-40\n", "month must be in 1..12"),
        ("a: !!python/object:os.system x\n", "could not determine a constructor"),
        ("a: .inf\n", "f: a: must be a finite number, got inf"),
        ("a: [{b: .nan}]\n", "f: a[0].b: must be a finite number, got nan"),
        ("a: 1.0e+999\n", "f: a: must be a finite number"),
        ("a: !!omap [b: .inf]\n", "must be a finite number, got inf"),
        ("a: !!pairs [b: [.nan]]\n", "must be a finite number, got nan"),
        ("a: !!set {.inf}\n", "must be a finite number, got inf"),
        ("!!set {a, b}\n", "f:1: a document must be a mapping"),
        ("!!str {=: a}\n", "f:1: a document must be a mapping"),
        ("a: 1" + "0" * 5000, "cannot be read"),
    ],
)
def test_what_is_not_plain_is_one_line_that_says_where(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_document(text, "f")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_merges_are_followed_where_they_may_stand() -> None:
    text = "base: &base {a: 1, b: 2}\nmore:\n  <<: *base\n  b: 3\n"
    assert read_document(text, "f")["more"] == {"a": 1, "b": 3}
    with pytest.raises(ConfigError, match="merge keys"):
        compose(text, "f")


def test_an_empty_file_is_an_empty_document() -> None:
    assert read_document("", "f") == {}
    assert read_document("# nothing\n", "f") == {}
    (root,) = compose("a: 1\n---\n---\n", "f")
    assert plain(root) == {"a": 1}


def test_a_nul_character_is_an_error_of_its_line() -> None:
    with pytest.raises(ConfigError, match="x:2: a text must have no NUL character"):
        compose('a: 1\nb: {c: ["ok", "p\\0q"]}\n', "x")
    with pytest.raises(ConfigError, match="NUL"):
        compose('"k\\0": 1\n', "x")
