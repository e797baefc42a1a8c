"""Pickers that share over unix sockets."""

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic

import pytest
import zmq

from shoal.hosts.sharing import circle, messages, new_secret
from shoal.hosts.sharing.voice import AT_ONCE, FLUSH_COUNT, FLUSH_S
from shoal.hosts.sharing.wires import Inbox
from shoal.routing.events import PeerSynced
from shoal.routing.news import MAX_BOOKINGS_PER_PART, PeerBooked
from shoal.routing.settings import Sharing as SharingSettings
from tests.hosts.sharing.pickers import Picker, all_follow_all, all_hear, until


def play(tmp_path: Path, act: Callable[[list[Picker]], Awaitable[None]], count: int = 2) -> list[Picker]:
    async def run() -> list[Picker]:
        pickers = [Picker(tmp_path, number) for number in range(count)]
        try:
            all_follow_all(pickers)
            await all_hear(pickers)
            await act(pickers)
        finally:
            for each in pickers:
                each.close()
        return pickers

    return asyncio.run(run())


def test_what_one_books_and_releases_the_others_count(tmp_path: Path) -> None:
    async def act(pickers: list[Picker]) -> None:
        first, *others = pickers
        names = [first.send(f"p{number}") for number in range(20)]
        await until(lambda: all(each.bookings == 20 for each in others))
        for name in names:
            first.finish(name)
        await until(lambda: all(each.bookings == 0 for each in others))
        assert all(each.is_idle for each in pickers)

    play(tmp_path, act, 3)


def test_a_prompt_that_one_sent_is_known_to_the_other(tmp_path: Path) -> None:
    async def act(pickers: list[Picker]) -> None:
        first, second = pickers
        name = first.send("chat", 1_280)
        place = next(number for number in range(4) if first.router.inflight_at(f"e{number}"))
        first.finish(name, place)
        await until(lambda: second.router.status().index_entries > 0)
        assert second.finish(second.send("chat", 1_280), place) >= 1_024

    play(tmp_path, act)


def test_of_two_requests_of_one_moment_the_second_picker_knows_where_the_first_went(tmp_path: Path) -> None:
    async def act(pickers: list[Picker]) -> None:
        first, second = pickers
        first.send("chat", 1_280)
        circle = second.sharing._circle
        assert circle is not None
        (ear,) = circle._ears.values()
        # The loop takes no turn in between: what is there is heard because a request came.
        assert ear._inbox.socket.poll(30_000)
        second.send("chat", 1_280)
        assert second.bookings == 1
        places = [next(at for at in range(4) if each.router.inflight_at(f"e{at}")) for each in pickers]
        assert places[0] == places[1]

    play(tmp_path, act)


def test_what_is_told_at_once_is_bounded(tmp_path: Path) -> None:
    async def act(pickers: list[Picker]) -> None:
        first, second = pickers
        circle = first.sharing._circle
        assert circle is not None
        began_at, before = monotonic(), circle.voice.messages
        for number in range(2_000):
            first.send(f"p{number % 50}", 64)
        refilled = (monotonic() - began_at) / FLUSH_S
        assert 0 < circle.voice.messages - before <= AT_ONCE + refilled + 2_000 / FLUSH_COUNT + 1
        await until(lambda: second.bookings == 2_000)

    play(tmp_path, act)


def test_what_was_in_flight_before_a_picker_came_counts_once_it_is_there(tmp_path: Path) -> None:
    async def run() -> None:
        old, new = Picker(tmp_path, 0), Picker(tmp_path, 1)
        try:
            names = [old.send(f"p{number}") for number in range(12)]
            all_follow_all((old, new))
            await all_hear((old, new))
            await until(lambda: new.bookings == 12)
            for name in names:
                old.finish(name)
            await until(lambda: new.is_idle and new.bookings == 0)
        finally:
            old.close()
            new.close()

    asyncio.run(run())


def test_a_picker_that_begins_takes_index_and_bookings_over(tmp_path: Path) -> None:
    async def run() -> None:
        old, new = Picker(tmp_path, 0), Picker(tmp_path, 1)
        try:
            for number in range(300):
                name = old.send(f"p{number}", 1_280)
                place = next(each for each in range(4) if old.router.inflight_at(f"e{each}"))
                old.finish(name, place)
            open_name = old.send("open", 640)
            all_follow_all((old, new))
            await new.sharing.begin((old.pair[0],))
            assert new.bookings == 1
            assert new.router.status().index_entries == old.router.status().index_entries > 5_000
            # What comes while it learns and after is counted once.
            old.finish(open_name)
            await until(lambda: new.bookings == 0)
            assert new.is_idle
        finally:
            old.close()
            new.close()

    asyncio.run(run())


def test_a_picker_without_anybody_to_learn_from_begins_soon(tmp_path: Path) -> None:
    async def run() -> None:
        one, absent = Picker(tmp_path, 0), Picker(tmp_path, 1)
        try:
            one.follow(absent)
            async with asyncio.timeout(10.0):
                await one.sharing.begin((absent.pair[0],))
            assert one.states == ["silent"]
        finally:
            one.close()

    asyncio.run(run())


def test_a_picker_that_leaves_is_missed_at_once_and_its_bookings_go(tmp_path: Path) -> None:
    async def act(pickers: list[Picker]) -> None:
        first, second = pickers
        first.send("p")
        await until(lambda: second.bookings == 1)
        first.close()
        await until(lambda: second.states == ["lost"])
        await until(lambda: second.bookings == 0)
        assert second.is_idle

    play(tmp_path, act)


def test_a_sibling_that_is_followed_no_more_is_lost(tmp_path: Path) -> None:
    async def act(pickers: list[Picker]) -> None:
        first, second = pickers
        first.send("p")
        await until(lambda: second.bookings == 1)
        second.follow()
        await until(lambda: second.bookings == 0)
        assert second.states == []
        assert len(second.router.outbox) == 0
        assert not second.router.outbox.is_open

    play(tmp_path, act)


def test_a_new_process_at_the_same_place_replaces_the_old_ones_bookings(tmp_path: Path) -> None:
    async def act(pickers: list[Picker]) -> None:
        first, second = pickers
        first.send("p")
        await until(lambda: second.bookings == 1)
        first.close()
        again = Picker(tmp_path, 0)
        again.run = again.sharing._run = "run-again"
        try:
            again.follow(second)
            again.send("p")
            again.send("q")
            await until(lambda: second.states == ["heard"] and second.bookings >= 2)
            await until(lambda: second.bookings == 2)
            assert second.sharing.pictures()[0].run == "run-again"
        finally:
            again.close()

    play(tmp_path, act)


def test_ten_thousand_bookings_at_once_arrive_and_leave(tmp_path: Path) -> None:
    async def act(pickers: list[Picker]) -> None:
        first, second = pickers
        names = []
        for number in range(10_000):
            names.append(first.send(f"p{number % 50}", 64))
            if number % 1_000 == 0:
                await asyncio.sleep(0)
        await until(lambda: second.bookings == 10_000)
        for name in names:
            first.finish(name)
        await until(lambda: second.bookings == 0)
        assert first.is_idle
        assert second.is_idle

    play(tmp_path, act)


def test_messages_that_are_lost_are_noticed_and_nothing_drifts(tmp_path: Path) -> None:
    async def act(pickers: list[Picker]) -> None:
        first, second = pickers
        rng = random.Random(3)
        circle = first.sharing._circle
        assert circle is not None
        say = circle.voice._say

        def lossy(told: messages.Told) -> None:
            if rng.random() < 0.7 or not told.news:
                say(told)

        circle.voice._say = lossy  # type: ignore[method-assign]
        names = []
        for number in range(200):
            names.append(first.send(f"p{number}"))
            if number % 3 == 0:
                first.finish(names.pop(rng.randrange(len(names))))
            await asyncio.sleep(0.004)
        circle.voice._say = say  # type: ignore[method-assign]
        await until(lambda: second.bookings == len(names) and second.states == ["heard"])
        assert second.sharing.pictures()[0].gaps > 0
        for name in names:
            first.finish(name)
        await until(lambda: second.bookings == 0)
        assert second.is_idle

    play(tmp_path, act)


def test_garbage_and_other_versions_are_skipped_and_counted(tmp_path: Path) -> None:
    async def act(pickers: list[Picker]) -> None:
        first, second = pickers
        circle = first.sharing._circle
        assert circle is not None
        publisher = circle.voice._publishers[0].socket
        rng = random.Random(5)
        for _ in range(200):
            publisher.send(bytes(rng.randrange(256) for _ in range(rng.randrange(60))))
        publisher.send_multipart([b"a", b"b"])
        publisher.send(messages.encode([2, "run", {"another": "shape"}]))
        await until(lambda: second.sharing.pictures()[0].skipped >= 200)
        first.send("p")
        await until(lambda: second.bookings == 1)

    play(tmp_path, act)


def test_garbage_at_the_door_for_questions_does_no_harm(tmp_path: Path) -> None:
    async def act(pickers: list[Picker]) -> None:
        first, second = pickers
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        rude = context.socket(zmq.DEALER)
        rude.connect(first.pair[1])
        for at in range(50):
            rude.send_multipart([os.urandom(at)] * (1 + at % 3))
            rude.send(messages.encode(messages.Ask(messages.VERSION, at, "nonsense", at, at)))
        first.send("p")
        await until(lambda: second.bookings == 1)
        rude.close(0)
        context.term()

    play(tmp_path, act)


def test_a_peer_that_was_cut_off_is_lost_and_caught_up_with(tmp_path: Path) -> None:
    async def act(pickers: list[Picker]) -> None:
        first, second = pickers
        circle = first.sharing._circle
        assert circle is not None
        say = circle.voice._say
        names = [first.send("p"), first.send("q")]
        await until(lambda: second.bookings == 2)
        circle.voice._say = lambda told: None  # type: ignore[method-assign]
        await until(lambda: second.states == ["lost"])
        first.finish(names[0])
        await asyncio.sleep(0.05)
        circle.voice._say = say  # type: ignore[method-assign]
        await until(lambda: second.states == ["heard"] and second.bookings == 1)
        first.finish(names[1])
        await until(lambda: second.is_idle and second.bookings == 0)

    play(tmp_path, act)


def test_a_single_picker_does_not_load_zmq(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys; from pathlib import Path; from tests.hosts.sharing.pickers import Picker\n"
        "async def run():\n"
        f"    one = Picker(Path({str(tmp_path)!r}), 0)\n"
        "    await one.sharing.start(); one.follow(); one.send(); one.close()\n"
        "asyncio.run(run()); assert 'zmq' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[3], timeout=60)


@pytest.mark.parametrize("count", [0, 1, 5_000])
def test_news_are_cut_into_messages_that_fit(count: int) -> None:
    news = [PeerBooked(number, "e0", 1, 1, bytes(8 * 160)) for number in range(count)]
    cuts = list(messages.cut(news))
    assert [each for cut in cuts for each in cut] == news
    assert all(cuts)
    for each in cuts:
        told = messages.Told(messages.VERSION, "run", "name", 1, each)
        assert len(messages.encode(told)) < messages.MAX_MESSAGE_BYTES
        assert messages.told_of(messages.encode(told)) == told


def test_what_is_nested_too_deep_is_garbage() -> None:
    deep = messages.encode([messages.VERSION, "run", "name", 0, (), False, 0])[:-1] + b"\x91" * 100_000 + b"\xc0"
    for read in (messages.told_of, messages.ask_of, messages.answer_of):
        with pytest.raises(messages.Garbage):
            read(deep)


def test_bookings_with_the_longest_names_fit_into_a_message() -> None:
    bookings = tuple(PeerBooked(1 << 52, "x" * 256, 1 << 32, 1 << 32) for _ in range(MAX_BOOKINGS_PER_PART))
    answer = messages.Answer(messages.VERSION, 1 << 52, synced=PeerSynced("x" * 256, bookings, 1 << 52, 1 << 52))
    raw = messages.encode(answer)
    assert len(raw) < messages.MAX_MESSAGE_BYTES
    assert messages.answer_of(raw) == answer


def test_a_peer_without_a_name_of_its_run_is_garbage() -> None:
    with pytest.raises(messages.Garbage):
        messages.told_of(messages.encode(messages.Told(messages.VERSION, "", "name", 0)))


class Flood:
    """A socket in which there is always one more message."""

    closed = False

    def __init__(self) -> None:
        self.read = 0
        self._reader, self._writer = os.pipe()

    def getsockopt(self, _: int) -> int:
        return self._reader

    def recv_multipart(self, _: int) -> list[bytes]:
        self.read += 1
        return [b""]

    def close(self, _: int) -> None:
        self.closed = True
        os.close(self._reader)
        os.close(self._writer)


def test_a_flood_takes_no_more_of_each_turn_however_often_it_is_looked_at() -> None:
    async def run() -> None:
        flood = Flood()
        inbox = Inbox(flood, lambda frames: None)  # type: ignore[arg-type]
        for _ in range(50):
            inbox.look()
            await asyncio.sleep(0)
        before = flood.read
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert flood.read - before <= 4 * 64
        inbox.close()

    asyncio.run(run())


def test_a_name_that_is_none_and_sockets_that_are_none_do_not_end_the_sharing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        monkeypatch.setattr(circle, "LOOKUP_S", 0.01)
        secret = tmp_path / "secret"
        new_secret(secret)
        settings = SharingSettings(peers=(f"{'x' * 64}.example:7000",), secret_file="secret")
        picker = Picker(tmp_path, 1, settings, secret)
        await picker.sharing.start()
        made = picker.sharing._circle
        assert made is not None
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in made._tasks)

        def breaks(_: int) -> None:
            raise OSError("too many open files")

        monkeypatch.setattr(made._wires, "open", breaks)
        made.follow([("ipc:///nowhere/s", "ipc:///nowhere/a")])
        assert made.pictures() == []
        monkeypatch.undo()
        made.follow([("ipc:///nowhere/s", "ipc:///nowhere/a")])
        assert len(made.pictures()) == 1
        picker.close()

    asyncio.run(run())


def test_a_peer_that_cannot_be_listened_to_is_told_of_once_for_each_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        picker = Picker(tmp_path, 1)
        await picker.sharing.start()
        other = Picker(tmp_path, 2)
        picker.follow(other)
        made = picker.sharing._circle
        assert made is not None
        reason, opens = "too many open files", made._wires.open

        def breaks(_: int) -> None:
            raise OSError(reason)

        def look(*addresses: str) -> list[str]:
            caplog.clear()
            made.follow([(address, f"{address}-asked") for address in addresses])
            return [str(vars(record)["fields"]["at"]) for record in caplog.records if record.levelname == "ERROR"]

        monkeypatch.setattr(made._wires, "open", breaks)
        first, second = f"ipc://{tmp_path}/first", f"ipc://{tmp_path}/second"
        assert look(first) == [first]
        assert look(first, second) == [second]
        assert look(first, second) == []
        reason = "not permitted"
        assert look(first, second) == [first, second]
        assert look(first) == []
        assert look(first, second) == [second]
        with monkeypatch.context() as mended:
            mended.setattr(made._wires, "open", opens)
            assert look(first) == []
        assert look() == []
        assert look(first) == [first]
        picker.close()
        other.close()

    asyncio.run(run())
