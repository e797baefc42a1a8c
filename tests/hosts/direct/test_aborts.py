"""Requests that the router has cut, wherever they are on their way, in the direct data plane."""

import asyncio
import json

import pytest

from shoal.routing.commands import Cut, Evict
from shoal.routing.events import SessionAborted
from tests.hosts.direct.direct_rig import (
    CHUNKED_HEAD,
    Pool,
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

EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
MESSAGES = {"model": "m", "stream": True, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
SESSION = "x-session-id: doomed\r\n"


def abort(it: Pool) -> int:
    """What the admin page does."""
    commands = it.picker.driver.feed(SessionAborted("doomed"))
    return it.plane.cut({command.request_id: command for command in commands if isinstance(command, Cut)})


@pytest.mark.parametrize("has_head", [False, True])
async def test_before_the_first_byte_the_client_gets_an_error_and_keeps_its_connection(has_head: bool) -> None:
    lost = asyncio.Event()

    async def script(wire: Wire, _: Seen) -> None:
        if has_head:
            await wire.send(CHUNKED_HEAD)
        await wire.lost()
        lost.set()

    async with pool(2) as it:
        it.prefer(*(engine.address for engine in it.engines))
        engine, other = it.engines
        engine.script = script
        client = await it.client()
        await client.send(request(chat(stream=True), headers=SESSION))
        await until(lambda: len(engine.seen) == 1)
        await asyncio.sleep(0.05)
        assert abort(it) == 1
        answer = await client.answer()
        assert (answer.status, answer.error["code"], answer.is_whole) == (410, "aborted", True)
        await lost.wait()
        outcome = await it.outcome()
        assert (outcome.status, outcome.flags, outcome.is_upstream_failure) == (410, "OA", False)
        assert it.inflight == it.plane.active == len(other.seen) == 0
        it.prefer(other.address)
        await client.send(request())
        assert (await client.answer()).status == 200


@pytest.mark.parametrize(("path", "asked"), [("/v1/chat/completions", chat(stream=True)), ("/v1/messages", MESSAGES)])
async def test_a_running_stream_ends_with_an_error_event_and_visibly_broken(
    path: str, asked: dict[str, object]
) -> None:
    lost = asyncio.Event()

    async def script(wire: Wire, _: Seen) -> None:
        await wire.send(CHUNKED_HEAD + chunk(EVENT))
        await wire.lost()
        lost.set()

    async with pool() as it:
        it.engines[0].script = script
        client, spared = await it.client(), await it.client()
        await client.send(request(asked, path=path, headers=SESSION))
        await spared.send(request(asked, path=path))
        await client.head()
        await spared.head()
        assert await client.reader.readexactly(len(chunk(EVENT))) == chunk(EVENT)
        assert abort(it) == 1
        heard = await client.reader.read()
        data = json.loads(heard.partition(b"data: ")[2].partition(b"\n")[0])
        assert "operator" in data["error"]["message"]
        assert not heard.endswith(b"0\r\n\r\n")
        await lost.wait()
        outcome = await it.outcome()
        assert (outcome.status, outcome.is_cut, outcome.is_upstream_failure, outcome.flags) == (200, True, False, "OA")
        assert it.plane.active == 1
        assert abort(it) == 0
        spared.close()


async def test_a_request_whose_engine_is_dialled_is_answered_and_leaves_nothing_behind() -> None:
    with deaf_address() as address:
        async with pool() as it:
            it.join(address)
            it.prefer(address, it.engines[0].address)
            client = await it.client()
            await client.send(request(headers=SESSION))
            await until(lambda: it.plane.active == 1)
            assert abort(it) == 1
            assert (await client.answer()).status == 410
            await it.outcome()
            assert len(it.engines[0].seen) == it.inflight == it.plane.active == 0


async def test_a_request_that_was_taken_back_before_the_cut_reached_it_is_answered_once() -> None:
    config = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nflow: {enabled: true, eviction: before-first-byte}\n"
    async with pool(1, config) as it:
        (engine,) = it.engines
        silent = asyncio.Event()

        async def script(wire: Wire, _: Seen) -> None:
            silent.set()
            await wire.lost()

        engine.script = script
        client = await it.client()
        await client.send(request(chat(stream=True), headers=SESSION))
        await silent.wait()
        commands = it.picker.driver.feed(SessionAborted("doomed"))
        (cut,) = [command for command in commands if isinstance(command, Cut)]
        # The router asked for its place just before it was told to end the session.
        it.plane.evict(Evict(cut.request_id, cut.refusal, cut.api))
        assert it.plane.cut({cut.request_id: cut}) == 1
        assert (await client.answer()).status == 410
        engine.script = says(plain())
        assert [(await client.ask(request())).status for _ in range(2)] == [200, 200]
        await until(lambda: it.inflight == 0)
        assert (it.plane.active, it.picker.buffered_bytes, it.picker.driver.waiting) == (0, 0, 0)
