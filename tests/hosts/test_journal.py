"""The journal's files: what was appended is read back in order, over as many parts as are allowed."""

import time
from pathlib import Path

from shoal.hosts.journal import JournalWriter
from shoal.routing import Ended
from shoal.routing.journal import Opening, read


def events(path: Path) -> list[str]:
    opening, steps = read(path.read_bytes())
    assert opening.run == "run"
    return [step.event.request_id for step in steps if isinstance(step.event, Ended)]


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
        while not (writer.path(0).exists() and writer.path(0).stat().st_size) and time.monotonic() < until:
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
