"""Bodies of every size, the limit, and who may hold how much."""

import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from shoal.hosts.driver import Driver
from shoal.hosts.extproc.http2 import Connection, Http2Event, Received
from shoal.hosts.extproc.lean import LeanServer
from tests.hosts.envoy.envoy_rig import Rig, rig
from tests.hosts.extproc.test_exchange import Door, chat

pytestmark = pytest.mark.e2e

MIB = 1 << 20
LIMIT = 64 * MIB


@pytest.mark.parametrize("size", [1 << 10, 32 << 10, 128 << 10, MIB + 1, 4 * MIB + 1, 16 * MIB, 32 * MIB, LIMIT])
async def test_a_body_up_to_the_limit_reaches_picker_and_engine(live: Rig, size: int) -> None:
    answer = await live.send("/ladder", live.engines[0].address, body=bytes(size))
    assert answer.status == 200
    assert json.loads(answer.body)["bytes"] == size
    assert [seen for picker in live.pickers for seen in picker.bodies] == [size]


@pytest.mark.parametrize("excess", [1, MIB])
async def test_a_body_over_the_limit_is_413_with_the_limit_named(live: Rig, excess: int) -> None:
    answer = await live.send("/over", live.engines[0].address, body=bytes(LIMIT + excess))
    assert answer.status == 413
    assert str(LIMIT) in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"
    assert live.engines[0].hits == 0


async def test_a_chunked_body_over_the_limit_is_413_too(live: Rig) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(66):
            yield bytes(MIB)

    headers = {"x-test-pick": live.engines[0].address}
    async with live.client.post(live.url + "/chunked", data=pieces(), headers=headers) as answer:
        assert answer.status == 413


async def test_a_large_body_is_retried_whole(live: Rig) -> None:
    first, second = live.engines

    async def die(request: web.Request, _: bytes) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    first.answers["/again"] = die
    answer = await live.send("/again", f"{first.address},{second.address}", body=bytes(48 * MIB))
    assert json.loads(answer.body) == {"served": second.address, "bytes": 48 * MIB}


async def test_the_picker_can_refuse_by_the_declared_length_before_the_body_comes(live: Rig) -> None:
    head = b"POST /early HTTP/1.1\r\nhost: x\r\nx-test-refuse: 413\r\ncontent-length: 60000000\r\n\r\n"
    assert (await live.raw_answer(head)).status == 413
    assert live.pickers[0].bodies + live.pickers[1].bodies == []


async def test_a_large_answer_on_an_unknown_path_streams_through(live: Rig) -> None:
    size = 80 * MIB

    async def file(_: web.Request, __: bytes) -> web.Response:
        return web.Response(body=bytes(size), content_type="application/json")

    live.engines[0].answers["/v1/files/1/content"] = file
    answer = await live.send("/v1/files/1/content", live.engines[0].address)
    assert (answer.status, len(answer.body)) == (200, size)


async def test_a_long_body_comes_to_our_own_server_in_long_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    receive = Connection.receive

    def noted(self: Connection, data: bytes) -> list[Http2Event]:
        events = receive(self, data)
        sizes.extend(len(event.data) for event in events if isinstance(event, Received))
        return events

    monkeypatch.setattr(Connection, "receive", noted)
    monkeypatch.setattr(Driver, "_arm", lambda self, now: None)
    async with rig(pickers=1) as made:
        await made.pickers[0].stop()
        server = LeanServer(Door().picker, made.pickers[0].path)
        server.set_serving(True)
        await server.start()
        body = json.dumps(chat("x" * 400_000, model="nobody's")).encode()
        answer = await made.send("/v1/chat/completions", body=body)
        await server.stop(0.0)
    assert answer.status == 404
    assert "nobody's" in answer.error["message"]
    assert max(sizes) > 100_000


async def test_multipart_audio_passes_unchanged(live: Rig) -> None:
    engine = live.engines[0]
    body = b"--b\r\ncontent-disposition: form-data; name=file\r\n\r\n" + bytes(range(256)) * 4000 + b"\r\n--b--\r\n"
    await live.send(
        "/v1/audio/transcriptions", engine.address, body=body, Content_Type="multipart/form-data; boundary=b"
    )
    assert engine.requests[0][2] == body
