"""Worker slots, tried with fake workers that are real processes."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.hosts.admin import PoolPicture, Snapshot
from shoal.hosts.extproc.worker import parser
from shoal.hosts.supervisor.answers import PoolAnswers
from shoal.hosts.supervisor.doors import PickerDoor, service_socket
from shoal.hosts.supervisor.ledger import Ledger
from shoal.hosts.supervisor.link import WorkerLink
from shoal.hosts.supervisor.pulse import Pulse
from shoal.hosts.supervisor.workers import Workers, worker_command
from shoal.pool import Endpoint, EndpointState, Signals
from shoal.routing.events import EndpointChanged, EndpointJoined, Event, LoadSeen

FAKE = Path(__file__).with_name("fake_worker.py")
A = Endpoint(id="a", address="10.0.0.1:8000")
FLEET: list[Event] = [EndpointJoined(A, EndpointState.READY), LoadSeen("a", Signals(running=1.0))]


class Scene:
    """Slots of fake workers in a directory of their own."""

    def __init__(self, run_dir: Path, count: int = 1) -> None:
        self.run_dir = run_dir
        self.ledger = Ledger()
        self.lost: list[str] = []
        self.extra: list[str] = []
        self.door = PickerDoor(run_dir)
        pickers = [str(number) for number in range(count)]
        self.workers = Workers(pickers, run_dir, self.command, self.door, self.ledger)
        self.workers.on_lost(self.lost.append)
        self.answers = PoolAnswers(self.workers.seats, PoolPicture, bequests=self.workers.bequests)

    def command(self, picker: str, incarnation: str, admin: Path) -> Sequence[str]:
        flags = [*self.door.flags(picker, incarnation), "--admin", str(admin), "--picker-id", picker]
        return [sys.executable, str(FAKE), *flags, *self.extra]

    def tell(self, *events: Event) -> None:
        self.ledger.apply(events, asyncio.get_running_loop().time())
        self.workers.tell(events)

    async def serving(self) -> None:
        await until(lambda: all(process.ready.is_set() for process in self.workers.processes))

    def answering_pid(self, picker: str = "0") -> int:
        """Who answers on the path that Envoy dials; 0 for nobody."""
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(service_socket(self.run_dir, picker)))
                return int(client.recv(16))
            except (OSError, ValueError):
                return 0

    async def told(self, place: int = 0) -> list[str]:
        link = self.workers.processes[place].seat.link
        assert link is not None
        answer = await link._good("GET", "/told")
        return [event["type"] for event in msgspec.json.decode(answer, type=list[dict[str, Any]])]


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def play(tmp_path: Path, act: Callable[[Scene], Awaitable[None]], count: int = 1) -> Scene:
    async def run() -> Scene:
        scene = Scene(tmp_path, count)
        scene.ledger.apply(FLEET, asyncio.get_running_loop().time())
        scene.workers.start()
        try:
            await act(scene)
        finally:
            await scene.workers.stop()
        return scene

    return asyncio.run(run())


def test_a_worker_knows_the_fleet_before_envoy_can_reach_it(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        assert scene.answering_pid() == 0
        await scene.serving()
        assert await scene.told() == ["joined", "changed", "load"]
        assert scene.answering_pid() == scene.workers.processes[0].child.pid

    play(tmp_path, act)


def test_a_killed_worker_is_back_with_the_whole_fleet(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.serving()
        scene.tell(EndpointChanged("a", EndpointState.DRAINING))
        process = scene.workers.processes[0]
        first_pid = process.child.pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)
        await until(lambda: process.child.restarts == 1 and process.ready.is_set())
        assert await scene.told() == ["joined", "changed", "load"]
        assert scene.answering_pid() == process.child.pid != first_pid
        assert scene.lost == ["0.1"]
        assert (await scene.answers.explain("of the dead one")).renewed == ["0"]

    play(tmp_path, act)


def test_events_reach_every_worker_in_order(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.serving()
        for running in range(50):
            scene.tell(LoadSeen("a", Signals(running=float(running))))
            await asyncio.sleep(0)
        scene.tell(EndpointChanged("a", EndpointState.DRAINING))
        await scene.workers.settled(timeout_s=30.0)
        for place in range(2):
            assert await scene.told(place) == ["joined", "changed", "load", *["load"] * 50, "changed"]

    play(tmp_path, act, count=2)


def test_an_upgrade_replaces_each_worker_without_a_moment_in_which_nobody_answers(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.serving()
        old = [process.child.pid for process in scene.workers.processes]
        seen: set[int] = set()
        upgrade = asyncio.create_task(scene.workers.upgrade(drain_timeout_s=30.0))
        while not upgrade.done():
            seen.add(scene.answering_pid("0"))
            await asyncio.sleep(0.005)
        assert (await upgrade) == (True, "2 worker(s) replaced")
        assert 0 not in seen
        await until(lambda: len(scene.workers.processes) == 2)
        new = [process.child.pid for process in scene.workers.processes]
        assert not set(old) & set(new)
        assert [scene.answering_pid("0"), scene.answering_pid("1")] == new
        assert all(process.child.restarts == 0 for process in scene.workers.processes)
        assert await scene.told(0) == ["joined", "changed", "load"]

    play(tmp_path, act, count=2)


def test_what_a_replaced_worker_knew_is_told_until_the_next_one_is_replaced(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.serving()
        for number in (1, 2):
            assert (await scene.workers.upgrade(drain_timeout_s=30.0)).is_done
            await until(lambda: len(scene.workers.processes) == 1)
            name = f"known-to-0.{number}"
            explained = await scene.answers.explain(name)
            assert explained.found == [{"picker": "0", "is_replaced": True, "request_id": name}]
            assert explained.renewed == []
        assert (await scene.answers.explain("known-to-0.1")).found == []
        assert [path.name for path in tmp_path.glob("*.bequest")] == ["w0.2.bequest"]
        # One that is in service is asked first.
        assert (await scene.answers.explain("mine-0")).found == [{"picker": "0", "request_id": "0"}]

    play(tmp_path, act)


def test_workers_that_end_with_their_pool_leave_nothing(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.serving()
        assert await scene.workers.drain(30.0) == 0

    play(tmp_path, act, count=2)
    assert list(tmp_path.glob("*.bequest")) == []


def test_an_upgrade_that_does_not_come_up_keeps_the_old_worker(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.serving()
        pid = scene.workers.processes[0].child.pid
        scene.extra = ["--crash-before-ready"]
        upgrade = await scene.workers.upgrade(drain_timeout_s=30.0)
        assert not upgrade.is_done
        assert "did not come up" in upgrade.text
        assert scene.answering_pid() == pid
        assert len(scene.workers.processes) == 1

    play(tmp_path, act)


def test_answers_of_all_workers_are_one_and_a_missing_one_is_marked(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.serving()
        whole = await scene.answers.picture()
        assert (whole.requests_total, whole.errors_total, whole.is_partial) == (20, 2, False)
        assert "shoal_requests_total 20\n" in await scene.answers.metrics()
        explained = await scene.answers.explain("mine-1")
        assert [each["picker"] for each in explained.found] == ["1"]

        scene.extra = ["--crash-before-ready"]
        lost = scene.workers.processes[0]
        lost.child.signal(signal.SIGKILL)
        await until(lambda: lost.seat.link is None)
        scene.answers.lost("0.1")
        partial = await scene.answers.picture()
        assert (partial.requests_total, partial.is_partial) == (20, True)
        assert [worker.is_answering for worker in partial.workers] == [False, True]
        page = await scene.answers.metrics()
        assert "shoal_requests_total 20\n" in page
        assert 'shoal_worker_up{picker="0"} 0\n' in page
        assert (await scene.answers.explain("mine-0")).silent == ["0"]

    play(tmp_path, act, count=2)


def test_a_drain_waits_for_what_is_in_flight_on_any_worker(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.serving()
        link = scene.workers.processes[1].seat.link
        assert link is not None
        await link._good("POST", "/inflight/2")
        pulse = Pulse(scene.workers)
        drained = asyncio.create_task(pulse.until_drained("a"))
        for _ in range(5):
            await pulse.read()
            await asyncio.sleep(0)
        assert pulse.is_busy("a")
        assert not drained.done()
        await link._good("POST", "/inflight/0")
        for _ in range(3):
            await pulse.read()
            await asyncio.sleep(0.01)
        await asyncio.wait_for(drained, 10.0)

    play(tmp_path, act, count=2)


def test_a_link_to_nobody_says_so(tmp_path: Path) -> None:
    async def run() -> bool:
        link = WorkerLink(tmp_path / "nobody.sock")
        try:
            return await link.is_listening()
        finally:
            await link.close()

    assert asyncio.run(run()) is False


def test_an_answer_that_comes_after_the_end_of_its_worker_is_not_counted_again(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.serving()
        seat = scene.workers.processes[0].seat
        assert seat.link is not None
        late = await seat.link.snapshot()
        await scene.answers.picture()
        await scene.answers.read_counts()
        scene.extra = ["--crash-before-ready"]
        scene.workers.processes[0].child.signal(signal.SIGKILL)
        await until(lambda: scene.workers.processes[0].seat.link is None)
        scene.answers.lost(seat.incarnation)
        scene.answers.saw(seat.incarnation, late)
        scene.answers.lost(seat.incarnation)
        assert (await scene.answers.picture()).requests_total == 10
        assert "shoal_requests_total 10\n" in await scene.answers.metrics()

    play(tmp_path, act)


def test_a_worker_that_ends_while_it_is_asked_is_counted_once(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.serving()
        process = scene.workers.processes[0]
        await scene.answers.picture()
        link = process.seat.link
        assert link is not None
        ask = link.snapshot

        async def answer_and_end() -> Snapshot:
            answer = await ask()
            scene.extra = ["--crash-before-ready"]
            process.child.signal(signal.SIGKILL)
            await until(lambda: process.seat.link is None)
            scene.answers.lost("0.1")
            return answer

        link.snapshot = answer_and_end  # type: ignore[method-assign]
        picture = await scene.answers.picture()
        assert (picture.requests_total, picture.is_partial) == (10, True)

    play(tmp_path, act)


def test_silence_of_a_worker_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.serving()
        pulse = Pulse(scene.workers)
        pulse._silent_since["0.0"] = 1.0
        await pulse.read()
        assert pulse._silent_since == {}

    play(tmp_path, act)


def test_the_hash_key_of_workers_is_in_their_environment_and_not_in_their_arguments(tmp_path: Path) -> None:
    async def act() -> None:
        scene = Scene(tmp_path)
        workers = Workers(["0"], tmp_path, scene.command, scene.door, Ledger(), {"SHOAL_HASH_KEY": "c0ffee"})
        workers.start()
        try:
            await until(lambda: workers.processes[0].ready.is_set())
            proc = Path(f"/proc/{workers.processes[0].child.pid}")
            assert b"SHOAL_HASH_KEY=c0ffee" in (proc / "environ").read_bytes().split(b"\0")
            assert b"c0ffee" not in (proc / "cmdline").read_bytes()
        finally:
            await workers.stop()

    asyncio.run(act())


def test_workers_log_at_the_level_and_in_the_format_of_the_pool() -> None:
    command = worker_command(PickerDoor(Path("run")), Path("config.yaml"), 2, 7, "json", "debug")
    options = parser().parse_args([*command("1", "1.4", Path("a"))][3:])
    assert (options.log_format, options.log_level, options.seed, options.workers) == ("json", "debug", 8, 2)
