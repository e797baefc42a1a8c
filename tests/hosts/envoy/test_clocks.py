"""Timers with shortened clocks, limits on clients, and Envoy's own answers."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from shoal.hosts.envoy.settings import Clocks, Limits
from tests.hosts.envoy.envoy_rig import Rig, rig, sse

pytestmark = pytest.mark.e2e

SETUP = {
    "clocks": Clocks(message_s=3.0, stream_idle_s=2.0, upload_s=1.0, headers_s=1.0),
    "limits": Limits(max_body_bytes=100_000, max_connections=40),
}


async def test_a_stream_longer_than_every_timer_passes(live: Rig) -> None:
    live.engines[0].answers["/long"] = lambda request, _: sse(request, [{}] * 9, gap_s=0.5)
    answer = await live.send("/long", live.engines[0].address)
    assert answer.body.count(b"data:") == 9
    assert (await live.record("/long")).outcome.duration_s > SETUP["clocks"].message_s  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/quiet", "/v1/chat/completions"])
async def test_an_answer_without_a_byte_passes_within_the_idle_time_and_is_504_after_it(live: Rig, path: str) -> None:
    async def quiet(request: web.Request, _: bytes) -> web.Response:
        await asyncio.sleep(float(request.query["s"]))
        return web.json_response({})

    live.engines[0].answers[path] = quiet
    # Longer than the upload timer, which must not run once the request is here.
    assert (await live.send(f"{path}?s=1.4", live.engines[0].address)).status == 200
    answer = await live.send(f"{path}?s=9", live.engines[0].address)
    assert (answer.status, answer.error["code"]) == (504, "gateway_timeout")
    outcomes = [record.outcome for record in live.records if record.path == path]
    async with asyncio.timeout(5):
        while len(outcomes) < 2:
            await asyncio.sleep(0.02)
            outcomes = [record.outcome for record in live.records if record.path == path]
    assert sorted((one.status, one.is_upstream_failure) for one in outcomes) == [(200, False), (504, True)]


async def test_a_wait_for_the_picker_longer_than_the_upload_time_passes(live: Rig) -> None:
    assert (await live.send("/wait", live.engines[0].address, x_test_hold="1.5")).status == 200


async def test_a_body_that_does_not_come_in_time_is_408(live: Rig) -> None:
    answer = await live.raw_answer(b"POST /half HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc")
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")


async def test_a_slow_upload_is_no_time_of_the_engine(live: Rig) -> None:
    reader, writer = await live.raw(b"POST /slow-upload HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
    await asyncio.sleep(0.5)
    writer.write(b"cd")
    async with asyncio.timeout(10):
        assert b" 200 " in await reader.readline()
    outcome = (await live.record("/slow-upload")).outcome
    writer.close()
    assert outcome.ttft_s is not None
    assert outcome.engine_ttft_s is not None
    assert outcome.ttft_s - outcome.engine_ttft_s >= 0.45


async def test_a_request_over_the_longest_life_is_cut_or_says_so_and_is_no_failure_of_the_engine() -> None:
    async def late(_: web.Request, __: bytes) -> web.Response:
        await asyncio.sleep(9)
        return web.json_response({})

    async with rig(engines=1, pickers=1, clocks=Clocks(stream_s=0.6)) as short:
        (engine,) = short.engines
        engine.answers["/stream"] = lambda request, _: sse(request, [{}] * 90, gap_s=0.1)
        engine.answers["/late"] = late
        with pytest.raises(aiohttp.ClientPayloadError):
            await short.send("/stream", engine.address)
        answer = await short.send("/late", engine.address)
        assert (answer.status, answer.error["code"]) == (504, "gateway_timeout")
        assert "no end within 0.6 s" in answer.error["message"]
        for path in ("/stream", "/late"):
            assert not (await short.record(path)).outcome.is_upstream_failure


async def test_a_websocket_outlives_the_upload_time(live: Rig) -> None:
    url = live.url.replace("http", "ws") + "/v1/realtime"
    async with live.client.ws_connect(url, headers={"x-test-pick": live.engines[0].address}) as socket:
        for _ in range(2):
            await asyncio.sleep(1.2)
            await socket.send_str("still")
            assert (await socket.receive()).data.endswith("still")


async def test_connections_over_the_limit_are_closed_at_once_and_the_rest_served(live: Rig) -> None:
    opened = [await live.raw(b"") for _ in range(60)]
    await asyncio.sleep(0.2)
    closed = sum(reader.at_eof() for reader, _ in opened)
    for _, writer in opened:
        writer.close()
    assert closed >= 20
    async with asyncio.timeout(5):
        while await live.stat("http.public.downstream_cx_active") > 20:
            await asyncio.sleep(0.02)
    assert (await live.send("/still", live.engines[0].address)).status == 200


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nhost: x\r\nbig: " + b"x" * 200_000 + b"\r\n\r\n", 431),
        (b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc", 400),
        (b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" + b"x" * 200_000, 413),
    ],
)
async def test_every_answer_of_envoy_itself_is_an_openai_error(live: Rig, text: bytes, status: int) -> None:
    answer = await live.raw_answer(text)
    assert answer.status == status
    assert set(answer.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 429, 500, 503, 504])
async def test_a_refusal_by_the_picker_passes_word_for_word(live: Rig, status: int) -> None:
    answer = await live.send("/refused", x_test_refuse=str(status))
    assert (answer.status, answer.body) == (status, b'{"error":{"message":"from the picker"}}')
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["Retry-After"] == "7"
    record = await live.record("/refused")
    assert record.is_refused
    assert record.outcome.served_address == ""
    assert not record.outcome.is_upstream_failure


async def test_a_picker_that_never_answers_lets_the_request_pass_unrouted_and_is_counted(live: Rig) -> None:
    before = await live.stat("http.public.ext_proc.failure_mode_allowed")
    for picker in live.pickers:
        picker.hold = asyncio.Event()
    live.engines[0].answers["/never"] = live.engines[1].answers["/never"] = lambda request, _: sse(request, [{}])
    # The idle time is shorter than the picker's time here, and ends the wait: nothing is forwarded.
    assert (await live.send("/never", live.engines[0].address)).status == 504
    assert await live.stat("http.public.ext_proc.failure_mode_allowed") == before
