"""How the fleet learns where engines publish KV events."""

import json
from typing import Any

import msgspec

from shoal.hosts.fleet import StaticSource
from shoal.pool.kvevents import KvSource
from shoal.routing import events
from tests.hosts.fleet.fleet_engines import Kept, Recorder, ScriptedEngine, run, target, until


def sources(sink: Recorder) -> tuple[KvSource, ...]:
    """What was told last."""
    joins = sink.of(events.EndpointJoined)
    return joins[-1].endpoint.kv_sources if joins else ()


def page(**ranks: str) -> bytes:
    said: dict[str, Any] = {rank.removeprefix("rank"): {"endpoint": endpoint} for rank, endpoint in ranks.items()}
    return json.dumps(said).encode()


def test_an_engine_is_asked_where_it_publishes_before_it_is_ready() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            engine.pages["/kv_event_sources"] = page(rank0="tcp://*:5557", rank1="tcp://*:5558")
            async with Kept(StaticSource([target(engine)])) as (_, sink):
                await until(lambda: sink.states(engine.address)[-1:] == ["ready"])
                assert sources(sink) == (
                    KvSource(endpoint="tcp://127.0.0.1:5557"),
                    KvSource(endpoint="tcp://127.0.0.1:5558", rank=1),
                )

    run(test)


def test_sglang_is_asked_for_its_server_info() -> None:
    async def test() -> None:
        async with ScriptedEngine("sglang") as engine:
            said = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 1}
            engine.pages["/server_info"] = json.dumps({"kv_events": said}).encode()
            async with Kept(StaticSource([target(engine)])) as (_, sink):
                await until(lambda: sources(sink) == (KvSource(endpoint="tcp://127.0.0.1:5557"),))
                assert "/kv_event_sources" not in engine.calls

    run(test)


def test_an_engine_without_the_page_is_asked_once_and_has_none() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine, Kept(StaticSource([target(engine)])) as (_, sink):
            await until(lambda: engine.calls.get("/v1/models", 0) > 5)
            assert engine.calls["/kv_event_sources"] == 1
            assert sources(sink) == ()

    run(test)


def test_what_an_operator_says_counts_and_the_engine_is_not_asked() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            engine.pages["/kv_event_sources"] = page(rank0="tcp://*:1")
            written = msgspec.structs.replace(target(engine), kv_events=("5557",), kv_replay=("5558",))
            async with Kept(StaticSource([written])) as (_, sink):
                await until(lambda: sink.states(engine.address)[-1:] == ["ready"])
                assert sources(sink) == (
                    KvSource(endpoint="tcp://127.0.0.1:5557", replay_endpoint="tcp://127.0.0.1:5558"),
                )
                assert "/kv_event_sources" not in engine.calls

    run(test)


def test_an_engine_that_publishes_elsewhere_after_a_restart_is_followed_there() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            engine.pages["/kv_event_sources"] = page(rank0="tcp://*:5557")
            async with Kept(StaticSource([target(engine)])) as (_, sink):
                await until(lambda: len(sources(sink)) == 1)
                engine.pages["/kv_event_sources"] = page(rank0="tcp://*:6000")
                await until(lambda: sources(sink) == (KvSource(endpoint="tcp://127.0.0.1:6000"),))

    run(test)


def test_a_question_that_fails_is_asked_again_and_holds_nothing_up() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            engine.status["/kv_event_sources"] = 503
            engine.pages["/kv_event_sources"] = page(rank0="tcp://*:5557")
            async with Kept(StaticSource([target(engine)])) as (_, sink):
                await until(lambda: sink.states(engine.address)[-1:] == ["ready"])
                assert sources(sink) == ()
                engine.status.clear()
                await until(lambda: len(sources(sink)) == 1)

    run(test)


def test_garbage_is_no_source() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            engine.pages["/kv_event_sources"] = b"<html>"
            async with Kept(StaticSource([target(engine)])) as (_, sink):
                await until(lambda: sink.states(engine.address)[-1:] == ["ready"])
                assert sources(sink) == ()

    run(test)
