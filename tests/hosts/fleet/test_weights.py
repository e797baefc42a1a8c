"""New weights behind the same name: what was believed of a cache is forgotten."""

import json

import pytest

from shoal.hosts.fleet import StaticSource
from shoal.hosts.fleet.door import EngineDoor, Unreachable
from shoal.hosts.fleet.weights import MAX_MODELS, Weights
from shoal.pool import ServedModel
from shoal.routing import events
from tests.hosts.fleet.fleet_engines import Kept, ScriptedEngine, run, target, until


def version(number: object) -> bytes:
    return json.dumps({"weight_version": number}).encode()


def listing(**roots: str) -> bytes:
    return json.dumps({"data": [{"id": name, "root": root} for name, root in roots.items()]}).encode()


@pytest.mark.parametrize(("kind", "path"), [("vllm", "/weight_info"), ("sglang", "/model_info")])
def test_a_new_version_empties_the_cache_once(kind: str, path: str) -> None:
    async def test() -> None:
        async with ScriptedEngine(kind) as engine:
            engine.pages[path] = version("step-1")
            async with Kept(StaticSource([target(engine)])) as (_, sink):
                await until(lambda: sink.states(engine.address)[-1:] == ["ready"])
                await settled(engine, path)
                assert sink.of(events.BlocksCleared) == []
                engine.pages[path] = version("step-2")
                await until(lambda: sink.of(events.BlocksCleared))
                await settled(engine, path)
                assert sink.of(events.BlocksCleared) == [events.BlocksCleared(engine.address)]
                assert sink.states(engine.address)[-1] == "ready"

    run(test)


async def settled(engine: ScriptedEngine, path: str) -> None:
    """Wait until an engine was asked a few times more."""
    asked = engine.calls[path]
    await until(lambda: engine.calls[path] > asked + 3)


def test_an_engine_that_does_not_tell_is_asked_once_and_is_ready() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine, Kept(StaticSource([target(engine)])) as (_, sink):
            await until(lambda: sink.states(engine.address)[-1:] == ["ready"])
            await settled(engine, "/v1/models")
            assert engine.calls["/weight_info"] == 1

    run(test)


def test_a_page_that_cannot_be_read_changes_nothing() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            engine.pages["/weight_info"] = version(1)
            async with Kept(StaticSource([target(engine)])) as (_, sink):
                await until(lambda: sink.states(engine.address)[-1:] == ["ready"])
                for page in (
                    b"",
                    b"\xff",
                    b"[" * 10_000,
                    b"[1]",
                    b"{}",
                    version(None),
                    version({"a": 1}),
                    b"x" * 99_999,
                ):
                    engine.pages["/weight_info"] = page
                    await settled(engine, "/weight_info")
                engine.status["/weight_info"] = 500
                await settled(engine, "/weight_info")
                engine.status.clear()
                engine.pages["/weight_info"] = version(1)
                await settled(engine, "/weight_info")
                assert sink.of(events.BlocksCleared) == []
                assert sink.states(engine.address) == ["joined", "ready"]

    run(test)


def test_an_adapter_loaded_under_the_same_name_from_another_place_empties_the_cache() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            engine.models_body = listing(m="/weights", lora="/adapters/1")
            async with Kept(StaticSource([target(engine)])) as (_, sink):
                await until(lambda: sink.states(engine.address)[-1:] == ["ready"])
                engine.models_body = listing(m="/weights", lora="/adapters/1", other="/adapters/9")
                await until(lambda: len(sink.of(events.ModelsSeen)) == 2)
                assert sink.of(events.BlocksCleared) == []
                engine.models_body = listing(m="/weights", lora="/adapters/2", other="/adapters/9")
                await until(lambda: sink.of(events.BlocksCleared))
                await settled(engine, "/v1/models")
                assert len(sink.of(events.BlocksCleared)) == 1

    run(test)


class NoDoor(EngineDoor):
    """An engine that is never asked."""

    def __init__(self) -> None:
        pass

    async def get(self, path: str, *, limit_bytes: int, timeout_s: float) -> bytes:
        raise Unreachable("not there")


def test_an_adapter_that_was_gone_and_is_back_counts_as_another() -> None:
    weights = Weights(NoDoor(), 1.0)
    base, lora = ServedModel(id="m", root="/m"), ServedModel(id="lora", root="/lora", parent="m")
    assert weights.models([base, lora]) == ""
    assert weights.models([base]) == ""
    assert weights.models([base, lora]) == "lora was loaded anew"
    assert weights.models([base, lora]) == ""
    weights.forget()
    assert weights.models([base, lora]) == ""


def test_names_that_come_and_go_are_not_kept_without_bound() -> None:
    weights = Weights(NoDoor(), 1.0)
    for number in range(3 * MAX_MODELS // 100):
        served = [ServedModel(id=f"{number}-{each}") for each in range(100)]
        assert weights.models(served) == ""
    assert weights.models([ServedModel(id="0-0")]) == ""
    assert weights.models(served) != ""
