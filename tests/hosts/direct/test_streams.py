"""Answers on their way: bytes as they came, backpressure, cuts, clients that leave, usage and times."""

import asyncio
import json
from typing import Any

import pytest

from shoal.hosts.direct.settings import DirectClocks
from tests.hosts.direct.direct_rig import (
    CHUNKED_HEAD,
    Client,
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


def stream(*pieces: bytes, gap_s: float = 0.0, ends: bool = True) -> Any:
    """A script that streams events, and then ends well or breaks."""

    async def script(wire: Wire, _: Seen) -> None:
        await wire.send(CHUNKED_HEAD)
        for piece in pieces:
            await wire.send(chunk(piece))
            await asyncio.sleep(gap_s)
        if ends:
            await wire.send(b"0\r\n\r\n")
        else:
            wire.abort()

    return script


async def test_events_pass_as_they_come_and_before_the_next_one_is_there() -> None:
    gate = asyncio.Event()

    async def script(wire: Wire, _: Seen) -> None:
        await wire.send(CHUNKED_HEAD + chunk(EVENT))
        await gate.wait()
        await wire.send(chunk(EVENT) + b"0\r\n\r\n")

    async with pool() as it:
        it.engines[0].script = script
        client = await it.client()
        await client.send(request(chat(stream=True)))
        _, headers = await client.head()
        assert dict(headers)["content-type"] == "text/event-stream"
        assert await client.reader.readexactly(len(chunk(EVENT))) == chunk(EVENT)
        gate.set()
        assert await client.reader.readexactly(len(chunk(EVENT)) + 5) == chunk(EVENT) + b"0\r\n\r\n"


async def test_a_large_answer_passes_byte_for_byte() -> None:
    body = bytes(range(256)) * 40_000
    async with pool() as it:
        client = await it.client()
        it.engines[0].script = says(plain(body))
        assert (await client.ask(request())).body == body
        it.engines[0].script = says(CHUNKED_HEAD + chunk(body) + b"0\r\n\r\n")
        assert (await client.ask(request())).raw_body == chunk(body) + b"0\r\n\r\n"
        assert [account.outcome.response_bytes for account in it.accounts][:1] == [len(body)]


async def test_a_client_that_does_not_read_stops_its_engine_and_goes_on_when_it_reads() -> None:
    sent = 0
    piece = chunk(b"x" * 65_536)

    async def script(wire: Wire, _: Seen) -> None:
        nonlocal sent
        wire.writer.transport.set_write_buffer_limits(high=65_536)
        await wire.send(CHUNKED_HEAD)
        for number in range(400):
            await wire.send(piece)
            sent = number + 1
        await wire.send(b"0\r\n\r\n")

    async with pool() as it:
        it.engines[0].script = script
        client = await it.client()
        client.stop_reading()
        await client.send(request(chat(stream=True)))
        await until(lambda: sent > 0)
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 300
        assert 0 < it.picker.buffered_bytes < 1_000_000
        client.read_again()
        answer = await client.answer()
        assert answer.is_whole
        assert len(answer.body) == 400 * 65_536
        assert it.picker.buffered_bytes == 0
        it.engines[0].script = says(plain())
        # The engine's connection is read again for whoever comes next.
        assert (await client.ask(request())).status == 200
        assert it.engines[0].connections == 1


async def test_unread_answers_past_the_limit_of_memory_are_cut() -> None:
    async with pool(max_buffered_bytes=200_000) as it:
        it.engines[0].script = stream(*[b"x" * 65_536] * 400)
        clients: list[Client] = []
        for _ in range(4):
            client = await it.client()
            client.stop_reading()
            await client.send(request(chat(stream=True)))
            clients.append(client)
        await until(lambda: any(account.outcome.flags == "OM" for account in it.accounts))
        await until(lambda: it.picker.buffered_bytes <= 200_000)


@pytest.mark.parametrize(
    ("path", "body", "find"),
    [
        ("/v1/chat/completions", chat(stream=True), lambda data: data["error"]["message"]),
        ("/v1/completions", {"model": "m", "prompt": "a", "stream": True}, lambda data: data["error"]["message"]),
        ("/v1/responses", {"model": "m", "input": "a", "stream": True}, lambda data: data["message"]),
        ("/v1/messages", MESSAGES, lambda data: data["error"]["message"]),
    ],
)
async def test_a_stream_that_breaks_ends_with_an_error_event_and_without_an_end(
    path: str, body: Any, find: Any
) -> None:
    async with pool(2) as it:
        it.prefer(*(engine.address for engine in it.engines))
        it.engines[0].script = stream(EVENT, EVENT, ends=False)
        client = await it.client()
        answer = await client.ask(request(body, path))
        assert (answer.status, answer.is_whole) == (200, False)
        assert answer.body.startswith(EVENT + EVENT)
        last = answer.body[2 * len(EVENT) :]
        assert last.endswith(b"\n\n")
        if path in ("/v1/responses", "/v1/messages"):
            assert last.startswith(b"event: error\n")
        assert "lost" in find(json.loads(last.split(b"data: ")[1]))
        assert len(it.engines[1].seen) == 0
        outcome = await it.outcome()
        assert (outcome.status, outcome.is_cut, outcome.is_upstream_failure) == (200, True, True)
        assert (outcome.flags, outcome.response_bytes) == ("UC", 2 * len(EVENT))
        assert it.inflight == 0


async def test_a_stream_that_breaks_within_a_chunk_is_just_cut() -> None:
    async def script(wire: Wire, _: Seen) -> None:
        await wire.send(CHUNKED_HEAD + chunk(EVENT) + b"100\r\ndata: half")
        await asyncio.sleep(0.02)
        wire.abort()

    async with pool() as it:
        it.engines[0].script = script
        answer = await (await it.client()).ask(request(chat(stream=True)))
        assert not answer.is_whole
        assert answer.raw_body.endswith(b"data: half")


async def test_a_plain_answer_that_breaks_is_cut_and_recorded_so() -> None:
    async def script(wire: Wire, _: Seen) -> None:
        await wire.send(plain(b"x" * 1000)[:-500])
        await asyncio.sleep(0.02)
        wire.abort()

    async with pool() as it:
        it.engines[0].script = script
        answer = await (await it.client()).ask(request())
        assert not answer.is_whole
        assert len(answer.raw_body) == 500
        assert (await it.outcome()).is_cut


async def test_an_answer_without_length_that_breaks_does_not_look_like_its_end() -> None:
    async def script(wire: Wire, _: Seen) -> None:
        await wire.send(CHUNKED_HEAD + chunk(EVENT))
        await asyncio.sleep(0.02)
        wire.abort()

    async with pool() as it:
        it.engines[0].script = script
        client = await it.client()
        await client.send(request(chat(stream=True), version="1.0"))
        await client.head()
        with pytest.raises(ConnectionResetError):
            await client.reader.read()


async def test_a_broken_chunk_in_the_middle_of_an_answer_is_a_cut() -> None:
    async def script(wire: Wire, _: Seen) -> None:
        await wire.send(CHUNKED_HEAD + chunk(EVENT))
        await asyncio.sleep(0.02)
        await wire.send(b"nonsense\r\n")
        await wire.lost()

    async with pool() as it:
        it.engines[0].script = script
        answer = await (await it.client()).ask(request(chat(stream=True)))
        assert not answer.is_whole
        assert (await it.outcome()).flags == "UPE"


@pytest.mark.parametrize("when", ["before the head", "before the body", "in the stream"])
@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_client_that_leaves_stops_the_engine(when: str, how: str) -> None:
    lost = asyncio.Event()

    async def script(wire: Wire, _: Seen) -> None:
        if when != "before the head":
            await wire.send(CHUNKED_HEAD)
        if when == "in the stream":
            await wire.send(chunk(EVENT))
        await wire.lost()
        lost.set()

    async with pool(2) as it:
        it.prefer(*(engine.address for engine in it.engines))
        it.engines[0].script = script
        client = await it.client()
        await client.send(request(chat(stream=True)))
        if when == "in the stream":
            await client.head()
            await client.reader.readexactly(len(chunk(EVENT)))
        else:
            await until(lambda: len(it.engines[0].seen) == 1)
            await asyncio.sleep(0.05)
        client.close() if how == "close" else client.abort()
        outcome = await it.outcome()
        await lost.wait()
        assert (outcome.is_client_gone, outcome.is_cut, outcome.is_upstream_failure) == (True, False, False)
        assert (outcome.status, outcome.flags) == (200 if when == "in the stream" else 0, "DC")
        assert len(it.engines[1].seen) == it.inflight == it.plane.active == 0


async def test_a_client_that_leaves_while_an_engine_is_dialled_leaves_nothing_behind() -> None:
    with deaf_address() as address:
        async with pool() as it:
            it.join(address)
            it.prefer(address, it.engines[0].address)
            client = await it.client()
            await client.send(request())
            await until(lambda: it.plane.active == 1)
            client.abort()
            assert (await it.outcome()).is_client_gone
            assert len(it.engines[0].seen) == it.inflight == it.plane.active == 0


async def test_a_client_that_leaves_while_it_sends_its_body_leaves_nothing_behind() -> None:
    async with pool() as it:
        client = await it.client()
        await client.send(request(b"x" * 2_000_000)[:-1000])
        await until(lambda: it.picker.buffered_bytes == 2_000_000)
        client.abort()
        await until(lambda: it.plane.clients == 0)
        assert it.picker.buffered_bytes == it.inflight == 0
        assert it.engines[0].seen == []


USAGE = {"prompt_tokens": 19, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}}
SPLIT = {"input_tokens": 3, "cache_read_input_tokens": 14, "cache_creation_input_tokens": 2, "output_tokens": 1}
NESTED = {"input_tokens": 19, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 5}


def event(data: Any, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


@pytest.mark.parametrize("cut", [1, 7, 100, 100_000])
@pytest.mark.parametrize(
    ("path", "body", "events", "expected"),
    [
        (
            "/v1/chat/completions",
            chat(stream=True),
            [EVENT] * 300 + [event({"choices": [], "usage": USAGE}), b"data: [DONE]\n\n"],
            (19, 16, 5),
        ),
        (
            "/v1/chat/completions",
            chat(stream=True),
            [event({"choices": [1], "usage": None})] * 3
            + [event({"choices": [{"delta": {"content": "end"}}], "usage": USAGE})],
            (19, 16, 5),
        ),
        (
            "/v1/responses",
            {"model": "m", "input": "a", "stream": True},
            [EVENT] * 300
            + [event({"type": "response.completed", "response": {"usage": NESTED}}, "response.completed")],
            (19, 16, 5),
        ),
        (
            "/v1/messages",
            MESSAGES,
            [event({"type": "message_start", "message": {"usage": SPLIT}}, "message_start")]
            + [EVENT] * 300
            + [event({"type": "message_delta", "usage": {"output_tokens": 5}}, "message_delta")],
            (19, 14, 5),
        ),
    ],
)
async def test_usage_of_a_stream_is_read_from_its_ends_however_it_is_cut(
    path: str, body: Any, events: list[bytes], expected: Any, cut: int
) -> None:
    raw = b"".join(events)
    raw = b"".join(chunk(raw[at : at + 333]) for at in range(0, len(raw), 333)) + b"0\r\n\r\n"

    async def script(wire: Wire, _: Seen) -> None:
        await wire.send(CHUNKED_HEAD)
        step = max(cut, len(raw) // 300) if cut < 100 else cut
        for at in range(0, len(raw), step):
            await wire.send(raw[at : at + step])
            await asyncio.sleep(0)

    async with pool() as it:
        it.engines[0].script = script
        answer = await it.ask(request(body, path))
        assert answer.raw_body == raw
        outcome = await it.outcome()
        assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens) == expected
        assert outcome.response_bytes == sum(map(len, events))


@pytest.mark.parametrize("size", [10, 1000, 50_000])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_usage_of_a_document_is_read_from_its_end_however_long_it_is(size: int, is_chunked: bool) -> None:
    text = 'he said "usage": {"prompt_tokens": 1} and left ' + "y" * size
    document = json.dumps({"choices": [{"message": {"content": text}}], "usage": USAGE, "kv": None}).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    framed = head + b"transfer-encoding: chunked\r\n\r\n" + chunk(document) + b"0\r\n\r\n"
    async with pool() as it:
        it.engines[0].script = says(framed if is_chunked else plain(document))
        assert (await it.ask(request())).body == document
        outcome = await it.outcome()
        assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens) == (19, 16, 5)


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": -1, "completion_tokens": "many"},
        {"prompt_tokens": 1 << 40, "completion_tokens": 1e300},
        {"prompt_tokens": True, "completion_tokens": [1]},
        [1, 2],
        None,
    ],
)
async def test_an_engine_that_lies_about_usage_does_no_harm(usage: Any) -> None:
    async with pool() as it:
        it.engines[0].script = says(plain(json.dumps({"usage": usage}).encode()))
        assert (await it.ask(request())).status == 200
        outcome = await it.outcome()
        assert outcome.prompt_tokens is None
        assert outcome.is_estimated or outcome.completion_tokens is None


async def test_times_are_told_apart_for_the_client_and_for_the_engine() -> None:
    async def script(wire: Wire, _: Seen) -> None:
        await asyncio.sleep(0.1)
        await wire.send(plain())

    async with pool() as it:
        it.engines[0].script = script
        client = await it.client()
        sent = request()
        await client.send(sent[:-5])
        await asyncio.sleep(0.2)
        await client.send(sent[-5:])
        await client.answer()
        outcome = await it.outcome()
        assert outcome.ttft_s is not None
        assert outcome.engine_ttft_s is not None
        assert 0.09 < outcome.engine_ttft_s < outcome.ttft_s - 0.15
        assert outcome.duration_s >= outcome.ttft_s


async def test_silence_before_the_head_is_504_and_the_engines_fault() -> None:
    async def silent(wire: Wire, _: Seen) -> None:
        await wire.lost()

    async with pool(clocks=DirectClocks(stream_idle_s=0.4)) as it:
        it.engines[0].script = silent
        client = await it.client()
        answer = await client.ask(request())
        assert (answer.status, answer.error["code"]) == (504, "gateway_timeout")
        outcome = await it.outcome()
        assert (outcome.flags, outcome.is_upstream_failure) == ("SI", True)
        await until(lambda: it.engines[0].closed == 1)


async def test_silence_in_a_stream_is_a_cut_and_a_steady_stream_is_not() -> None:
    async with pool(clocks=DirectClocks(stream_idle_s=0.4)) as it:
        it.engines[0].script = stream(*[EVENT] * 20, gap_s=0.05)
        assert (await it.ask(request(chat(stream=True)))).is_whole
        it.engines[0].script = stream(EVENT, EVENT, gap_s=5)
        answer = await it.ask(request(chat(stream=True)))
        assert not answer.is_whole
        assert (await it.outcome(2)).flags == "SI"


async def test_a_request_over_the_longest_life_is_cut_and_no_failure_of_the_engine() -> None:
    async with pool(clocks=DirectClocks(stream_s=0.5)) as it:
        it.engines[0].script = stream(*[EVENT] * 1000, gap_s=0.02)
        answer = await it.ask(request(chat(stream=True)))
        assert not answer.is_whole
        outcome = await it.outcome()
        assert (outcome.flags, outcome.is_upstream_failure) == ("DT", False)
