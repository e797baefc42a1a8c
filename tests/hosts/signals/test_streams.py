"""KV events over real ZMQ sockets: what a subscriber makes of publishers that lose, restart, stall and lie."""

import asyncio
import contextlib

import msgspec
import pytest

from shoal.pool.kvevents import KvSource, KvState
from tests.hosts.signals.publishers import (
    CLEARED,
    QUICK,
    Following,
    ScriptedPublisher,
    payload,
    removed,
    stored,
)


def test_what_an_engine_stores_and_removes_reaches_the_router() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, Following() as seen:
            seen.join(engine.source())
            await seen.fresh()
            engine.publish(stored(1, 2), stored(3))
            engine.publish(removed(2))
            await seen.until(lambda: seen.router.held() == {1, 3})
            engine.publish(CLEARED)
            engine.publish(stored(9))
            await seen.until(lambda: seen.router.held() == {9})
            assert seen.router.state() is KvState.FRESH
            assert seen.count("shoal_kv_events", kind="stored") == 3
            assert seen.count("llm_d_epp_kv_cache_events_messages_received") == 4
            assert seen.count("llm_d_epp_kv_cache_events_active_subscribers") == 1
            assert seen.count("shoal_kv_stream_state", endpoint_name="e", state="fresh") == 1
            assert seen.count("shoal_kv_gaps") == 0

    asyncio.run(run())


def test_messages_of_another_topic_are_not_for_this_endpoint() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, Following() as seen:
            seen.join(engine.source())
            await seen.fresh()
            engine.send(b"kv@other", (0).to_bytes(8, "big"), payload(stored(1)))
            engine.publish(stored(2))
            await seen.until(lambda: seen.router.held() == {2})
            assert seen.count("llm_d_epp_kv_cache_events_messages_received") == 1
            assert seen.router.state() is KvState.FRESH

    asyncio.run(run())


@pytest.mark.parametrize("has_topic_frame", [True, False])
def test_b6_a_picker_that_starts_late_knows_all_by_replay(has_topic_frame: bool) -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine:
            engine.has_topic_frame = has_topic_frame
            for block in range(300):
                engine.publish(stored(block))
            engine.publish(removed(7))
            with Following() as seen:
                seen.join(engine.source())
                await seen.fresh()
                assert seen.router.held() == set(range(300)) - {7}
                assert engine.asked == [0]
            # The picker is started anew, and the engine says nothing meanwhile.
            with Following() as again:
                again.join(engine.source())
                await again.fresh()
                assert again.router.held() == seen.router.held()

    asyncio.run(run())


def test_b7_a_lost_batch_is_replayed_and_nothing_is_cleared() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, Following() as seen:
            seen.join(engine.source())
            await seen.fresh()
            for block in range(20):
                engine.publish(stored(block), is_lost=block in (7, 8))
            await seen.until(lambda: seen.router.held() == set(range(20)))
            await seen.fresh()
            assert seen.router.cleared == 0
            assert seen.count("shoal_kv_gaps") == 0
            assert KvState.CATCHING_UP in seen.router.history["e"]

    asyncio.run(run())


def test_b7_the_first_batch_lost_at_a_cold_start_is_replayed() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, Following() as seen:
            engine.publish(stored(1), is_lost=True)
            engine.publish(stored(2), is_lost=True)
            seen.join(engine.source())
            await seen.until(lambda: bool(seen.count("llm_d_epp_kv_cache_events_active_subscribers")))
            engine.publish(stored(3))
            await seen.until(lambda: seen.router.held() == {1, 2, 3})
            await seen.fresh()

    asyncio.run(run())


def test_b7_what_cannot_be_replayed_is_cleared_counted_and_gone_on_from() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, Following() as seen:
            seen.join(engine.source(has_replay=False))
            await _greeted(seen, engine)
            gaps = seen.count("shoal_kv_gaps", cause="unreplayed")
            engine.publish(stored(2))
            engine.publish(stored(3), is_lost=True)
            engine.publish(stored(4))
            engine.publish(stored(5))
            await seen.until(lambda: seen.router.held() == {4, 5})
            assert seen.router.cleared == 1
            assert seen.count("shoal_kv_gaps", cause="unreplayed") == gaps + 1
            await seen.until(lambda: seen.router.state() is KvState.STALE)
            # What was missed is gone from the engine as well.
            engine.publish(CLEARED, stored(6))
            await seen.fresh()
            assert seen.router.held() == {6}

    asyncio.run(run())


def test_without_replay_a_view_becomes_good_again_after_a_while() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine:
            engine.publish(stored(1), is_lost=True)
            with Following(msgspec.structs.replace(QUICK, warm_up_s=0.2)) as seen:
                seen.join(engine.source(has_replay=False))
                while not seen.router.held():
                    engine.publish(stored(2))
                    await asyncio.sleep(0.01)
                await seen.fresh()
                assert seen.count("shoal_kv_gaps", cause="unreplayed") == 1

    asyncio.run(run())


def test_b7_a_buffer_that_forgot_what_was_missed_brings_what_it_has() -> None:
    async def run() -> None:
        with ScriptedPublisher(buffer=5) as engine, Following() as seen:
            seen.join(engine.source())
            await seen.fresh()
            engine.publish(stored(0))
            await seen.until(lambda: seen.router.held() == {0})
            for block in range(1, 20):
                engine.publish(stored(block), is_lost=True)
            engine.publish(stored(20))
            await seen.until(lambda: seen.router.held() == {16, 17, 18, 19, 20})
            await seen.fresh()
            assert seen.count("shoal_kv_gaps", cause="not-kept") == 1

    asyncio.run(run())


@pytest.mark.parametrize("has_replay", [True, False])
def test_b8_an_engine_restarted_at_its_address_holds_nothing_of_before(has_replay: bool) -> None:
    async def run() -> None:
        engine = ScriptedPublisher()
        with Following() as seen:
            seen.join(engine.source(has_replay=has_replay))
            await _greeted(seen, engine)
            for block in range(2, 40):
                engine.publish(stored(block))
            await seen.until(lambda: len(seen.router.held()) == 39)
            engine.close()
            await seen.until(lambda: seen.router.state() is KvState.STALE)
            with ScriptedPublisher(port=engine.port, replay_port=engine.replay_port) as restarted:
                restarted.publish(stored(100), is_lost=has_replay)
                while seen.router.held() != {100}:
                    await asyncio.sleep(0.01)
                    if not has_replay:
                        restarted.publish(stored(100))
                if has_replay:
                    await seen.fresh()
                assert seen.count("shoal_kv_publisher_restarts") == 1
                assert seen.count("llm_d_epp_kv_cache_events_subscriber_reconnections") == 1

    asyncio.run(run())


def test_b8_a_restarted_engine_that_is_silent_is_found_out_by_its_replay() -> None:
    async def run() -> None:
        engine = ScriptedPublisher()
        with Following() as seen:
            seen.join(engine.source())
            await seen.fresh()
            engine.publish(stored(1), stored(2))
            await seen.until(lambda: seen.router.held() == {1, 2})
            engine.close()
            with ScriptedPublisher(port=engine.port, replay_port=engine.replay_port):
                await seen.until(lambda: seen.router.held() == set())
                await seen.fresh()

    asyncio.run(run())


def test_b8_a_restarted_engine_that_published_as_much_as_before_is_found_out() -> None:
    async def run() -> None:
        engine = ScriptedPublisher()
        with Following() as seen:
            seen.join(engine.source())
            await seen.fresh()
            for block in range(3):
                engine.publish(stored(block))
            await seen.until(lambda: seen.router.held() == {0, 1, 2})
            engine.close()
            with ScriptedPublisher(port=engine.port, replay_port=engine.replay_port) as restarted:
                for block in range(10, 16):
                    restarted.publish(stored(block), is_lost=True)
                await seen.until(lambda: seen.router.held() == set(range(10, 16)))
                await seen.fresh()
                assert seen.count("shoal_kv_publisher_restarts") == 1

    asyncio.run(run())


def test_a_cut_stream_is_stale_until_it_has_caught_up() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, Following() as seen:
            async with _Relay(engine.port) as relay:
                seen.join(msgspec.structs.replace(engine.source(), endpoint=f"tcp://127.0.0.1:{relay.port}"))
                await seen.fresh()
                engine.publish(stored(1))
                await seen.until(lambda: seen.router.held() == {1})
                relay.cut()
                await seen.until(lambda: seen.router.state() is KvState.STALE)
                engine.publish(stored(2))
                engine.publish(removed(1))
                relay.mend()
                await seen.until(lambda: seen.router.held() == {2})
                await seen.fresh()
                assert seen.router.cleared == 0
                assert seen.router.history["e"][-3:] == [KvState.STALE, KvState.CATCHING_UP, KvState.FRESH]

    asyncio.run(run())


def test_a_peer_that_hangs_is_noticed_by_its_missing_heartbeat() -> None:
    async def run() -> None:
        settings = msgspec.structs.replace(QUICK, heartbeat_s=0.1, heartbeat_timeout_s=0.3)
        with ScriptedPublisher() as engine, Following(settings) as seen:
            async with _Relay(engine.port) as relay:
                seen.join(KvSource(endpoint=f"tcp://127.0.0.1:{relay.port}"))
                await _greeted(seen, engine)
                relay.freeze()
                await seen.until(lambda: seen.router.state() is KvState.STALE)

    asyncio.run(run())


def test_live_events_during_a_slow_replay_are_applied_after_it_once() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine:
            for block in range(60):
                engine.publish(stored(block))
            engine.reply_pause_s = 0.01
            with Following() as seen:
                seen.join(engine.source())
                await seen.until(lambda: seen.router.state() is KvState.CATCHING_UP)
                for block in range(60, 90):
                    engine.publish(removed(block - 60), stored(block))
                await seen.until(lambda: seen.router.held() == set(range(30, 90)))
                await seen.fresh()
                assert seen.count("llm_d_epp_kv_cache_events_messages_received") == 90

    asyncio.run(run())


def test_the_last_batch_of_all_is_not_lost_though_nothing_comes_after_it() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, Following() as seen:
            seen.join(engine.source())
            await seen.fresh()
            engine.publish(stored(1))
            engine.publish(stored(2), is_lost=True)
            await seen.until(lambda: seen.router.held() == {1, 2})
            await seen.fresh()
            # Once it is known that there is no more, the engine is left alone.
            asked = len(engine.asked)
            await asyncio.sleep(6 * QUICK.check_s)
            assert len(engine.asked) <= asked + 1

    asyncio.run(run())


def test_live_events_that_the_engine_drops_during_a_replay_are_replayed_too() -> None:
    async def run() -> None:
        with ScriptedPublisher(send_messages=10) as engine:
            for block in range(50):
                engine.publish(stored(block))
            engine.reply_pause_s = 0.005
            with Following(msgspec.structs.replace(QUICK, receive_messages=10)) as seen:
                seen.join(engine.source())
                await seen.until(lambda: seen.router.state() is KvState.CATCHING_UP)
                # Large enough to fill what the kernel buffers.
                for block in range(50, 150):
                    engine.publish(stored(block, session_id="x" * 200_000))
                await seen.until(lambda: seen.router.held() == set(range(150)))
                await seen.fresh()
                assert len(engine.asked) > 1

    asyncio.run(run())


def test_a_replay_that_never_answers_is_given_up_and_tried_again_after_a_pause() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine:
            engine.is_mute = True
            engine.publish(stored(1), is_lost=True)
            settings = msgspec.structs.replace(QUICK, replay_idle_s=0.1)
            with Following(settings) as seen:
                seen.join(engine.source())
                while not seen.router.held():
                    engine.publish(stored(2))
                    await asyncio.sleep(0.01)
                assert seen.count("shoal_kv_replays", result="idle") == 3
                assert seen.count("shoal_kv_gaps", cause="unreplayed") == 1
                await seen.until(lambda: seen.router.state() is KvState.STALE)
                engine.is_mute = False
                await seen.until(lambda: seen.router.held() == {1, 2})
                await seen.fresh()

    asyncio.run(run())


def test_a_replay_without_its_end_is_asked_for_again_from_where_it_stopped() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine:
            engine.ends = False
            for block in range(5):
                engine.publish(stored(block))
            with Following(msgspec.structs.replace(QUICK, replay_idle_s=0.1)) as seen:
                seen.join(engine.source())
                await seen.until(lambda: len(engine.asked) == 2)
                engine.ends = True
                await seen.fresh()
                assert engine.asked[:2] == [0, 4]
                assert seen.router.held() == set(range(5))
                assert seen.router.cleared == 0

    asyncio.run(run())


def test_replays_of_many_engines_take_turns() -> None:
    async def run() -> None:
        with contextlib.ExitStack() as stack:
            engines = [stack.enter_context(ScriptedPublisher()) for _ in range(6)]
            for engine in engines:
                engine.reply_pause_s = 0.01
                for block in range(10):
                    engine.publish(stored(block))
            with Following(msgspec.structs.replace(QUICK, replays=2, replay_idle_s=5.0)) as seen:
                for position, engine in enumerate(engines):
                    seen.join(engine.source(), endpoint_id=str(position))
                await seen.until(lambda: any(engine.asked for engine in engines))
                running = 0
                while not all(seen.router.state(str(each)) is KvState.FRESH for each in range(6)):
                    finished = sum(seen.router.state(str(each)) is KvState.FRESH for each in range(6))
                    running = max(running, sum(bool(engine.asked) for engine in engines) - finished)
                    await asyncio.sleep(0.002)
                assert all(seen.router.held(str(each)) == set(range(10)) for each in range(6))
                # One more may have begun whose predecessor's end is told a turn of the loop later.
                assert running <= 3

    asyncio.run(run())


def test_b11_bytes_that_are_no_events_cost_only_themselves() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, Following() as seen:
            seen.join(engine.source())
            await seen.fresh()
            engine.publish(stored(1), ["Nonsense"], stored(2))
            engine.publish_raw(b"\xc1 not msgpack")
            engine.send(b"kv@m", b"short", b"x")
            engine.send(b"kv@m")
            engine.send(*[b"kv@m"] * 50)
            engine.publish(stored(3))
            await seen.until(lambda: seen.router.held() == {1, 2, 3})
            assert seen.router.cleared == 0
            assert seen.router.state() is KvState.FRESH
            assert seen.count("shoal_kv_events_skipped", reason="unreadable-event") == 1
            assert seen.count("shoal_kv_events_skipped", reason="unreadable-message") == 4

    asyncio.run(run())


def test_a_flood_never_holds_the_loop_up_and_no_event_is_lost() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, ScriptedPublisher() as quiet, Following() as seen:
            seen.join(engine.source())
            seen.join(quiet.source(), endpoint_id="quiet")
            await seen.fresh()
            await seen.fresh("quiet")
            for block in range(20_000):
                engine.publish(stored(block))
            quiet.publish(stored(1))
            turns = 0
            while not seen.router.held("quiet"):
                await asyncio.sleep(0)
                turns += 1
            # The event of the other engine did not wait for the end of the flood.
            assert len(seen.router.held()) < 20_000
            while len(seen.router.held()) < 20_000:
                await asyncio.sleep(0)
                turns += 1
            # The loop had many turns before the flood was over.
            assert turns > 20
            assert seen.router.held() == set(range(20_000))

    asyncio.run(run())


async def _greeted(seen: Following, engine: ScriptedPublisher) -> None:
    """Wait until live events come through, with block 1 known."""
    while not seen.router.held():
        engine.publish(stored(1))
        await asyncio.sleep(0.01)
    if seen.router.state() is not KvState.FRESH:
        # The first ones went before the subscription stood.
        engine.publish(CLEARED, stored(1))
    await seen.until(lambda: seen.router.state() is KvState.FRESH and seen.router.held() == {1})
    seen.router.cleared = 0
    await asyncio.sleep(0.05)


class _Relay:
    """A TCP relay whose connections can be cut, or frozen as by a lost network."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._is_cut = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.port = 0

    async def __aenter__(self) -> "_Relay":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def mend(self) -> None:
        self._is_cut = False

    def freeze(self) -> None:
        self._flowing.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, far_writer]
        self._tasks += [
            asyncio.create_task(self._copy(reader, far_writer)),
            asyncio.create_task(self._copy(far_reader, writer)),
        ]

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                writer.write(data)
        writer.transport.abort()
