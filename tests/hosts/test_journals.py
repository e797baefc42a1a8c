"""A directory of journals: old ones give way to an allowance, those that are being written and foreign files never."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.hosts.journal import JournalWriter
from shoal.hosts.journals import Allowance, Removed, open_part, prune, stem_of
from shoal.routing import Ended
from shoal.routing.journal import MAGIC, Opening, read


def ended(folder: Path, age: int, *sizes: int) -> list[Path]:
    """The files of a run that ended, written so long ago, with a part of each size."""
    paths = []
    for part, size in enumerate(sizes):
        suffix = f".{part}" if part else ""
        path = folder / f"{stem_of('0', f'{age:08x}')}{suffix}.journal"
        path.write_bytes(MAGIC + b"x" * (size - len(MAGIC)))
        os.utime(path, (1_000_000 - age, 1_000_000 - age + part))
        paths.append(path)
    return paths


@contextmanager
def writing(folder: Path, run: str, allowance: Allowance | None = None) -> Iterator[JournalWriter]:
    """A writer whose file is there."""
    writer = JournalWriter(
        folder, stem_of("1", run), Opening(1, "", False, 0, run), max_bytes=2_000, max_files=3, allowance=allowance
    )
    try:
        until(lambda: writer.path(0).exists() and writer.path(0).stat().st_size > 0)
        yield writer
    finally:
        writer.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_runs_written_longest_ago_go_until_the_bytes_of_all_are_allowed(tmp_path: Path) -> None:
    runs = [ended(tmp_path, age, 600, 400) for age in (1, 2, 3, 4)]
    assert prune(tmp_path, Allowance(4_000, 100)) == Removed()
    assert prune(tmp_path, Allowance(3_999, 100)) == Removed(1, 1_000)
    assert prune(tmp_path, Allowance(1_500, 100)) == Removed(2, 2_000)
    assert left(tmp_path) == {path.name for path in runs[0]}


def test_runs_are_bounded_in_number_too(tmp_path: Path) -> None:
    newest, *_ = [ended(tmp_path, age, 20) for age in range(1, 50)]
    assert prune(tmp_path, Allowance(1 << 30, 1)) == Removed(48, 48 * 20)
    assert left(tmp_path) == {newest[0].name}


def test_a_run_is_as_old_as_the_last_of_its_parts(tmp_path: Path) -> None:
    long_run, short_run = ended(tmp_path, 9, 50, 50), ended(tmp_path, 5, 50)
    os.utime(long_run[1], (1_000_000, 1_000_000))
    prune(tmp_path, Allowance(1 << 30, 1))
    assert left(tmp_path) == {path.name for path in long_run}
    assert not short_run[0].exists()


def test_a_run_that_goes_on_counts_and_stays_however_little_is_allowed(tmp_path: Path) -> None:
    old = ended(tmp_path, 1, 100)
    with writing(tmp_path, "aaaaaaaa") as writer:
        for number in range(100):
            writer.append(float(number), Ended(f"r{number}"), [])
        until(lambda: writer.path(1).exists() and writer.path(1).stat().st_size > 0)
        os.utime(writer.path(0), (0, 0))
        assert prune(tmp_path, Allowance(1, 1)) == Removed(1, 100)
        assert not old[0].exists()
        assert writer.path(0).exists()
        assert writer.path(1).exists()
    assert prune(tmp_path, Allowance(1, 1)).runs == 1
    assert left(tmp_path) == set()


def test_a_run_whose_journal_is_full_stays_while_its_process_runs(tmp_path: Path) -> None:
    with writing(tmp_path, "aaaaaaaa") as writer:
        number = 0
        while writer._thread.is_alive():
            writer.append(float(number), Ended(f"r{number}"), [])
            number += 1
            time.sleep(0.001)
        assert prune(tmp_path, Allowance(1, 1)) == Removed()
        assert read(writer.path(0).read_bytes())


@pytest.mark.parametrize(
    "name",
    [
        "picker-0-1a2b3c4d.journal.gz",
        "my-picker-0-1a2b3c4d.journal",
        "picker-0-1A2B3C4D.journal",
        "picker-0-1a2b3c4d.0.journal",
        "picker-0-1a2b3c4d.journal\n",
        "picker-0-.journal",
        "j.journal",
        "notes",
    ],
)
def test_what_is_called_otherwise_is_not_touched(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(MAGIC + b"x" * 100)
    assert prune(tmp_path, Allowance(1, 1)) == Removed()
    assert left(tmp_path) == {name}


def test_what_does_not_begin_as_a_journal_is_not_touched_nor_is_the_rest_of_its_run(tmp_path: Path) -> None:
    first, second = ended(tmp_path, 1, 100, 100)
    second.write_bytes(b"a photograph" * 10)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(MAGIC)
    (tmp_path / f"{stem_of('0', 'bbbbbbbb')}.journal").symlink_to(elsewhere)
    (tmp_path / f"{stem_of('0', 'cccccccc')}.journal").mkdir()
    os.mkfifo(tmp_path / f"{stem_of('0', 'dddddddd')}.journal")
    before = left(tmp_path)
    assert prune(tmp_path, Allowance(1, 1)) == Removed()
    assert left(tmp_path) == before
    assert first.exists()


def test_what_is_no_journal_takes_no_room_from_those_that_are(tmp_path: Path) -> None:
    (mine,) = ended(tmp_path, 1, 100)
    giant = tmp_path / f"{stem_of('0', 'bbbbbbbb')}.journal"
    giant.write_bytes(b"a film")
    os.truncate(giant, 1 << 40)
    (tmp_path / f"{stem_of('0', 'cccccccc')}.journal").mkdir()
    assert prune(tmp_path, Allowance(1_000, 1)) == Removed()
    assert mine.exists()
    assert giant.exists()


def test_a_process_that_ended_before_it_wrote_leaves_nothing_for_ever(tmp_path: Path) -> None:
    empty = tmp_path / f"{stem_of('0', 'eeeeeeee')}.journal"
    empty.touch()
    os.utime(empty, (0, 0))
    ended(tmp_path, 1, 100)
    assert prune(tmp_path, Allowance(1 << 30, 1)) == Removed(1, 0)
    assert not empty.exists()


def test_a_file_that_is_removed_as_it_is_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"{stem_of('0', 'ffffffff')}.journal"
    lock = fcntl.flock
    removals = [path.unlink]

    def late(descriptor: int, operation: int) -> None:
        if removals:
            removals.pop()()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    descriptor = open_part(path)
    try:
        os.write(descriptor, MAGIC)
        assert path.read_bytes() == MAGIC
    finally:
        os.close(descriptor)


def test_a_writer_that_begins_makes_room_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shoal.journal")
    ended(tmp_path, 1, 700), ended(tmp_path, 2, 700)
    with writing(tmp_path, "aaaaaaaa", Allowance(1_000, 100)) as writer:
        assert left(tmp_path) == {writer.path(0).name, f"{stem_of('0', f'{1:08x}')}.journal"}
    assert [record.message for record in caplog.records] == ["journals of earlier runs removed: 1, of 700 bytes"]


def test_without_an_allowance_all_stay(tmp_path: Path) -> None:
    for age in range(5):
        ended(tmp_path, age, 100)
    with writing(tmp_path, "aaaaaaaa"):
        assert len(left(tmp_path)) == 6
