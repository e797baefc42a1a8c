"""Who is told of whom, tried with fake workers that are real processes."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec

from tests.hosts.supervisor.test_workers import Scene, play, until


async def shared(scene: Scene, place: int) -> list[dict[str, Any]]:
    link = scene.workers.processes[place].seat.link
    assert link is not None
    return msgspec.json.decode(await link._good("GET", "/shared"), type=list[dict[str, Any]])


async def siblings(scene: Scene, place: int) -> list[str]:
    """The sockets of the siblings that a worker was told of last."""
    told = [each["peers"]["siblings"] for each in await shared(scene, place) if "peers" in each]
    return [Path(said).name for said, _ in told[-1]] if told else []


async def become(scene: Scene, place: int, wanted: list[str]) -> None:
    found: list[str] = []
    for _ in range(600):
        found = await siblings(scene, place)
        if found == wanted:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"told of {found}, not of {wanted}")


def test_workers_are_told_of_each_other_and_of_a_successor(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.serving()
        await become(scene, 0, ["s1.2.sock"])
        await become(scene, 1, ["s0.1.sock"])
        process = scene.workers.processes[1]
        assert process.child.pid is not None
        (tmp_path / "s1.2.sock").touch()
        os.kill(process.child.pid, signal.SIGKILL)
        await until(lambda: process.child.restarts == 1 and process.ready.is_set())
        await become(scene, 0, ["s1.3.sock"])
        assert not (tmp_path / "s1.2.sock").exists()

    play(tmp_path, act, count=2)


def test_a_replaced_worker_learns_from_those_at_work_before_it_is_let_in(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.serving()
        process = scene.workers.processes[1]
        assert process.child.pid is not None
        os.kill(process.child.pid, signal.SIGKILL)
        await until(lambda: process.child.restarts == 1 and process.ready.is_set())
        began = [each["begin"] for each in await shared(scene, 1) if "begin" in each]
        assert [Path(each).name for each in began[0]] == ["s0.1.sock"]

    play(tmp_path, act, count=2)


def test_a_single_worker_is_told_of_nobody_until_its_successor_comes(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.serving()
        assert await siblings(scene, 0) == []
        done = await scene.workers.upgrade(30.0)
        assert done.is_done
        began = [each["begin"] for each in await shared(scene, 0) if "begin" in each]
        assert [Path(each).name for each in began[0]] == ["s0.1.sock"]
        await become(scene, 0, [])

    play(tmp_path, act)
