"""Requests that the router answers later, in the direct data plane."""

import asyncio
import json

import pytest

from shoal.hosts.direct.settings import DirectClocks
from tests.hosts.direct.direct_rig import Pool, chat, pool, request, until
from tests.hosts.waiting_router import AskingRouter, HeldTokens


def held(it: Pool) -> HeldTokens:
    tokens = HeldTokens()
    it.picker.tokens = tokens
    return tokens


def is_clean(it: Pool, router: AskingRouter, tokens: HeldTokens) -> bool:
    books = (it.inflight, it.picker.driver.waiting, it.picker.buffered_bytes, it.plane.active)
    return books == (0, 0, 0, 0) and not tokens.open and not router.asked


async def test_a_request_goes_to_an_engine_when_the_router_has_decided() -> None:
    router = AskingRouter()
    async with pool(router=router) as it:
        tokens = held(it)
        client = await it.client()
        await client.send(request(chat(text="x" * 1000)))
        await until(lambda: len(tokens.open) == 1)
        assert it.picker.buffered_bytes > 1000
        assert it.engines[0].seen == []
        tokens.give()
        assert (await client.answer()).status == 200
        assert json.loads(it.engines[0].seen[0].body) == chat(text="x" * 1000)
        assert (await it.outcome()).status == 200
        assert is_clean(it, router, tokens)


async def test_pipelined_requests_wait_one_after_the_other() -> None:
    router = AskingRouter()
    async with pool(router=router) as it:
        tokens = held(it)
        client = await it.client()
        await client.send(request() * 3)
        for _ in range(3):
            await until(lambda: len(tokens.open) == 1)
            tokens.give()
            assert (await client.answer()).status == 200
        await it.outcome(3)
        assert is_clean(it, router, tokens)


async def test_a_refusal_that_comes_late_is_answered_and_the_connection_goes_on() -> None:
    router = AskingRouter()
    async with pool(router=router) as it:
        tokens = held(it)
        client = await it.client()
        await client.send(request({"model": "nope", "messages": []}))
        await until(lambda: len(tokens.open) == 1)
        tokens.give()
        assert (await client.answer()).status == 404
        await client.send(request())
        await until(lambda: len(tokens.open) == 1)
        tokens.give()
        assert (await client.answer()).status == 200


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    router = AskingRouter()
    async with pool(router=router) as it:
        tokens = held(it)
        for _ in range(5):
            client = await it.client()
            await client.send(request(chat(text="x" * 50_000)))
            await until(lambda: len(tokens.open) == 1)
            client.abort()
            await until(lambda: is_clean(it, router, tokens))
        assert it.engines[0].seen == []
        assert it.accounts == []


async def test_a_fault_of_the_router_is_a_500_and_nothing_is_booked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a plugin's fault")

    router = AskingRouter()
    async with pool(router=router) as it:
        tokens = held(it)
        client = await it.client()
        await client.send(request())
        await until(lambda: len(tokens.open) == 1)
        monkeypatch.setattr("shoal.scheduling.Scheduler.dispatched", fail)
        tokens.give()
        assert (await client.answer()).status == 500
        assert is_clean(it, router, tokens)


async def test_a_request_may_wait_longer_than_an_engine_may_be_silent() -> None:
    router = AskingRouter()
    clocks = DirectClocks(stream_idle_s=0.2)
    async with pool(router=router, clocks=clocks) as it:
        tokens = held(it)
        client = await it.client()
        await client.send(request())
        await asyncio.sleep(0.6)
        tokens.give()
        assert (await client.answer()).status == 200


async def test_a_request_that_waits_past_the_limit_of_a_stream_is_a_504() -> None:
    router = AskingRouter()
    clocks = DirectClocks(stream_s=0.3)
    async with pool(router=router, clocks=clocks) as it:
        tokens = held(it)
        client = await it.client()
        await client.send(request())
        assert (await client.answer()).status == 504
        assert is_clean(it, router, tokens)


async def test_a_draining_plane_waits_for_requests_that_wait() -> None:
    router = AskingRouter()
    async with pool(router=router) as it:
        tokens = held(it)
        client = await it.client()
        await client.send(request())
        await until(lambda: len(tokens.open) == 1)
        it.plane.drain(0.0)
        drained = asyncio.create_task(it.plane.drained())
        await asyncio.sleep(0.3)
        assert not drained.done()
        tokens.give()
        assert (await client.answer()).status == 200
        await drained
