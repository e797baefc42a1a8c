"""The spare worker: it takes over from one that died, and is never older than an upgrade."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from shoal.hosts.supervisor.doors import PickerDoor
from shoal.hosts.supervisor.ledger import Ledger
from shoal.hosts.supervisor.spares import Spare
from shoal.hosts.supervisor.warm import AT_WORK, IDLE
from shoal.hosts.supervisor.workers import Workers
from tests.hosts.supervisor.pool_rig import is_gone

FAKE = "tests.hosts.supervisor.fake_worker"
WAITING = (sys.executable, "-m", "shoal.hosts.supervisor.warm", FAKE)


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():
            await asyncio.sleep(0.01)


def play(run_dir: Path, act: Callable[[Workers], Awaitable[None]]) -> None:
    door = PickerDoor(run_dir)

    def command(picker: str, incarnation: str, admin: Path) -> Sequence[str]:
        flags = [*door.flags(picker, incarnation), "--admin", str(admin), "--picker-id", picker]
        return [sys.executable, "-m", FAKE, *flags]

    async def run() -> None:
        workers = Workers(["0"], run_dir, command, door, Ledger(), {}, WAITING)
        workers.start()
        try:
            await until(lambda: workers._spare.pid is not None)
            await act(workers)
        finally:
            await workers.stop()

    asyncio.run(run())


def test_a_killed_worker_is_followed_by_the_spare_and_there_is_a_spare_again(tmp_path: Path) -> None:
    async def act(workers: Workers) -> None:
        process, spare = workers.processes[0], workers._spare.pid
        assert process.ready.is_set()
        assert spare is not None
        await until(lambda: name_of(spare) == IDLE)
        assert process.child.pid is not None
        os.kill(process.child.pid, signal.SIGKILL)
        await until(lambda: process.child.pid == spare and process.ready.is_set())
        assert name_of(spare) == AT_WORK
        assert (process.incarnation, process.child.restarts) == ("0.2", 1)
        await until(lambda: workers._spare.pid not in (None, spare))

    play(tmp_path, act)


def test_an_upgrade_does_not_use_a_spare_that_holds_the_code_of_before(tmp_path: Path) -> None:
    async def act(workers: Workers) -> None:
        spare = workers._spare.pid
        assert spare is not None
        assert (await workers.upgrade(5.0)).is_done
        assert workers.processes[0].child.pid != spare
        assert is_gone(spare)

    play(tmp_path, act)


def test_a_spare_ends_with_its_pool(tmp_path: Path) -> None:
    seen: list[int] = []

    async def act(workers: Workers) -> None:
        assert workers._spare.pid is not None
        seen.append(workers._spare.pid)

    play(tmp_path, act)
    assert is_gone(seen[0])


def test_a_spare_that_died_is_not_given_away() -> None:
    async def run() -> None:
        spare = Spare([sys.executable, "-c", "pass"], {})
        await spare.refill()
        await until(lambda: spare.pid is None)
        assert spare.take([]) is None
        await spare.drop()

    asyncio.run(run())
