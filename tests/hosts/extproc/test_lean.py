"""The lean server on a real unix socket: asked by a real gRPC client, and by one that misbehaves."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health_pb2

from shoal.hosts.driver import Driver
from shoal.hosts.envoy.accesslog import RECORD_FIELDS, RECORD_TAG
from shoal.hosts.extproc import Exchange, http2
from shoal.hosts.extproc.http2 import frame
from shoal.hosts.extproc.lean import HEALTH_PATH, PROCESS_PATH, RECORDS_PATH, Deframer, Failed, LeanServer
from tests.hosts.extproc.test_exchange import Door, body, chat, head

Scene = Callable[["Served"], Awaitable[None]]


class Served:
    """A server over two endpoints, a gRPC channel to it, and the exchanges that have ended."""

    def __init__(self, path: str, monkeypatch: pytest.MonkeyPatch, config: str = "") -> None:
        self.door = Door(config)
        self.path = path
        self.server = LeanServer(self.door.picker, path)
        self.ended: list[Exchange] = []
        self.channel: Any = None
        end = Exchange.end

        def ends(exchange: Exchange) -> None:
            self.ended.append(exchange)
            end(exchange)

        monkeypatch.setattr(Exchange, "end", ends)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Served"]:
        await self.server.start()
        self.server.set_serving(True)
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(f"unix:{self.path}", options=options) as channel:
            self.channel = channel
            try:
                yield self
            finally:
                await self.server.stop(None)

    @property
    def inflight(self) -> int:
        return self.door.driver.router.status().inflight

    def process(self) -> Any:
        return self.channel.stream_stream(
            PROCESS_PATH,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()

    def records(self) -> Any:
        return self.channel.stream_unary(
            RECORDS_PATH,
            request_serializer=als_pb2.StreamAccessLogsMessage.SerializeToString,
            response_deserializer=als_pb2.StreamAccessLogsResponse.FromString,
        )()

    async def health(self, service: str = "") -> int:
        check = self.channel.unary_unary(
            HEALTH_PATH,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        return int((await check(health_pb2.HealthCheckRequest(service=service))).status)

    async def routed(self) -> Any:
        """A request that was sent to an endpoint and goes on."""
        call = self.process()
        await call.write(head(content_length="100"))
        assert (await call.read()).HasField("request_headers")
        await call.write(body(chat()))
        assert (await call.read()).dynamic_metadata["envoy.lb"]
        return call


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(Driver, "_arm", lambda self, now: None)

    def run(scene: Scene, config: str = "") -> None:
        async def main() -> None:
            async with asyncio.timeout(60), Served(str(tmp_path / "s"), monkeypatch, config).open() as served:
                await scene(served)

        uvloop.run(main())

    return run


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.005)


def test_a_request_is_placed_and_its_end_is_told_once(play: Callable[..., None]) -> None:
    async def scene(served: Served) -> None:
        call = await served.routed()
        assert served.inflight == 1
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
        assert await call.code() == grpc.StatusCode.OK
        assert len(served.ended) == 1
        assert served.inflight == 0

    play(scene)


def test_a_cancelled_stream_ends_its_exchange_once(play: Callable[..., None]) -> None:
    async def scene(served: Served) -> None:
        calls = [await served.routed() for _ in range(3)]
        calls[1].cancel()
        await until(lambda: len(served.ended) == 1)
        assert served.inflight == 2

    play(scene)


def test_a_lost_connection_ends_all_its_exchanges_once(play: Callable[..., None]) -> None:
    async def scene(served: Served) -> None:
        for _ in range(5):
            await served.routed()
        await served.channel.close()
        await until(lambda: len(served.ended) == 5)
        assert len(set(map(id, served.ended))) == 5
        assert served.inflight == 0

    play(scene)


def test_a_body_of_sixty_four_mebibytes_is_taken_and_a_larger_message_is_not(play: Callable[..., None]) -> None:
    async def scene(served: Served) -> None:
        call = served.process()
        await call.write(head())
        await call.read()
        await call.write(body(chat("x" * (64 * 1024 * 1024 - 200))))
        assert (await call.read()).dynamic_metadata["envoy.lb"]
        call = served.process()
        await call.write(body(b"x" * (66 * 1024 * 1024)))
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: len(served.ended) == 1)

    play(scene)


def test_an_answer_longer_than_the_clients_windows_arrives_whole(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = pb.ProcessingResponse()
    long.request_body.response.body_mutation.body = bytes(20_000_000)
    monkeypatch.setattr(Exchange, "receive", lambda self, message: [long.SerializeToString()] * 3)

    async def scene(served: Served) -> None:
        calls = [served.process() for _ in range(4)]
        for call in calls:
            await call.write(head())
        for call in calls:
            for _ in range(3):
                assert await call.read() == long
            await call.done_writing()
            assert await call.code() == grpc.StatusCode.OK

    play(scene)


def test_a_request_that_cannot_be_placed_ends_with_an_error_and_is_counted(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(self: Exchange, message: Any) -> list[bytes]:
        raise ZeroDivisionError

    monkeypatch.setattr(Exchange, "receive", breaks)

    async def scene(served: Served) -> None:
        call = served.process()
        await call.write(head())
        assert await call.code() == grpc.StatusCode.INTERNAL
        assert [each.value for each in served.door.driver.fold.unplaced.family().samples] == [1]
        assert len(served.ended) == 1

    play(scene)


def test_many_streams_at_once_are_all_answered(play: Callable[..., None]) -> None:
    async def scene(served: Served) -> None:
        calls = await asyncio.gather(*(served.routed() for _ in range(1_300)))
        assert served.inflight == 1_300
        for call in calls:
            await call.done_writing()
        assert {await call.code() for call in calls} == {grpc.StatusCode.OK}
        assert len(served.ended) == 1_300

    play(scene)


def test_health_follows_serving_and_liveness_does_not(play: Callable[..., None]) -> None:
    async def scene(served: Served) -> None:
        assert [await served.health(), await served.health("readiness")] == [1, 1]
        served.server.set_serving(False)
        assert [await served.health(), await served.health("liveness")] == [2, 1]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await served.health("somebody else")
        assert error.value.code() == grpc.StatusCode.NOT_FOUND

    play(scene)


def test_a_method_that_is_not_here_is_unimplemented(play: Callable[..., None]) -> None:
    async def scene(served: Served) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await served.channel.unary_unary("/shoal.Nobody/Home")(b"hello")
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED

    play(scene)


def test_records_reach_the_router_and_their_stream_ends_when_a_successor_takes_over(
    play: Callable[..., None],
) -> None:
    async def scene(served: Served) -> None:
        request = await served.routed()
        message = als_pb2.StreamAccessLogsMessage()
        entry = message.http_logs.log_entry.add()
        fields = ["-"] * len(RECORD_FIELDS)
        fields[0] = json.dumps({"id": "run-1", "picker": "0"})
        entry.common_properties.custom_tags[RECORD_TAG] = "\t".join(fields)
        stream = served.records()
        await stream.write(message)
        await request.done_writing()
        await until(lambda: len(served.door.accounts) == 1)
        assert served.door.accounts[0].request_id == "run-1"
        served.door.picker.draining.set()
        assert await stream == als_pb2.StreamAccessLogsResponse()

    play(scene)


def test_stopping_waits_for_open_requests_and_takes_no_new_connections(play: Callable[..., None]) -> None:
    async def scene(served: Served) -> None:
        call = await served.routed()
        stopping = asyncio.create_task(served.server.stop(60.0))
        await asyncio.sleep(0.1)
        with pytest.raises(OSError):
            await asyncio.open_unix_connection(served.path)
        assert not stopping.done()
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.OK
        await stopping
        assert len(served.ended) == 1

    play(scene)


def test_a_second_shorter_stop_cuts_what_the_first_one_waits_for(play: Callable[..., None]) -> None:
    async def scene(served: Served) -> None:
        await served.routed()
        stopping = asyncio.create_task(served.server.stop(3600.0))
        await asyncio.sleep(0.05)
        await served.server.stop(0.05)
        await stopping
        assert len(served.ended) == 1

    play(scene)


def test_a_client_that_speaks_something_else_is_told_goodbye_and_the_others_stay(play: Callable[..., None]) -> None:
    async def scene(served: Served) -> None:
        call = await served.routed()
        reader, writer = await asyncio.open_unix_connection(served.path)
        writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        said = await reader.read()
        assert said[-17 + 3] == http2.GOAWAY
        writer.close()
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.OK

    play(scene)


def test_a_client_that_does_not_read_is_not_read_either(play: Callable[..., None]) -> None:
    async def scene(served: Served) -> None:
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        client.connect(served.path)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, http2.PREFACE + frame(http2.SETTINGS, 0, 0))
        pings = frame(http2.PING, 0, 0, b"12345678") * 10_000
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 400:
                async with asyncio.timeout(1.0):
                    await loop.sock_sendall(client, pings)
                sent += 1
        assert sent < 400
        assert await served.health() == 1
        client.close()

    play(scene)


def test_messages_are_cut_out_of_whatever_pieces_they_come_in() -> None:
    said = b"".join(struct.pack(">BI", 0, size) + bytes([size % 256]) * size for size in (0, 1, 5, 70_000, 0, 3))
    for step in (1, 3, 5, 7, 1_000, len(said)):
        deframer = Deframer(100_000)
        pieces = [memoryview(said)[start : start + step] for start in range(0, len(said), step)]
        messages = [b"".join(each) for piece in pieces for each in deframer.feed(piece)]
        assert [len(each) for each in messages] == [0, 1, 5, 70_000, 0, 3]
        assert deframer.is_between


@pytest.mark.parametrize(("said", "status"), [(b"\1\0\0\0\1x", 12), (b"\0\xff\xff\xff\xff", 8)])
def test_compressed_and_huge_messages_are_refused_at_their_prefix(said: bytes, status: int) -> None:
    with pytest.raises(Failed) as failed:
        Deframer(1_000).feed(memoryview(said))
    assert failed.value.status == status
