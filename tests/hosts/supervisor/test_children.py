"""Children of the supervisor, tried with small real processes."""

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from shoal.hosts.supervisor.backoff import Backoff
from shoal.hosts.supervisor.children import Child, describe_exit


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", textwrap.dedent(code)]


def quick() -> Backoff:
    return Backoff(first_s=0.01, longest_s=0.02)


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await scene()

    asyncio.run(run())


def test_a_crashed_child_is_started_again_and_its_last_words_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []
    code = "import sys; print('out of memory', file=sys.stderr); sys.exit(3)"
    child = Child("engine-0", lambda: python(code), backoff=quick(), pass_line=shown.append)

    async def scene() -> None:
        child.start()
        await until(lambda: child.restarts >= 2)
        await child.stop()

    with caplog.at_level("WARNING", logger="shoal"):
        play(scene)
    assert shown[:2] == ["out of memory", "out of memory"]
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    assert fields[0]["child"] == "engine-0"
    assert fields[0]["ended"] == "exit 3"
    assert fields[0]["last_line"] == "out of memory"


def test_a_child_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    child = Child("engine-0", lambda: [str(tmp_path / "missing")], backoff=quick())

    async def scene() -> None:
        child.start()
        await until(lambda: child.restarts >= 2)
        assert not child.is_running
        await child.stop()

    play(scene)


def test_each_line_of_stdout_reaches_its_reader_even_when_it_is_huge() -> None:
    lines: list[str] = []
    code = "print('ready'); print('x' * 200_000); print('no newline', end='', flush=True); import time; time.sleep(60)"
    child = Child("engine-0", lambda: python(code), on_line=lines.append)

    async def scene() -> None:
        child.start()
        await until(lambda: sum(map(len, lines)) >= 200_000)
        await child.stop()

    play(scene)
    assert lines[0] == "ready"
    assert sum(line.count("x") for line in lines) == 200_000
    assert lines[-1] == "no newline"


def test_stop_lets_a_child_end_by_itself() -> None:
    lines: list[str] = []
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), sys.exit(0)))
        print("ready", flush=True)
        time.sleep(60)
    """
    child = Child("picker-0", lambda: python(code), on_line=lines.append)

    async def scene() -> None:
        child.start()
        await until(lambda: "ready" in lines)
        await child.stop()

    play(scene)
    assert lines == ["ready", "drained"]
    assert child.restarts == 0


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    lines: list[str] = []
    code = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(60)
    """
    child = Child("picker-0", lambda: python(code), on_line=lines.append)
    pids: list[int] = []

    async def scene() -> None:
        child.start()
        await until(lambda: "ready" in lines)
        pids.append(child.pid or 0)
        await child.stop(grace_s=0.1)

    play(scene)
    assert pids[0] > 0
    assert not is_alive(pids[0])


def test_stop_during_the_wait_between_two_starts_returns_at_once() -> None:
    child = Child("picker-0", lambda: python("raise SystemExit(1)"), backoff=Backoff(first_s=60.0, longest_s=60.0))
    ended: list[str] = []

    async def scene() -> None:
        child._on_exit = lambda _: ended.append("ended")
        child.start()
        await until(lambda: bool(ended))
        await asyncio.wait_for(child.stop(), 20.0)

    play(scene)
    assert child.restarts == 0


def test_the_child_is_told_to_its_owner_at_each_start_and_end() -> None:
    told: list[str] = []

    async def started(child: Child) -> None:
        told.append(f"start {child.pid is not None}")

    child = Child(
        "picker-0",
        lambda: python("import time; time.sleep(0.2)"),
        backoff=quick(),
        on_start=started,
        on_exit=lambda child: told.append("exit"),
    )

    async def scene() -> None:
        child.start()
        await until(lambda: told.count("exit") >= 2)
        await child.stop()

    play(scene)
    assert told[:4] == ["start True", "exit", "start True", "exit"]


@pytest.fixture
def orphanage(tmp_path: Path) -> Iterator[Path]:
    """A file into which a parent writes the pid of its child; whatever is left of it is killed."""
    path = tmp_path / "pid"
    yield path
    with contextlib.suppress(OSError, ValueError):
        os.kill(int(path.read_text()), signal.SIGKILL)


def test_children_die_with_a_parent_that_was_killed(orphanage: Path) -> None:
    code = f"""
        import asyncio, pathlib, sys, time
        from shoal.hosts.supervisor.children import Child
        async def main():
            child = Child("engine-0", lambda: [sys.executable, "-S", "-c", "import time; time.sleep(120)"])
            child.start()
            while child.pid is None:
                await asyncio.sleep(0.01)
            pathlib.Path({str(orphanage)!r}).write_text(str(child.pid))
            await asyncio.sleep(120)
        asyncio.run(main())
    """

    async def scene() -> None:
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(code))
        try:
            await until(lambda: orphanage.exists() and orphanage.read_text() != "")
            pid = int(orphanage.read_text())
            assert is_alive(pid)
        finally:
            parent.kill()
            await parent.wait()
        await until(lambda: not is_alive(pid))

    play(scene)


def test_an_exit_is_described_in_words() -> None:
    assert describe_exit(1) == "exit 1"
    assert describe_exit(-9) == "signal SIGKILL"
    assert describe_exit(None) == "never started"
