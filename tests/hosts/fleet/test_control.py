"""Orders to engines while they run, against engines that note what they are told."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shoal.hosts.fleet import FleetKeeper, PauseMode, Selection, StaticSource, UnknownEndpoint
from shoal.hosts.fleet.control import Done
from shoal.pool import EndpointState
from shoal.routing import events
from tests.hosts.fleet.fleet_engines import Kept, Recorder, ScriptedEngine, run, target, until

ALL = Selection(is_all=True)
VLLM_CALLS = ("/pause", "/resume", "/reset_prefix_cache")
SGLANG_CALLS = ("/pause_generation", "/continue_generation", "/flush_cache")


@asynccontextmanager
async def fleet(*engines: ScriptedEngine, **settings: object) -> AsyncIterator[tuple[FleetKeeper, Recorder]]:
    """A keeper with these engines, all ready."""
    labels = [{"row": str(number), "role": "decode"} for number in range(len(engines))]
    sources = StaticSource([target(engine, labels=each) for engine, each in zip(engines, labels, strict=True)])
    async with Kept(sources, **settings) as (keeper, sink):
        await until(lambda: all(sink.states(engine.address)[-1:] == ["ready"] for engine in engines))
        yield keeper, sink


def able(kind: str = "vllm") -> ScriptedEngine:
    """An engine that does what it is told."""
    engine = ScriptedEngine(kind)
    engine.pages = dict.fromkeys(VLLM_CALLS if kind == "vllm" else SGLANG_CALLS, b'{"success": true}')
    return engine


def one(engine: ScriptedEngine) -> Selection:
    return Selection(name=engine.address)


def state(keeper: FleetKeeper) -> EndpointState:
    return keeper.reports()[0].state


def test_a_pause_without_a_mode_leaves_the_engine_and_what_is_believed_of_its_cache_alone() -> None:
    async def test() -> None:
        async with able() as engine, fleet(engine) as (keeper, sink):
            assert await keeper.control.pause(one(engine), None, 1.0) == [Done(id=engine.address)]
            await until(lambda: sink.states(engine.address)[-1] == "paused")
            checks = engine.calls["/health"]
            await until(lambda: engine.calls["/health"] > checks + 3)
            assert engine.orders == []
            assert sink.of(events.BlocksCleared) == []
            await keeper.control.resume(one(engine))
            await until(lambda: sink.states(engine.address)[-1] == "ready")
            assert sink.states(engine.address) == ["joined", "ready", "paused", "ready"]
            assert sink.of(events.BlocksCleared) == []

    run(test)


@pytest.mark.parametrize("mode", list(PauseMode))
def test_a_mode_stops_the_engine_after_the_routers_were_told_and_forgets_its_cache(mode: PauseMode) -> None:
    async def test() -> None:
        async with able() as engine, fleet(engine) as (keeper, sink):
            gate = engine.gates["/pause"] = asyncio.Event()
            pausing = asyncio.create_task(keeper.control.pause(one(engine), mode, 5.0))
            await until(lambda: engine.orders)
            assert engine.orders == [(f"/pause?mode={mode}", b"")]
            assert sink.states(engine.address)[-1] == "paused"
            assert sink.of(events.BlocksCleared) == []
            gate.set()
            assert await pausing == [Done(id=engine.address)]
            await until(lambda: sink.of(events.BlocksCleared) == [events.BlocksCleared(engine.address)])
            await keeper.control.resume(one(engine))
            assert engine.orders[1:] == [("/resume", b"")]
            await until(lambda: sink.states(engine.address)[-1] == "ready")
            cleared = [type(event) for event in sink.told].count(events.BlocksCleared)
            assert cleared == 2

    run(test)


def test_sglang_is_paused_and_reset_in_its_own_words() -> None:
    async def test() -> None:
        requests = {"busy": 1}
        async with able("sglang") as engine, fleet(engine, busy=lambda _: bool(requests["busy"])) as (keeper, sink):
            pausing = asyncio.create_task(keeper.control.pause(one(engine), PauseMode.WAIT, 5.0))
            await until(lambda: sink.states(engine.address)[-1] == "paused")
            assert engine.orders == []
            requests["busy"] = 0
            assert await pausing == [Done(id=engine.address)]
            await keeper.control.pause(one(engine), PauseMode.ABORT, 1.0)
            await keeper.control.resume(one(engine))
            await keeper.control.reset(one(engine))
            told = [(path, json.loads(body or b"null")) for path, body in engine.orders]
            assert told == [
                ("/pause_generation", {"mode": "in_place"}),
                ("/pause_generation", {"mode": "abort"}),
                ("/continue_generation", {}),
                ("/flush_cache", None),
            ]
            engine.status["/flush_cache"] = 400
            (refused,) = await keeper.control.reset(one(engine))
            assert refused.problem == "the cache was not reset: requests run or wait there; try again when none do"
            (unable,) = await keeper.control.reset(one(engine), running=True)
            assert "--running" in unable.problem

    run(test)


@pytest.mark.parametrize("status", [403, 404])
def test_an_engine_without_the_call_is_paused_all_the_same_and_the_operator_told_what_it_needs(status: int) -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine, fleet(engine) as (keeper, sink):
            engine.status |= dict.fromkeys(VLLM_CALLS, status)
            (done,) = await keeper.control.pause(one(engine), PauseMode.ABORT, 1.0)
            assert done.problem == (
                f"/pause answered HTTP {status}: the engine offers it only when it is started with "
                "VLLM_SERVER_DEV_MODE=1; it gets no new requests all the same"
            )
            await until(lambda: sink.states(engine.address)[-1] == "paused")
            (done,) = await keeper.control.reset(one(engine))
            assert "VLLM_SERVER_DEV_MODE=1" in done.problem
            assert sink.of(events.BlocksCleared) == []
            # Nothing was paused there, so nothing keeps it from coming back.
            assert await keeper.control.resume(one(engine)) == [Done(id=engine.address)]
            await until(lambda: sink.states(engine.address)[-1] == "ready")

    run(test)


def test_an_engine_that_does_not_go_on_stays_paused() -> None:
    async def test() -> None:
        async with able() as engine, fleet(engine) as (keeper, sink):
            await keeper.control.pause(one(engine), PauseMode.KEEP, 1.0)
            engine.status["/resume"] = 500
            (done,) = await keeper.control.resume(one(engine))
            assert done.problem == "/resume answered HTTP 500; it stays paused"
            assert state(keeper) is EndpointState.PAUSED
            engine.status.clear()
            await keeper.control.resume(one(engine))
            await until(lambda: sink.states(engine.address)[-1] == "ready")

    run(test)


def test_a_pause_whose_end_is_unknown_counts_as_one() -> None:
    async def test() -> None:
        async with able() as engine, fleet(engine) as (keeper, sink):
            engine.gates["/pause"] = asyncio.Event()
            (done,) = await keeper.control.pause(one(engine), PauseMode.WAIT, 0.05)
            assert done.problem.startswith("/pause: no answer in 0.05 s")
            await until(lambda: sink.of(events.BlocksCleared))
            engine.status["/resume"] = 500
            (done,) = await keeper.control.resume(one(engine))
            assert done.problem.endswith("it stays paused")
            engine.gates["/pause"].set()

    run(test)


def test_an_engine_that_starts_anew_while_it_is_paused_stays_paused_when_it_is_ready() -> None:
    async def test() -> None:
        async with able() as engine, fleet(engine) as (keeper, sink):
            await keeper.control.pause(one(engine), PauseMode.ABORT, 1.0)
            await engine.stop()
            await until(lambda: sink.states(engine.address)[-1] == "loading")
            await engine.start()
            await until(lambda: sink.states(engine.address)[-1] == "paused")
            # The new process was never told to pause.
            engine.status["/resume"] = 404
            assert await keeper.control.resume(one(engine)) == [Done(id=engine.address)]
            await until(lambda: sink.states(engine.address)[-1] == "ready")
            assert sink.states(engine.address) == ["joined", "ready", "paused", "loading", "paused", "ready"]

    run(test)


def test_a_cache_in_use_stays_believed_in_and_the_flags_of_a_reset_reach_the_engine() -> None:
    async def test() -> None:
        async with able() as engine, fleet(engine) as (keeper, sink):
            engine.pages["/reset_prefix_cache"] = b'{"success": false}'
            (done,) = await keeper.control.reset(one(engine))
            assert done.problem.startswith("the cache was not reset: requests hold blocks of it")
            assert sink.of(events.BlocksCleared) == []
            engine.pages["/reset_prefix_cache"] = b""  # older vLLM says nothing
            await keeper.control.reset(one(engine), running=True, external=True)
            # The routers have heard when the order returns.
            assert sink.of(events.BlocksCleared) == [events.BlocksCleared(engine.address)]
            assert [path for path, _ in engine.orders] == [
                "/reset_prefix_cache",
                "/reset_prefix_cache?reset_running_requests=true&reset_external=true",
            ]

    run(test)


def test_one_slow_engine_holds_up_no_other() -> None:
    async def test() -> None:
        async with able() as slow, able() as quick, fleet(slow, quick) as (keeper, sink):
            gate = slow.gates["/pause"] = asyncio.Event()
            pausing = asyncio.create_task(keeper.control.pause(ALL, PauseMode.WAIT, 5.0))
            await until(lambda: sink.of(events.BlocksCleared) == [events.BlocksCleared(quick.address)])
            assert not pausing.done()
            scrapes = slow.calls["/metrics"]
            await until(lambda: slow.calls["/metrics"] > scrapes + 2)
            gate.set()
            assert [done.problem for done in await pausing] == ["", ""]

    run(test)


def test_endpoints_are_chosen_by_name_by_labels_or_all() -> None:
    async def test() -> None:
        async with able() as first, able() as second, fleet(first, second) as (keeper, _):

            def chosen(which: Selection) -> set[str]:
                return {member.endpoint.address for member in keeper.control.select(which)}

            assert chosen(one(first)) == chosen(Selection(name=f"{first.url}/")) == {first.address}
            assert chosen(Selection(labels={"role": "decode"})) == chosen(ALL) == {first.address, second.address}
            assert chosen(Selection(labels={"role": "decode", "row": "1"})) == {second.address}
            for nobody in (Selection(name="nobody"), Selection(labels={"role": "prefill"}), Selection()):
                with pytest.raises(UnknownEndpoint, match=f"known: .*{first.address}"):
                    chosen(nobody)

    run(test)


def test_the_key_of_an_endpoint_goes_with_an_order() -> None:
    async def test() -> None:
        async with able() as engine, Kept(StaticSource([target(engine, api_key="s3cret")])) as (keeper, sink):
            await until(lambda: sink.states(engine.address)[-1:] == ["ready"])
            engine.gates["/health"] = engine.gates["/metrics"] = engine.gates["/v1/models"] = asyncio.Event()
            await keeper.control.reset(one(engine))
            assert engine.headers["Authorization"] == "Bearer s3cret"

    run(test)


def test_a_draining_endpoint_is_not_paused() -> None:
    async def test() -> None:
        async with able() as engine, fleet(engine, busy=lambda _: True) as (keeper, _):
            keeper.drain(engine.address)
            (done,) = await keeper.control.pause(one(engine), PauseMode.ABORT, 1.0)
            assert done.problem.startswith("it is draining")
            assert engine.orders == []

    run(test)
