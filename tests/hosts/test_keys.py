import asyncio
import hashlib
import logging
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.hosts.keys import KeyRing, new_key, parse_keys
from shoal.kernel import ConfigError


def line_of(name: str, key: str) -> str:
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}\n"


def ring_of(path: Path, text: str) -> KeyRing:
    path.write_text(text)
    return KeyRing(path)


def test_a_new_key_is_let_in_under_its_name(tmp_path: Path) -> None:
    key, line = new_key("alice")
    ring = ring_of(tmp_path / "keys", f"# people\n\n{line}\n")
    assert ring.check(f"Bearer {key}") == "alice"
    assert ring.check(None, key) == "alice"
    assert key not in line
    assert new_key("alice")[0] != key


def test_both_headers_are_read_and_the_first_good_one_counts(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "keys", line_of("a", "key-a") + line_of("b", "key-b"))
    assert ring.check("bearer  key-a ") == "a"
    assert ring.check("Bearer wrong", "key-b") == "b"
    assert ring.check("Bearer key-a", "key-b") == "a"
    assert ring.check("Basic key-a", None) is None


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer x", "key-a", "Bearer key-a,key-b", "Bearer " + "k" * 100_000]
)
def test_what_is_no_known_key_is_not_let_in(tmp_path: Path, header: str | None) -> None:
    ring = ring_of(tmp_path / "keys", line_of("a", "key-a"))
    assert ring.check(header) is None
    assert ring.check(None, None if header == "key-a" else header) is None


@given(st.text())
def test_any_header_text_is_answered(text: str) -> None:
    ring = KeyRing.__new__(KeyRing)
    ring._table = {}
    assert ring.check("Bearer " + text, text) is None


def test_a_name_may_have_two_keys_so_that_one_can_be_replaced(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "keys", line_of("a", "old") + line_of("a", "new"))
    assert (ring.check("Bearer old"), ring.check("Bearer new"), len(ring)) == ("a", "a", 2)


@pytest.mark.parametrize(
    "bad", ["canary-raw-key", "canary:abc", ":" + "0" * 64, "a b:" + "0" * 64, "a:" + "0" * 64 + " ", "a:" + "g" * 64]
)
def test_a_malformed_line_is_named_by_number_and_never_shown(bad: str) -> None:
    text = f"# first\n{line_of('a', 'key')}{bad}x\n" if "0" not in bad else f"# first\n{line_of('a', 'key')}{bad}0\n"
    with pytest.raises(ConfigError) as caught:
        parse_keys(text.encode(), "keys")
    assert caught.value.line == 3
    assert str(caught.value).startswith("keys:3: expected NAME:SHA256")
    assert "canary" not in str(caught.value)


def test_the_same_key_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match="keys:2: the same key as in line 1"):
        parse_keys((line_of("a", "key") + line_of("b", "key")).encode(), "keys")


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing(tmp_path / "missing")
    with pytest.raises(ConfigError, match="not UTF-8"):
        parse_keys(b"\xff\xfe", "keys")


def test_the_file_is_followed_and_a_broken_edit_keeps_the_last_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    ring = ring_of(path, line_of("a", "key-a"))

    def replace(text: str) -> None:
        (tmp_path / "fresh").write_text(text)
        os.replace(tmp_path / "fresh", path)

    async def until(is_in: bool, header: str) -> None:
        end = time.monotonic() + 20
        while (ring.check(header) is not None) is not is_in:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)

    async def test() -> None:
        watch = asyncio.create_task(ring.watch())
        await asyncio.sleep(0.1)
        replace(line_of("a", "key-a") + line_of("b", "key-b"))
        await until(True, "Bearer key-b")
        replace(line_of("a", "key-a") + "canary-key-pasted-raw\n")
        end = time.monotonic() + 20
        while "keys not reloaded" not in caplog.text:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        assert ring.check("Bearer key-b") == "b"
        replace("")
        await until(False, "Bearer key-a")
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)

    with caplog.at_level(logging.INFO, logger="shoal"):
        asyncio.run(test())
    assert "canary" not in caplog.text
    assert "every request will be refused" in caplog.text
