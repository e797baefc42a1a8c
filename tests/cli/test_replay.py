"""`shoal replay`: what it says of files that it cannot replay."""

from pathlib import Path

import pytest

from shoal.cli import main


def test_a_file_that_cannot_be_replayed_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.write_text("not a journal")
    for path, reason in (
        (tmp_path / "nope", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (other, "not a Shoal journal: the file does not begin with its magic line"),
    ):
        assert main(["replay", str(path)]) == 2
        assert capsys.readouterr().err == f"shoal: {path}: {reason}\n"


def test_the_help_is_for_users(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    page = capsys.readouterr().out
    assert "Owns" not in page
    assert "examples:" in page
