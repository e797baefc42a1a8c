import argparse
import stat
from pathlib import Path

import pytest

from shoal.cli import keys
from shoal.hosts.keys import KeyRing


def shoal(*words: str) -> int:
    parser = argparse.ArgumentParser(prog="shoal")
    keys.add_parser(parser.add_subparsers())
    args = parser.parse_args(["keys", *words])
    code = args.run(args)
    assert isinstance(code, int)
    return code


def test_a_new_key_is_printed_once_with_the_line_to_append(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("new", "alice") == 0
    first, second = capsys.readouterr().out.splitlines()
    key = first.removeprefix("key (shown only now): ")
    line = second.removeprefix("line for the keys file: ")
    path = tmp_path / "keys"
    path.write_text(line)
    assert KeyRing(path).check(f"Bearer {key}") == "alice"


def test_keys_are_appended_to_a_private_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    assert shoal("new", "alice", "--file", str(path)) == 0
    path.write_text(path.read_text().rstrip("\n"))
    assert shoal("new", "bob", "--file", str(path)) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    out = capsys.readouterr().out
    secrets = [row.removeprefix("key (shown only now): ") for row in out.splitlines() if row.startswith("key")]
    ring = KeyRing(path)
    assert [ring.check(f"Bearer {key}") for key in secrets] == ["alice", "bob"]
    assert not any(key in path.read_text() for key in secrets)
    assert shoal("check", str(path)) == 0
    assert capsys.readouterr().out == "alice: 1 key\nbob: 1 key\n"


def test_a_second_key_of_a_name_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    assert shoal("new", "alice", "--file", str(path)) == 0
    assert "keys now" not in capsys.readouterr().out
    assert shoal("new", "alice", "--file", str(path)) == 0
    assert "alice has 2 keys now" in capsys.readouterr().out


def test_nothing_is_appended_to_a_file_that_would_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    path.write_text("canary\n")
    assert shoal("new", "alice", "--file", str(path)) == 2
    assert f"{path}:1: expected NAME:SHA256" in capsys.readouterr().err
    assert path.read_text() == "canary\n"


def test_a_bad_name_or_file_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("new", "a:b") == 2
    assert "a key's name is" in capsys.readouterr().err
    bad = tmp_path / "keys"
    bad.write_text("canary\n")
    assert shoal("check", str(bad)) == 2
    error = capsys.readouterr().err
    assert f"{bad}:1: expected NAME:SHA256" in error
    assert "canary" not in error
    assert shoal("check", str(tmp_path / "missing")) == 2
    assert shoal("new", "a", "--file", str(tmp_path / "no" / "keys")) == 2
