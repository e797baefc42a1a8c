"""The cheap client sends what it says it sends, and calls an answer good only when it is one."""

import asyncio
import json
from collections.abc import Coroutine
from typing import TypeVar

import pytest

from bench.backend import serve
from bench.prompts import Prompts
from bench.sender import Sent, send

T = TypeVar("T")


def run_to_its_end(act: Coroutine[None, None, T]) -> T:
    """Run and let the other ends of the connections close too."""

    async def whole() -> T:
        made = await act
        await asyncio.sleep(0.02)
        return made

    return asyncio.run(whole())


def bodies(prompts: Prompts, count: int) -> list[bytes]:
    made = [b"".join(prompts.take()) for _ in range(count)]
    for request in made:
        head, _, body = request.partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(body) in head
    return [request.partition(b"\r\n\r\n")[2] for request in made]


def prompt_of(body: bytes) -> str:
    return str(json.loads(body)["messages"][0]["content"])


@pytest.mark.parametrize("chars", [32, 1_000, 16_384, 400_000])
def test_prompts_have_the_length_that_was_asked_for_and_differ_at_once(chars: int) -> None:
    first, second = (prompt_of(body) for body in bodies(Prompts("h", chars), 2))
    assert (len(first), len(second)) == (chars, chars)
    assert first[:32] != second[:32]
    assert first[32:] == second[32:]


def test_prompts_of_two_runs_share_nothing() -> None:
    one, other = (prompt_of(bodies(Prompts("h", 100), 1)[0]) for _ in range(2))
    assert one[:16] != other[:16]


def test_one_prompt_may_be_repeated() -> None:
    first, second = bodies(Prompts("h", 100, unique=False), 2)
    assert first == second


def test_every_request_is_sent_and_counted() -> None:
    async def run() -> tuple[Sent, int]:
        async with serve(1, "m") as sites:
            sent = await send(f"http://{sites[0].address}", Prompts("h", 200_000), connections=3, requests=20)
            return sent, sites[0].total

    sent, total = run_to_its_end(run())
    assert (sent.ok, sent.errors, len(sent.latencies_s), total) == (20, {}, 20, 20)


def test_streams_are_read_to_their_end() -> None:
    async def run() -> tuple[Sent, int]:
        async with serve(1, "m") as sites:
            prompts = Prompts("h", 100, stream=True, headers={"x-bench-chunks": "40"})
            sent = await send(f"http://{sites[0].address}", prompts, connections=2, requests=6)
            return sent, sites[0].aborted

    sent, aborted = run_to_its_end(run())
    assert (sent.ok, sent.errors, aborted) == (6, {}, 0)


def test_a_run_of_so_many_seconds_ends() -> None:
    async def run() -> Sent:
        async with serve(1, "m") as sites:
            return await send(f"http://{sites[0].address}", Prompts("h", 100), connections=2, seconds=0.1)

    sent = run_to_its_end(run())
    assert sent.ok > 2
    assert sent.errors == {}


def answered_with(answer: bytes, requests: int, *, closes: bool = False) -> Sent:
    """Send to a server that gives everybody this answer, and closes then if told."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                writer.write(answer)
                await writer.drain()
                if closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def run() -> Sent:
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            return await send(f"http://{host}:{port}", Prompts("h", 100), connections=1, requests=requests)

    return run_to_its_end(run())


def test_an_error_status_is_no_good_answer() -> None:
    sent = answered_with(b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno", 4)
    assert (sent.ok, sent.errors) == (0, {"status-503": 4})


def test_a_stream_without_its_last_event_is_unfinished() -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    assert answered_with(answer + b"9\r\ndata: {}\n\r\n0\r\n\r\n", 2).errors == {"unfinished": 2}


def test_an_answer_that_breaks_off_is_cut() -> None:
    sent = answered_with(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nno", 3, closes=True)
    assert (sent.ok, sent.errors) == (0, {"cut": 3})


def test_a_connection_that_ends_as_announced_is_made_anew() -> None:
    sent = answered_with(b"HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length: 2\r\n\r\nok", 5, closes=True)
    assert (sent.ok, sent.errors) == (5, {})


def test_a_server_that_is_not_there_ends_the_run() -> None:
    sent = asyncio.run(send("http://127.0.0.1:1", Prompts("h", 100), connections=2, requests=5))
    assert sent.ok == 0
    assert sent.errors["connect"] > 2
