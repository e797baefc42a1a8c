"""Failures before the first byte of an answer's body: tried elsewhere within a budget, recorded, and never twice."""

import asyncio
import socket

import pytest

from shoal.hosts.direct.settings import DirectClocks
from tests.hosts.direct.direct_rig import (
    CHUNKED_HEAD,
    OK_BODY,
    Seen,
    Wire,
    chat,
    chunk,
    deaf_address,
    plain,
    pool,
    request,
    says,
    until,
)

NO_RETRY = "x-shoal-no-retry: true\r\n"


async def dies(wire: Wire, _: Seen) -> None:
    wire.abort()


async def dies_in_prefill(wire: Wire, _: Seen) -> None:
    await wire.send(CHUNKED_HEAD)
    await asyncio.sleep(0.05)
    wire.abort()


async def hangs_up(wire: Wire, _: Seen) -> None:
    wire.writer.close()


async def dies_in_its_head(wire: Wire, _: Seen) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\ncontent-le")
    wire.abort()


def dead_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("script", [dies, hangs_up, dies_in_its_head, dies_in_prefill])
async def test_an_engine_lost_before_its_first_byte_is_replaced_by_the_next(script: object) -> None:
    async with pool(2) as it:
        first, second = it.engines
        it.prefer(first.address, second.address)
        first.script = script  # type: ignore[assignment]
        client = await it.client()
        answer = await client.ask(request(chat(stream=True)))
        assert (answer.status, answer.body) == (200, OK_BODY)
        assert answer.header("x-shoal-endpoint") == second.address
        assert first.seen[0].body == second.seen[0].body
        outcome = await it.outcome()
        assert (outcome.attempts, outcome.served_address, outcome.is_upstream_failure) == (2, second.address, False)
        assert it.plane.retrying == it.plane.active == it.inflight == 0


async def test_an_engine_that_cannot_be_reached_is_replaced_by_the_next() -> None:
    async with pool(1) as it:
        dead = dead_address()
        it.join(dead)
        it.prefer(dead, it.engines[0].address)
        assert (await it.ask(request())).status == 200
        assert (await it.outcome()).attempts == 2


@pytest.mark.parametrize("status", ["502 Bad Gateway", "503 Service Unavailable", "504 Gateway Timeout"])
async def test_an_overloaded_engine_is_replaced_and_its_own_error_passes_when_all_are(status: str) -> None:
    busy = plain(b'{"error":{"message":"busy"}}', status, b"x-mine: 1\r\n")
    async with pool(2) as it:
        first, second = it.engines
        it.prefer(first.address, second.address)
        first.script = says(busy)
        assert (await it.ask(request())).body == OK_BODY
        second.script = says(busy)
        answer = await it.ask(request())
        assert (answer.status, answer.body) == (int(status[:3]), b'{"error":{"message":"busy"}}')
        assert answer.header("x-mine") == "1"
        outcome = await it.outcome(2)
        assert (outcome.attempts, outcome.status) == (2, int(status[:3]))
        assert outcome.is_upstream_failure


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500])
async def test_other_errors_of_an_engine_pass_unchanged_and_are_not_retried(status: int) -> None:
    async with pool(2) as it:
        first, second = it.engines
        it.prefer(first.address, second.address)
        first.script = says(plain(b"mine", f"{status} Mine"))
        answer = await it.ask(request())
        assert (answer.status, answer.body) == (status, b"mine")
        assert len(second.seen) == 0
        assert (await it.outcome()).is_upstream_failure is (status >= 500)


async def test_when_every_engine_is_lost_the_client_gets_503_and_the_connection_lives() -> None:
    async with pool(3) as it:
        it.prefer(*(engine.address for engine in it.engines))
        for engine in it.engines:
            engine.script = dies
        client = await it.client()
        answer = await client.ask(request())
        assert (answer.status, answer.error["code"]) == (503, "engine_unavailable")
        assert [len(engine.seen) for engine in it.engines] == [1, 1, 1]
        outcome = await it.outcome()
        assert (outcome.attempts, outcome.status, outcome.flags) == (3, 503, "UC,URX")
        assert outcome.is_upstream_failure
        assert not outcome.is_cut
        it.engines[0].script = says(plain())
        assert (await client.ask(request())).status == 200


async def test_tries_end_with_the_list_and_with_what_is_configured() -> None:
    config = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nretries: {attempts: 1}\n"
    async with pool(3, config) as it:
        it.prefer(*(engine.address for engine in it.engines))
        for engine in it.engines:
            engine.script = dies
        assert (await it.ask(request())).status == 503
        assert [len(engine.seen) for engine in it.engines] == [1, 1, 0]


async def test_a_request_that_may_not_be_retried_is_sent_once() -> None:
    async with pool(2) as it:
        it.prefer(*(engine.address for engine in it.engines))
        it.engines[0].script = dies
        assert (await it.ask(request(headers=NO_RETRY))).status == 503
        assert (await it.ask(request(chat(disable_fallbacks=True)))).status == 503
        assert [len(engine.seen) for engine in it.engines] == [2, 0]


async def test_a_request_that_may_not_be_retried_is_not_risked_on_a_used_connection() -> None:
    async with pool(1) as it:
        client = await it.client()
        await client.ask(request())
        await client.ask(request(headers=NO_RETRY))
        assert it.engines[0].connections == 2


async def test_retries_stay_within_their_budget() -> None:
    async with pool(2, min_retries=2, budget_ratio=0.0) as it:
        first, second = it.engines
        it.prefer(first.address, second.address)
        first.script = dies
        waiting = asyncio.Event()

        async def waits(wire: Wire, _: Seen) -> None:
            await waiting.wait()
            await wire.send(plain())

        second.script = waits
        asks = [asyncio.ensure_future(it.ask(request())) for _ in range(6)]
        await until(lambda: sum(ask.done() for ask in asks) == 4)
        assert it.plane.retrying == 2
        waiting.set()
        statuses = [(await ask).status for ask in asks]
        assert sorted(statuses) == [200, 200, 503, 503, 503, 503]
        await it.outcome(6)
        assert it.plane.retrying == 0


async def test_a_connection_that_the_engine_had_closed_costs_no_try() -> None:
    async with pool(1) as it:
        engine = it.engines[0]

        async def closes_on_second(wire: Wire, _: Seen) -> None:
            if len(engine.seen) == 2:
                wire.abort()
            else:
                await wire.send(plain())

        engine.script = closes_on_second
        client = await it.client()
        await client.ask(request())
        assert (await client.ask(request())).status == 200
        assert len(engine.seen) == 3
        outcome = await it.outcome(2)
        assert (outcome.attempts, outcome.is_upstream_failure) == (1, False)


async def test_an_engine_that_was_started_anew_is_found_though_its_old_connections_are_dead() -> None:
    async with pool(1) as it:
        engine = it.engines[0]
        await asyncio.gather(*(it.ask(request()) for _ in range(8)))
        port = int(engine.address.rpartition(":")[2])
        await engine.stop()
        await engine.start(port=port)
        for _ in range(4):
            assert (await it.ask(request())).status == 200


async def test_unused_engine_connections_are_closed_before_the_engine_would() -> None:
    async with pool(1, clocks=DirectClocks(engine_idle_s=0.2)) as it:
        await it.ask(request())
        await until(lambda: it.engines[0].closed == 1)
        assert (await it.ask(request())).status == 200
        assert it.engines[0].connections == 2


async def test_an_engine_that_does_not_accept_in_time_counts_as_unreachable() -> None:
    with deaf_address() as address:
        async with pool(1, clocks=DirectClocks(connect_s=0.2)) as it:
            it.join(address)
            it.prefer(address, it.engines[0].address)
            assert (await it.ask(request())).status == 200
            assert (await it.outcome()).attempts == 2


async def test_failures_eject_an_engine_through_their_records() -> None:
    async with pool(1) as it:
        it.engines[0].script = dies
        for _ in range(3):
            assert (await it.ask(request())).error["code"] == "engine_unavailable"
        (status,) = it.picker.driver.router.status().endpoints
        assert (str(status.state), status.failures_total) == ("ejected", 3)


async def test_a_held_head_goes_out_when_its_body_is_long_in_coming() -> None:
    async def late(wire: Wire, _: Seen) -> None:
        await wire.send(CHUNKED_HEAD)
        await asyncio.sleep(0.8)
        await wire.send(chunk(b"data: 1\n\n") + b"0\r\n\r\n")

    async with pool(1, clocks=DirectClocks(hold_s=0.2)) as it:
        it.engines[0].script = late
        client = await it.client()
        await client.send(request(chat(stream=True)))
        status, _ = await client.head()
        assert status == 200
        assert it.accounts == []
        assert await client.reader.readexactly(14) == chunk(b"data: 1\n\n")
        outcome = await it.outcome()
        assert outcome.ttft_s is not None
        assert outcome.ttft_s > 0.7


async def test_an_empty_answer_without_length_is_an_answer() -> None:
    async def script(wire: Wire, _: Seen) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\n\r\n")
        wire.writer.close()

    async with pool(1) as made:
        made.engines[0].script = script
        answer = await made.ask(request())
        assert (answer.status, answer.body) == (200, b"")
