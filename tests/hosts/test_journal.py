"""The journal's files: what was appended is read back in order, over as many parts as are allowed."""

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.hosts import journal
from shoal.hosts.journal import JournalWriter
from shoal.routing import Ended
from shoal.routing.journal import Opening, read


def events(path: Path) -> list[str]:
    opening, steps = read(path.read_bytes())
    assert opening.run == "run"
    return [step.event.request_id for step in steps if isinstance(step.event, Ended)]


def is_begun(path: Path) -> bool:
    """Whether anything was written there: the file is made a moment before."""
    return path.exists() and path.stat().st_size > 0


def test_every_step_is_read_back_in_order_after_close(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "j", Opening(1, "", False, 0, "run"), max_bytes=1 << 20, max_files=2)
    for number in range(500):
        writer.append(float(number), Ended(f"r{number}"), [])
    writer.close()
    assert events(writer.path(0)) == [f"r{number}" for number in range(500)]
    assert not writer.path(1).exists()


def test_a_file_is_a_journal_before_anything_happened(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "j", Opening(1, "", False, 0, "run"), max_bytes=1 << 20, max_files=2)
    try:
        until = time.monotonic() + 30.0
        while not is_begun(writer.path(0)) and time.monotonic() < until:
            time.sleep(0.001)
        assert events(writer.path(0)) == []
    finally:
        writer.close()


def test_a_full_file_is_followed_by_the_next_and_the_last_ends_the_recording(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "j", Opening(1, "", False, 0, "run"), max_bytes=2_000, max_files=2)
    for number in range(500):
        writer.append(float(number), Ended(f"r{number}"), [])
    writer.close()
    seen = events(writer.path(0)) + events(writer.path(1))
    assert seen == [f"r{number}" for number in range(len(seen))]
    assert 50 < len(seen) < 500
    assert not writer.path(2).exists()
    assert oct(writer.path(0).stat().st_mode)[-3:] == "600"


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Disk:
    """A disk that can be full: it takes a few bytes of what is written, and then nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.refused = 0
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, descriptor: int, data: memoryview, at: int) -> int:
        if not self.is_full:
            return self._pwrite(descriptor, data, at)
        self.refused += 1
        if self.refused % 2 and len(data) > 7:
            return self._pwrite(descriptor, data[:7], at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_after_a_full_disk_it_goes_on_without_a_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(monkeypatch)
    writer = JournalWriter(tmp_path, "j", Opening(1, "", False, 0, "run"), max_bytes=4_000, max_files=9)
    writer.append(0.0, Ended("r0"), [])
    until(lambda: is_begun(writer.path(0)) and events(writer.path(0)) == ["r0"])
    disk.is_full = True
    for number in range(1, 300):
        writer.append(float(number), Ended(f"r{number}"), [])
    until(lambda: disk.refused > 5)
    assert events(writer.path(0)) == ["r0"]
    disk.is_full = False
    writer.append(300.0, Ended("r300"), [])
    writer.close()
    parts = [writer.path(part) for part in range(9) if writer.path(part).exists()]
    assert [name for part in parts for name in events(part)] == [f"r{number}" for number in range(301)]
    said = [record.message for record in caplog.records if record.name == "shoal.journal"]
    assert len(said) == 2
    assert "No space left on device" in said[0]
    assert "goes on" in said[1]


@pytest.mark.parametrize("name", ["MAX_QUEUED_FRAMES", "MAX_QUEUED_BYTES"])
def test_a_disk_that_stays_full_costs_bounded_memory_and_leaves_whole_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setattr(journal, name, 40)
    disk = Disk(monkeypatch)
    writer = JournalWriter(tmp_path, "j", Opening(1, "", False, 0, "run"), max_bytes=1 << 20, max_files=2)
    writer.append(0.0, Ended("r0"), [])
    until(lambda: is_begun(writer.path(0)) and events(writer.path(0)) == ["r0"])
    disk.is_full = True
    for number in range(1, 500):
        writer.append(float(number), Ended(f"r{number}"), [])
        if number == 1:
            until(lambda: disk.refused > 1)
    until(lambda: not writer._thread.is_alive())
    assert not writer._frames
    assert events(writer.path(0)) == ["r0"]
    (last,) = [record for record in caplog.records if "for good" in record.message]
    assert last.levelno == logging.ERROR
    assert "the disk takes nothing" in last.message
    writer.close()


def test_a_folder_that_takes_no_file_yet_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    (folder / "j.journal").mkdir()
    writer = JournalWriter(folder, "j", Opening(1, "", False, 0, "run"), max_bytes=1 << 20, max_files=2)
    writer.append(0.0, Ended("r0"), [])
    until(lambda: writer._is_stuck)
    (folder / "j.journal").rmdir()
    until(lambda: writer.path(0).is_file() and events(writer.path(0)) == ["r0"])
    writer.close()
