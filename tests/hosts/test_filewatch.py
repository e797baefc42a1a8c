"""Files that are followed: read again when they changed, kept as they were while they cannot be used."""

import asyncio
import logging
from pathlib import Path

import pytest

from shoal.hosts.filewatch import FollowedFiles, WatchedFile, look_every, mark_of
from shoal.hosts.logs import Log
from shoal.kernel import ConfigError


class Sum:
    """The sum of the numbers in some files, the first of which names the others."""

    def __init__(self, first: Path) -> None:
        self.first = first
        self.others: list[Path] = []
        self.value = 0
        self.readings = 0
        self.files = FollowedFiles("numbers", lambda: [self.first, *self.others], self.take, Log("test"))

    def take(self) -> None:
        self.readings += 1
        try:
            number, *names = self.first.read_text().split()
            others = [self.first.with_name(name) for name in names]
            self.value = int(number) + sum(int(other.read_text()) for other in others)
        except (OSError, ValueError) as error:
            raise ConfigError(f"no numbers: {type(error).__name__}") from None
        self.others = others


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


@pytest.fixture
def made(tmp_path: Path) -> Sum:
    (tmp_path / "a").write_text("1 b")
    (tmp_path / "b").write_text("2")
    found = Sum(tmp_path / "a")
    found.files.read()
    return found


def test_files_are_read_again_only_when_one_of_them_changed(made: Sum, tmp_path: Path) -> None:
    assert (made.value, made.readings) == (3, 1)
    assert not made.files.look()
    assert made.readings == 1
    (tmp_path / "b").write_text("40")
    assert made.files.look()
    assert (made.value, made.readings) == (41, 2)
    assert not made.files.look()


def test_a_file_of_the_same_length_put_in_its_place_is_a_change(made: Sum, tmp_path: Path) -> None:
    (tmp_path / "new").write_text("7")
    (tmp_path / "new").replace(tmp_path / "b")
    assert made.files.look()
    assert made.value == 8


def test_files_that_are_named_anew_are_followed_and_the_others_no_more(made: Sum, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("5")
    (tmp_path / "a").write_text("1  c")
    assert made.files.look()
    (tmp_path / "b").write_text("2000")
    assert not made.files.look()
    (tmp_path / "c").write_text("50")
    assert made.files.look()
    assert made.value == 51


def test_what_was_read_last_stays_and_one_refusal_is_said_once(
    made: Sum, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for text in ("x", "xx", "xxx"):
        (tmp_path / "b").write_text(text)
        assert not made.files.look()
        assert not made.files.look()
    assert (made.value, made.readings) == (3, 4)
    assert refusals(caplog) == ["numbers not reloaded, the last ones stay in use"]
    (tmp_path / "b").unlink()
    assert not made.files.look()
    assert len(refusals(caplog)) == 2, "another reason is said"
    (tmp_path / "b").write_text("4")
    assert made.files.look()
    (tmp_path / "b").unlink()
    assert not made.files.look()
    assert len(refusals(caplog)) == 3, "what comes back is said again"


def test_a_change_while_files_are_read_is_not_missed(made: Sum, tmp_path: Path) -> None:
    take = made.take

    def slow() -> None:
        take()
        if made.readings == 2:
            (tmp_path / "b").write_text("600")

    made.files = FollowedFiles("numbers", lambda: [made.first, *made.others], slow, Log("test"))
    made.files.read()
    assert made.value == 3
    assert made.files.look()
    assert made.value == 601


def test_the_first_reading_raises_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        Sum(tmp_path / "a").files.read()


def test_a_file_that_is_not_there_has_no_mark_and_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert mark_of(path) is None
    path.write_text("x")
    file = WatchedFile(path)
    assert file.is_changed()
    assert file.read() == b"x"
    assert not file.is_changed()
    path.unlink()
    assert not file.is_changed()
    path.write_text("y")
    assert file.is_changed()


def test_one_looks_until_one_is_cancelled() -> None:
    async def test() -> None:
        looked = asyncio.Event()
        following = asyncio.create_task(look_every(0.001, looked.set))
        await asyncio.wait_for(looked.wait(), 30)
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following

    asyncio.run(test())
