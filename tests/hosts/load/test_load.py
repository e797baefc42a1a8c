"""The load generator counts what happened, not what should have."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

from shoal.hosts.load import LoadReport, LoopLag, Sample, run_load, summarise
from shoal.workload import Chat, Plan, multi_turn

Handler = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-shoal-endpoint: e1\r\n\r\n"
)
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":60}}}\n\n'
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def said(word: str) -> bytes:
    return chunk(b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % word.encode())


async def good(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + said("hel"))
    await writer.drain()
    await asyncio.sleep(0)
    whole = said("lo") + chunk(USAGE) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    writer.write(whole[:25])
    await writer.drain()
    await asyncio.sleep(0)
    writer.write(whole[25:])


def plan_of(chats: int, turns: int = 1, concurrency: int = 4) -> Plan:
    made = tuple(
        Chat(id=str(i), says=tuple(f"say {i} {t}" for t in range(turns)), reply_tokens=(2,) * turns)
        for i in range(chats)
    )
    return Plan(name="test", chats=made, concurrency=concurrency)


class Door:
    """An HTTP server that answers each POST with the handler."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.seen: list[dict[str, object]] = []
        self.running = 0
        self.most = 0
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body: dict[str, object] = msgspec.json.decode(await reader.readexactly(length))
                self.seen.append(body)
                self.running += 1
                self.most = max(self.most, self.running)
                try:
                    await self._handler(body, writer)
                finally:
                    self.running -= 1
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def run(handler: Handler, plan: Plan, **options: object) -> tuple[LoadReport, Door]:
    door = Door(handler)

    async def both() -> LoadReport:
        server = await asyncio.start_server(door.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await run_load(plan, f"http://127.0.0.1:{port}", **options)  # type: ignore[arg-type]

    return asyncio.run(both()), door


def test_a_stream_is_read_to_its_usage_over_split_chunks() -> None:
    report, _ = run(good, plan_of(10))
    assert (report.requests, report.errors) == (10, {})
    assert (report.prompt_tokens, report.cached_tokens, report.completion_tokens) == (1000, 600, 20)
    assert report.hit_ratio == 0.6
    assert report.served == {"e1": 10}
    assert 0.0 < report.ttft_p50_s <= report.e2e_p50_s


def test_the_reply_becomes_part_of_the_next_turn() -> None:
    _, door = run(good, plan_of(1, turns=3))
    roles = [[m["content"] for m in body["messages"]] for body in door.seen]  # type: ignore[attr-defined]
    assert roles == [
        ["say 0 0"],
        ["say 0 0", "hello", "say 0 1"],
        ["say 0 0", "hello", "say 0 1", "hello", "say 0 2"],
    ]


def test_a_closed_loop_keeps_no_more_chats_in_flight_than_asked() -> None:
    async def slow(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.01)
        await good(body, writer)

    report, door = run(slow, plan_of(12, concurrency=3))
    assert report.requests == 12
    assert door.most == 3
    assert door.connections == 3


def test_an_open_loop_does_not_wait_for_answers() -> None:
    async def slow(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        await good(body, writer)

    report, door = run(slow, plan_of(8, concurrency=1), arrivals=[0.001 * i for i in range(8)])
    assert report.errors == {}
    assert door.most == 8


def test_each_way_to_fail_has_its_own_kind() -> None:
    async def by_turn(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        which = body["messages"][0]["content"]  # type: ignore[index]
        if which == "say 0 0":
            writer.write(HEAD + said("cut"))
            await writer.drain()
            writer.transport.abort()
        elif which == "say 1 0":
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}")
        elif which == "say 2 0":
            writer.write(HEAD + said("no end") + b"0\r\n\r\n")
        elif which == "say 3 0":
            writer.transport.abort()
        elif which == "say 4 0":
            writer.write(HEAD + chunk(b'data: {"error":{"message":"x"}}\n\n') + b"0\r\n\r\n")
        else:
            await good(body, writer)

    report, _ = run(by_turn, plan_of(6, concurrency=1))
    assert report.errors == {"connect": 1, "cut": 1, "error-event": 1, "status-503": 1, "unfinished": 1}
    assert report.failed == 5
    assert report.requests == 6


def test_the_turns_after_a_failed_one_are_counted_as_skipped() -> None:
    async def refuse(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n")

    report, door = run(refuse, plan_of(2, turns=3))
    assert report.errors == {"skipped": 4, "status-429": 2}
    assert len(door.seen) == 2


def test_a_client_that_leaves_closes_its_connection_and_is_no_failure() -> None:
    gone = 0

    async def never(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        nonlocal gone
        writer.write(HEAD + said("a"))
        await writer.drain()
        await writer.wait_closed()
        gone += 1

    async def both(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        if body["messages"][0]["content"] in ("say 0 0", "say 1 0"):  # type: ignore[index]
            await asyncio.wait_for(never(body, writer), 5.0)
        else:
            await good(body, writer)

    report, _ = run(both, plan_of(4), leave_after_s=lambda i: 0.05 if i < 2 else None)
    assert report.errors == {"left": 2}
    assert report.failed == 0


def test_nobody_listening_is_a_connect_error() -> None:
    async def go() -> LoadReport:
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await run_load(plan_of(2), f"http://127.0.0.1:{port}")

    assert asyncio.run(go()).errors == {"connect": 2}


def test_plain_answers_are_measured_too() -> None:
    page = (
        b'{"choices":[{"message":{"content":"yes"}}],"usage":{"prompt_tokens":7,"completion_tokens":1,'
        b'"prompt_tokens_details":null}}'
    )

    async def plain(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        assert "stream" not in body
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(page), page))

    report, _ = run(plain, plan_of(3), stream=False)
    assert (report.errors, report.prompt_tokens, report.cached_tokens) == ({}, 21, 0)


def test_progress_is_told_after_every_request() -> None:
    told: list[tuple[int, int]] = []
    run(good, plan_of(3, turns=2, concurrency=1), progress=lambda done, of: told.append((done, of)))
    assert told == [(i, 6) for i in range(1, 7)]


def test_a_whole_workload_runs_through() -> None:
    plan = multi_turn(np.random.default_rng(1), chats=6, turns=2, systems=2, system_chars=20_000)
    report, door = run(good, plan)
    assert report.errors == {}
    assert len(door.seen) == 12


def test_failed_requests_enter_no_latency() -> None:
    samples = [
        Sample(at_s=0.0, ttft_s=0.1, duration_s=0.5, completion_tokens=5),
        Sample(at_s=0.0, error="cut", ttft_s=9.0, duration_s=9.0, completion_tokens=9),
    ]
    report = summarise("x", samples, duration_s=2.0)
    assert (report.ttft_p95_s, report.e2e_p99_s, report.completion_tokens) == (0.1, 0.5, 5)
    assert report.tpot_p50_s == 0.1
    assert (report.requests_per_s, report.output_tokens_per_s) == (0.5, 2.5)


def test_imbalance_is_the_busiest_over_the_mean() -> None:
    report = summarise("x", [], duration_s=1.0, served={"a": 30, "b": 10, "c": 20})
    assert report.imbalance == 1.5
    assert summarise("x", [], duration_s=1.0).imbalance == 1.0


def test_a_run_whose_loop_ran_late_is_void() -> None:
    report = summarise("x", [], duration_s=1.0, lag_p99_s=0.02)
    assert report.is_void
    assert msgspec.json.decode(report.to_json())["is_void"] is True
    assert not summarise("x", [], duration_s=1.0, lag_p99_s=0.004).is_void


def test_a_blocked_loop_shows_as_lag() -> None:
    async def block() -> float:
        import time

        with LoopLag() as lag:
            await asyncio.sleep(0.02)
            time.sleep(0.1)
            await asyncio.sleep(0.02)
        return lag.p99_s

    assert asyncio.run(block()) > 0.05
