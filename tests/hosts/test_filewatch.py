"""Files that are followed: read again when they changed, kept as they were while they cannot be used."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.hosts.backends import context_of, read_api_key
from shoal.hosts.direct.certificates import Certificate
from shoal.hosts.envoy import BackendTls, EnvoySettings, ListenerTls, write_certificates
from shoal.hosts.filewatch import FollowedFiles, WatchedFile, look_every, mark_of, read_small
from shoal.hosts.fleet.door import Trust
from shoal.hosts.logs import Log
from shoal.hosts.sharing import read_secret
from shoal.kernel import ConfigError
from shoal.routing.settings import Tls


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


def at_a_pipe(path: Path) -> None:
    os.mkfifo(path)


def at_a_folder(path: Path) -> None:
    path.mkdir()


def at_a_giant(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 30)


THINGS = pytest.mark.parametrize("put", [at_a_pipe, at_a_folder, at_a_giant])


@THINGS
@pytest.mark.timeout(20)
def test_what_is_put_in_the_place_of_a_file_is_refused_at_once_and_once(
    put: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "a"
    path.write_text("x")
    file = WatchedFile(path)
    file.read()
    path.unlink()
    put(path)
    assert file.is_changed()
    with pytest.raises(ConfigError, match="cannot be read: "):
        file.read()
    assert not file.is_changed(), "it is looked at again when it is another"
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink()
    path.write_text("y")
    assert file.is_changed()
    assert file.read() == b"y"


@THINGS
@pytest.mark.timeout(20)
def test_no_reader_of_small_files_waits_for_them(put: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "a"
    put(path)
    pair = ListenerTls(certificate=str(path), key=str(path))
    readers: list[Callable[[], object]] = [
        lambda: read_api_key(path),
        lambda: read_secret(path),
        lambda: context_of(BackendTls(name="t", ca=str(path))),
        lambda: Certificate(Tls(cert=str(path), key=str(path))),
        lambda: write_certificates(EnvoySettings(run_dir=str(tmp_path), port=1, pickers=(), tls=pair)),
        lambda: Trust().context(str(path)),
    ]
    for reader in readers:
        with pytest.raises((ConfigError, OSError), match=r"regular file|directory|larger than"):
            reader()


def test_a_file_that_is_given_back_its_rights_or_another_time_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("x")
    file = WatchedFile(path)
    file.read()
    path.chmod(0o600)
    assert file.is_changed()
    file.read()
    before = path.stat()
    path.write_text("y")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.is_changed(), "as long, and as old by its own word"


def test_the_swap_of_a_mounted_configmap_is_a_change(tmp_path: Path) -> None:
    for version, text in (("v1", "old"), ("v2", "new")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys").write_text(text)
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "keys").symlink_to("..data/keys")
    file = WatchedFile(tmp_path / "keys")
    assert file.read() == b"old"
    (tmp_path / "..fresh").symlink_to("v2")
    (tmp_path / "..fresh").replace(tmp_path / "..data")
    assert file.is_changed()
    assert file.read() == b"new"
    (tmp_path / "..data").unlink()
    assert not file.is_changed(), "a link that leads nowhere is no file"


def test_a_small_file_is_read_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("12345")
    assert read_small(path, 5) == b"12345"
    with pytest.raises(OSError, match="larger than the limit of 4 bytes"):
        read_small(path, 4)
