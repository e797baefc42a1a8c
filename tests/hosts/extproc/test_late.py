"""Requests that the router answers later, on the same ext_proc stream: both servers, both modes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from shoal.hosts.driver import Driver
from shoal.hosts.extproc import service
from shoal.hosts.extproc.lean import PROCESS_PATH, LeanServer
from shoal.routing.commands import Cut
from shoal.routing.events import SessionAborted
from tests.hosts.extproc.test_exchange import Door, body, chat, head, headers_of
from tests.hosts.waiting_router import AskingRouter, HeldTokens

TARGET = "x-gateway-destination-endpoint"


class Served:
    """A server whose router asks for tokens, and a channel to it."""

    def __init__(self, is_lean: bool, path: str) -> None:
        self.router = AskingRouter()
        self.door = Door(router=self.router)
        self.tokens = HeldTokens()
        self.door.picker.tokens = self.tokens
        self.lean = LeanServer(self.door.picker, path) if is_lean else None
        self.live = service.LiveCalls()
        self._path = path
        self.channel: Any = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Served"]:
        stop: Callable[[float | None], Awaitable[None]]
        if self.lean is not None:
            await self.lean.start()
            stop = self.lean.stop
        else:
            server, _ = service.serve(self.door.picker, [f"unix:{self._path}"], max_body_bytes=1 << 20, live=self.live)
            await server.start()
            stop = server.stop
        async with grpc.aio.insecure_channel(f"unix:{self._path}") as channel:
            self.channel = channel
            try:
                yield self
            finally:
                await stop(None)

    def process(self) -> Any:
        return self.channel.stream_stream(
            PROCESS_PATH,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()

    def cut(self, commands: Mapping[str, Cut]) -> int:
        """Carry out commands of the router."""
        return self.lean.cut(commands) if self.lean is not None else self.live.cut(commands)

    async def asked(self, mode: int = 2, text: str = "hello", session: str = "") -> Any:
        """A request whose tokens are being fetched."""
        call, count = self.process(), len(self.tokens.open)
        await call.write(head(mode=mode, x_session_id=session))
        if mode == 2:
            assert (await call.read()).HasField("request_headers")
        await call.write(body(chat(text)))
        await until(lambda: len(self.tokens.open) > count)
        return call

    @property
    def is_clean(self) -> bool:
        picker = self.door.picker
        books = (self.door.driver.router.status().inflight, self.door.driver.waiting, picker.buffered_bytes)
        return books == (0, 0, 0) and not self.tokens.open and not self.router.asked


Play = Callable[[Callable[[Served], Awaitable[None]]], None]


@pytest.fixture(params=["lean", "grpc"])
def play(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setattr(Driver, "_arm", lambda self, now: None)

    def run(scene: Callable[[Served], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(60), Served(request.param == "lean", str(tmp_path / "s")).open() as served:
                await scene(served)

        uvloop.run(main())

    return run


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.005)


def test_a_buffered_request_is_routed_on_its_stream_when_the_router_has_decided(play: Play) -> None:
    async def scene(served: Served) -> None:
        call = await served.asked()
        assert served.door.picker.buffered_bytes > 0
        served.tokens.give()
        reply = await call.read()
        assert headers_of(reply.request_body.response.header_mutation)[TARGET]
        assert served.door.picker.buffered_bytes == 0
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
        await until(lambda: served.is_clean)

    play(scene)


def test_a_streamed_body_is_sent_back_when_the_router_has_decided(play: Play) -> None:
    async def scene(served: Served) -> None:
        call = await served.asked(mode=4, text="x" * 100_000)
        served.tokens.give()
        first = await call.read()
        assert headers_of(first.request_headers.response.header_mutation)[TARGET]
        sent = b""
        while True:
            chunk = (await call.read()).request_body.response.body_mutation.streamed_response
            sent += chunk.body
            if chunk.end_of_stream:
                break
        assert json.loads(sent) == chat("x" * 100_000)
        message = pb.ProcessingRequest()
        message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
        await call.write(message)
        assert (await call.read()).HasField("response_headers")
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
        await until(lambda: served.is_clean)

    play(scene)


def test_trailers_wait_for_the_decision_as_well(play: Play) -> None:
    async def scene(served: Served) -> None:
        call = served.process()
        await call.write(head(mode=4))
        await call.write(body(chat(), is_end=False))
        message = pb.ProcessingRequest()
        message.request_trailers.SetInParent()
        await call.write(message)
        await until(lambda: len(served.tokens.open) == 1)
        served.tokens.give()
        kinds = [(await call.read()).WhichOneof("response") for _ in range(3)]
        assert kinds == ["request_headers", "request_body", "request_trailers"]
        call.cancel()
        await until(lambda: served.is_clean)

    play(scene)


def test_a_refusal_that_comes_late_is_the_answer(play: Play) -> None:
    async def scene(served: Served) -> None:
        call = served.process()
        await call.write(head())
        await call.read()
        await call.write(body(chat(model="nope")))
        await until(lambda: len(served.tokens.open) == 1)
        served.tokens.give()
        answer = (await call.read()).immediate_response
        assert answer.status.code == 404
        await call.done_writing()
        await until(lambda: served.is_clean)

    play(scene)


@pytest.mark.parametrize("mode", [2, 4])
def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(play: Play, mode: int) -> None:
    async def scene(served: Served) -> None:
        calls = [await served.asked(mode) for _ in range(5)]
        for call in calls:
            call.cancel()
        await until(lambda: served.is_clean)

    play(scene)


def test_a_stream_that_ends_in_order_while_it_waits_leaves_nothing_behind(play: Play) -> None:
    async def scene(served: Served) -> None:
        call = await served.asked()
        await call.done_writing()
        await until(lambda: served.is_clean)

    play(scene)


def test_a_fault_of_the_router_ends_the_stream_with_an_error(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a plugin's fault")

    async def scene(served: Served) -> None:
        call = await served.asked()
        monkeypatch.setattr("shoal.scheduling.Scheduler.dispatched", fail)
        served.tokens.give()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() == grpc.StatusCode.INTERNAL
        await until(lambda: served.is_clean)
        assert served.door.driver.fold.unplaced.family().samples[0].value == 1

    play(scene)


def test_a_stopping_worker_waits_for_requests_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_arm", lambda self, now: None)

    async def main() -> None:
        async with asyncio.timeout(60), Served(True, str(tmp_path / "s")).open() as served:
            call = await served.asked()
            assert served.lean is not None
            stopping = asyncio.create_task(served.lean.stop(grace=30.0))
            await asyncio.sleep(0.05)
            assert not stopping.done()
            served.tokens.give()
            reply = await call.read()
            assert headers_of(reply.request_body.response.header_mutation)[TARGET]
            await call.done_writing()
            await stopping
            assert served.is_clean

    uvloop.run(main())


def test_a_placed_request_that_is_cut_gets_an_answer_of_the_pool_and_no_other_does(play: Play) -> None:
    async def scene(served: Served) -> None:
        calls = []
        for session in ("doomed", "spared"):
            calls.append(await served.asked(session=session))
            served.tokens.give()
            await calls[-1].read()
        commands = served.door.driver.feed(SessionAborted("doomed"))
        cut = {command.request_id: command for command in commands if isinstance(command, Cut)}
        assert served.cut(cut) == len(cut) == 1
        immediate = (await calls[0].read()).immediate_response
        assert immediate.status.code == 410
        assert json.loads(immediate.body)["error"]["code"] == "aborted"
        assert served.door.driver.router.status().inflight == 2
        for call in calls:
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
        await until(lambda: served.is_clean)
        assert served.cut(cut) == 0

    play(scene)
