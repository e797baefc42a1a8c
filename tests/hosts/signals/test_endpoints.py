"""Which endpoints are followed over real ZMQ sockets: ranks, names, those that come, go and share an address."""

import asyncio
import os
import threading
from pathlib import Path

from shoal.hosts.signals.counts import KvCounts
from shoal.pool import ServedModel
from shoal.pool.kvevents import KvSource, KvState
from shoal.prefix.ledger import LedgerGauges
from shoal.routing.events import BlocksCleared, ModelsSeen
from shoal.routing.models import ModelTable
from tests.hosts.signals.publishers import (
    Following,
    ScriptedPublisher,
    stored,
)


def test_ranks_are_followed_apart_and_the_worst_is_the_endpoints_state() -> None:
    async def run() -> None:
        with ScriptedPublisher() as first, ScriptedPublisher() as second, Following() as seen:
            seen.join(first.source(), second.source(rank=1))
            await seen.fresh()
            first.publish(stored(1))
            second.publish(stored(2))
            await seen.until(lambda: seen.router.held("e", 0) == {1} and seen.router.held("e", 1) == {2})
            first.close()
            await seen.until(lambda: seen.router.state() is KvState.STALE)
            second.publish(stored(3))
            await seen.until(lambda: seen.router.held("e", 1) == {2, 3})

    asyncio.run(run())


def test_keys_are_made_with_the_name_that_the_router_asks_for_tokens_with() -> None:
    async def run() -> None:
        listed = (ServedModel(id="adapter", parent="z"), ServedModel(id="z"), ServedModel(id="b"))
        table = ModelTable()
        table.update("e", listed)
        with ScriptedPublisher() as engine, Following() as seen:
            seen.join(engine.source())
            await seen.fresh()
            engine.publish(stored(1))
            await seen.until(lambda: seen.router.held() == {1})
            seen.subscriber.observe(ModelsSeen("e", listed))
            # Under another name it has other keys, so all is read again.
            await seen.until(lambda: seen.router.cleared == 1 and seen.router.held() == {1})
            await seen.fresh()
            assert seen.models[-1] == table.base_at("e") == "b"

    asyncio.run(run())


def test_a_cache_that_the_fleet_says_is_empty_is_learned_anew() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, Following() as seen:
            seen.join(engine.source())
            await seen.fresh()
            engine.publish(stored(1))
            await seen.until(lambda: seen.router.held() == {1})
            ledgers = len(seen.models)
            seen.subscriber.observe(BlocksCleared("e"))
            seen.router.feed(BlocksCleared("e"))
            assert len(seen.models) == ledgers + 1
            engine.publish(stored(2))
            await seen.until(lambda: seen.router.held() == {2})

    asyncio.run(run())


def test_streams_follow_what_the_configuration_wants() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, Following() as seen:
            seen.join(engine.source())
            engine.publish(stored(1))
            await seen.until(lambda: seen.router.held() == {1})
            seen.subscriber.configure(None)
            assert seen.count("llm_d_epp_kv_cache_events_active_subscribers") == 0
            assert seen.subscriber.states() == {"e": KvState.NONE}
            seen.router.blocks.clear()
            seen.subscriber.configure(lambda endpoint: endpoint.kv_sources)
            await seen.until(lambda: seen.router.held() == {1})
            await seen.fresh()

    asyncio.run(run())


def test_two_endpoints_that_name_one_publisher_are_not_both_credited() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, Following() as seen:
            seen.join(engine.source())
            seen.join(engine.source(), endpoint_id="other")
            await seen.fresh()
            engine.publish(stored(1))
            await seen.until(lambda: seen.router.held() == {1})
            assert seen.router.held("other") == set()
            assert seen.router.state("other") is KvState.STALE

    asyncio.run(run())


def test_an_endpoint_that_leaves_is_silent_and_may_return() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, Following() as seen:
            seen.join(engine.source())
            await seen.fresh()
            seen.leave()
            before = len(seen.router.events)
            engine.publish(stored(1))
            await asyncio.sleep(0.1)
            assert len(seen.router.events) == before
            assert seen.count("llm_d_epp_kv_cache_events_active_subscribers") == 0
            seen.join(engine.source())
            await seen.until(lambda: seen.router.held() == {1})

    asyncio.run(run())


def test_an_endpoint_that_publishes_nothing_has_no_stream() -> None:
    async def run() -> None:
        with Following() as seen:
            seen.join()
            await asyncio.sleep(0.05)
            assert seen.router.events == []
            assert seen.count("shoal_kv_stream_state", state="none") == 1

    asyncio.run(run())


def test_an_address_that_cannot_be_dialled_is_counted_and_stale() -> None:
    async def run() -> None:
        with Following() as seen:
            seen.join(KvSource(endpoint="carrier-pigeon://roof"))
            await seen.until(lambda: seen.router.state() is KvState.STALE)
            assert seen.count("llm_d_epp_kv_cache_events_zmq_errors", operation="connect") == 1

    asyncio.run(run())


def test_b5_a_thousand_endpoints_that_come_and_go_leave_nothing() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, Following() as seen:
            # One round makes what is made once: the I/O thread and its descriptors.
            await _come_and_go(seen, engine, 5)
            tasks, threads, files = len(asyncio.all_tasks()), threading.active_count(), _open_files()
            await _come_and_go(seen, engine, 1000)
            await seen.until(lambda: _open_files() <= files + 4)
            assert len(asyncio.all_tasks()) == tasks
            assert threading.active_count() == threads
            assert seen.subscriber.states() == {}

    asyncio.run(run())


async def _come_and_go(seen: Following, engine: ScriptedPublisher, rounds: int) -> None:
    for position in range(rounds):
        seen.join(engine.source(), endpoint_id=f"e{position}")
        # Some leave while their replay is under way, some before they are connected.
        await asyncio.sleep(0.03 if position % 50 == 0 else 0)
        seen.leave(f"e{position}")


def _open_files() -> int:
    return len(os.listdir(Path("/proc/self/fd")))


def test_an_engine_that_goes_on_under_another_id_is_followed_there() -> None:
    async def run() -> None:
        with ScriptedPublisher() as engine, Following() as seen:
            seen.join(engine.source())
            await seen.fresh()
            engine.publish(stored(1))
            seen.join(engine.source(), endpoint_id="gone")
            seen.join(engine.source(), endpoint_id="other")
            await seen.until(lambda: seen.router.state("other") is KvState.STALE)
            seen.leave("gone")
            seen.leave()
            await seen.fresh("other")
            await seen.until(lambda: seen.router.held("other") == {1})

    asyncio.run(run())


def test_an_address_that_could_not_be_dialled_belongs_to_nobody_afterwards() -> None:
    async def run() -> None:
        with Following() as seen:
            seen.join(KvSource(endpoint="carrier-pigeon://roof"))
            seen.leave()
            seen.join(KvSource(endpoint="carrier-pigeon://roof"), endpoint_id="other")
            assert seen.count("llm_d_epp_kv_cache_events_zmq_errors", pod_identifier="other") == 1

    asyncio.run(run())


def test_a_fault_with_the_events_of_one_engine_makes_it_stale_and_stops_no_other() -> None:
    async def run() -> None:
        with ScriptedPublisher() as broken, ScriptedPublisher() as sound, Following() as seen:
            seen.join(broken.source(), endpoint_id="broken")
            seen.join(sound.source(), endpoint_id="sound")
            await seen.fresh("broken")
            await seen.fresh("sound")
            seen.faults.add(13)
            for block in range(3):
                broken.publish(stored(13))
                sound.publish(stored(block))
            await seen.until(lambda: seen.router.held("sound") == {0, 1, 2})
            await seen.until(lambda: seen.router.state("broken") is KvState.STALE)
            seen.faults.clear()
            # It is trusted again once all was read anew.
            await seen.until(lambda: seen.router.held("broken") == {13})
            await seen.fresh("broken")

    asyncio.run(run())


def test_the_size_of_what_is_known_and_what_was_left_out_can_be_read() -> None:
    counts, one = KvCounts(), LedgerGauges(blocks=3, orphans=1, used_bytes=100, unreadable=2)
    families = counts.families({}, 0, {"e0": [one, one], "e1": [LedgerGauges(0, 0, 0)]})
    read = {
        (family.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if family.name.startswith("shoal_kv_ledger")
    }
    assert read == {
        ("shoal_kv_ledger_blocks", "e0"): 6,
        ("shoal_kv_ledger_orphans", "e0"): 2,
        ("shoal_kv_ledger_bytes", "e0"): 200,
        ("shoal_kv_ledger_blocks", "e1"): 0,
        ("shoal_kv_ledger_orphans", "e1"): 0,
        ("shoal_kv_ledger_bytes", "e1"): 0,
        ("shoal_kv_ledger_left_out", "e0", "unreadable"): 4,
    }
    later = counts.families({}, 0, {})
    assert not any(family.samples for family in later if family.name.startswith("shoal_kv_ledger"))
