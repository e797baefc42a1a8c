"""What a picker's death costs, in both failure modes."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator

import aiohttp
import pytest

from shoal.hosts.envoy import FailureMode
from shoal.hosts.envoy.settings import Clocks
from tests.hosts.envoy.envoy_rig import Answer, Rig, picker_process, rig, sse

pytestmark = pytest.mark.e2e

ALLOWED = "http.public.ext_proc.failure_mode_allowed"


@contextlib.asynccontextmanager
async def killable(mode: FailureMode, pickers: int) -> AsyncIterator[tuple[Rig, list[asyncio.subprocess.Process]]]:
    """A rig whose pickers are processes."""
    async with rig(pickers=pickers, failure_mode=mode) as made:
        for picker in made.pickers:
            await picker.stop()
        processes = [await picker_process(picker.id, picker.path) for picker in made.pickers]
        try:
            await healthy(made, pickers)
            yield made, processes
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


async def healthy(made: Rig, count: int) -> None:
    async with asyncio.timeout(15):
        while await made.stat("cluster.pickers.membership_healthy") != count:
            await asyncio.sleep(0.05)


async def served(made: Rig, path: str, pick: str, count: int) -> list[str]:
    """Addresses that served `count` requests."""
    answers = [await made.send(path, pick) for _ in range(count)]
    return [json.loads(answer.body)["served"] for answer in answers]


async def test_killing_one_of_two_pickers_costs_nothing_but_its_own_queue() -> None:
    async with killable(FailureMode.OPEN, 2) as (made, processes):
        first, second = made.engines
        for engine in made.engines:
            engine.answers["/stream"] = lambda request, _: sse(request, [{}] * 30, gap_s=0.1)
        streams = [asyncio.create_task(made.send("/stream", first.address)) for _ in range(8)]
        queued = [asyncio.create_task(made.send("/queued", first.address, x_test_hold="1.5")) for _ in range(8)]
        await asyncio.sleep(0.7)
        processes[0].kill()
        await processes[0].wait()
        # None of those that come later passes a picker by, though Envoy still deals half of them to the dead one.
        assert set(await served(made, "/later", first.address, 60)) == {first.address}
        assert await made.stat(ALLOWED) <= 8 + 8
        answers: list[Answer] = await asyncio.gather(*streams, *queued)
        assert [answer.status for answer in answers] == [200] * 16
        assert all(answer.body.count(b"data:") == 30 for answer in answers[:8])
        processes[0] = await picker_process("0", made.pickers[0].path)
        await healthy(made, 2)
        assert set(await served(made, "/back", second.address, 10)) == {second.address}


async def test_without_any_picker_envoy_balances_new_requests_and_streams_go_on() -> None:
    async with killable(FailureMode.OPEN, 1) as (made, processes):
        first, second = made.engines
        first.answers["/stream"] = lambda request, _: sse(request, [{}] * 20, gap_s=0.1)
        stream = asyncio.create_task(made.send("/stream", first.address))
        await asyncio.sleep(0.5)
        processes[0].kill()
        await processes[0].wait()
        assert (await made.send("/open", first.address)).status == 200
        assert (await stream).body.count(b"data:") == 20
        answers = [
            await made.send("/open", first.address, x_gateway_destination_endpoint=first.address) for _ in range(30)
        ]
        addresses = [json.loads(answer.body)["served"] for answer in answers]
        # Balanced, so a client's own claim about where to go is not honoured either.
        assert min(addresses.count(first.address), addresses.count(second.address)) >= 3
        assert await made.stat(ALLOWED) >= 30
        processes[0] = await picker_process("0", made.pickers[0].path)
        await healthy(made, 1)
        assert set(await served(made, "/back", second.address, 10)) == {second.address}


async def test_closed_mode_refuses_new_requests_but_lets_streams_go_on() -> None:
    async with killable(FailureMode.CLOSED, 1) as (made, processes):
        first = made.engines[0]
        first.answers["/stream"] = lambda request, _: sse(request, [{}] * 20, gap_s=0.1)
        stream = asyncio.create_task(made.send("/stream", first.address))
        queued = asyncio.create_task(made.send("/queued", first.address, x_test_hold="5"))
        await asyncio.sleep(0.5)
        hits = first.hits
        processes[0].kill()
        await processes[0].wait()
        for answer in [await queued, await made.send("/closed", first.address)]:
            assert (answer.status, answer.error["code"]) == (503, "picker_unavailable")
            assert answer.headers["Retry-After"] == "1"
        assert (await stream).body.count(b"data:") == 20
        assert first.hits == hits
        processes[0] = await picker_process("0", made.pickers[0].path)
        await healthy(made, 1)
        assert (await made.send("/back", first.address)).status == 200


async def test_a_picker_that_is_stopped_loses_its_requests_to_the_other_one() -> None:
    async with killable(FailureMode.OPEN, 2) as (made, processes):
        first = made.engines[0]
        await served(made, "/warm", first.address, 4)
        processes[0].send_signal(signal.SIGSTOP)
        answers = await asyncio.gather(*(made.send("/x", first.address) for _ in range(6)))
        assert [answer.status for answer in answers] == [200] * 6
        await healthy(made, 1)
        assert set(await served(made, "/then", first.address, 10)) == {first.address}


async def test_a_request_passes_unrouted_when_the_pickers_time_is_over() -> None:
    async with rig(clocks=Clocks(message_s=0.5)) as made:
        answer = await made.send("/slow", made.engines[0].address, x_test_hold="3")
        assert answer.status == 200
        assert await made.stat(ALLOWED) == 1
        record = await made.record("/slow")
        assert (record.request_id, record.picker) == ("", "")
        assert made.pickers[0].records == [record]


async def test_more_requests_at_once_than_envoys_own_defaults_allow_all_meet_the_picker() -> None:
    count = 1200
    async with rig(pickers=1) as made:
        picker = made.pickers[0]
        picker.hold = asyncio.Event()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as made.client:
            sent = [asyncio.create_task(made.send("/crowd", made.engines[n % 2].address)) for n in range(count)]
            async with asyncio.timeout(120):
                while picker.open_streams < count:
                    assert [task for task in sent if task.done()] == []
                    await asyncio.sleep(0.05)
            picker.hold.set()
            answers = await asyncio.gather(*sent)
        assert {answer.status for answer in answers} == {200}
        assert await made.stat(ALLOWED) == 0
        assert await made.stat("cluster.pickers.upstream_rq_pending_overflow") == 0
        assert await made.stat("cluster.engines.upstream_rq_pending_overflow") == 0
        await made.record("/crowd", count)
        assert await made.stat("access_logs.grpc_access_log.logs_dropped") == 0
        assert {record.outcome.served_address for record in made.records} == {one.address for one in made.engines}
