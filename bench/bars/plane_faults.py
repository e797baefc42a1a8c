"""What the direct plane lets a client feel of an engine that dies, and of a stream that lasts."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import uvloop

from bench.bars.registry import Figure, bar
from bench.ground import DIRECT, MODEL, Backend, backend, backends, page, pool_of, sum_of
from shoal.hosts.load import Answer, Client
from shoal.workload import chat_body, unique

_ENGINES = 4
_IN_PREFILL = 50
# A prefill long enough that all are in it together, with the time that it takes to send them.
_PREFILL_S = 4.0
_CHUNKS = 5
# What a request looks like while it waits: no head yet, streamed or not, or a head and no body.
_STREAMED = {"x-bench-chunks": str(_CHUNKS)}
_KINDS: tuple[dict[str, str], ...] = (_STREAMED, {**_STREAMED, "x-bench-head-first": "1"}, {})
_STREAM_S = 1_800.0
_SILENCES = 3


def failure_of(answer: Answer) -> str:
    """Why an answer is no good one, "" when it is."""
    if answer.failure or answer.status != 200:
        return answer.failure or f"status-{answer.status}"
    return "" if answer.read().is_done else "unfinished"


@bar("direct.kill-prefill", "requests that fail when an engine dies with 50 in prefill", at_most=0, part=2)
def kill_prefill(scale: float, flags: Sequence[str] = DIRECT) -> Figure:
    """Four engines, so many requests that 50 wait at each, and kill -9 for the one with most of them."""
    return uvloop.run(_kill(max(8, round(_IN_PREFILL * scale)), flags))


async def _kill(wanted: int, flags: Sequence[str]) -> Figure:
    count = round(wanted * _ENGINES * 1.1)
    plan = unique(np.random.default_rng(5), requests=count, prompt_chars=2_000)
    with _engines() as engines:
        async with pool_of([engine.addresses[0] for engine in engines], flags) as pool:
            client = Client(pool.url, timeout_s=60.0)

            async def one(i: int) -> Answer:
                kind = _KINDS[i % len(_KINDS)]
                body = chat_body(plan.chats[i], [], model=MODEL, stream=bool(kind))
                headers = {**kind, "x-bench-wait-us": str(int(_PREFILL_S * 1e6))}
                return await client.post("/v1/chat/completions", body, headers=headers)

            requests = [asyncio.create_task(one(i)) for i in range(count)]
            running = await _all_wait(engines, count)
            victim = int(np.argmax(running))
            answered = sum(request.done() for request in requests)
            os.kill(engines[victim].pid, signal.SIGKILL)
            answers = await asyncio.gather(*requests)
            await client.close()
    kinds: dict[str, int] = {}
    for i, answer in enumerate(answers):
        failure = failure_of(answer)
        if failure:
            name = f"{failure}, {('no head', 'head and no body', 'no head, plain')[i % len(_KINDS)]}"
            kinds[name] = kinds.get(name, 0) + 1
    void = ""
    if answered or running[victim] < wanted:
        void = f"{running[victim]} of {wanted} were in prefill on the engine, {answered} answers had come"
    details = {"in_prefill": running, "killed": victim, "requests": count, "failures": kinds}
    return Figure(value=float(sum(kinds.values())), void=void, details=details)


@contextmanager
def _engines() -> Iterator[list[Backend]]:
    """Engines in processes of their own, so that one can be killed."""
    with ExitStack() as stack:
        yield [stack.enter_context(backend(1)) for _ in range(_ENGINES)]


async def _all_wait(engines: Sequence[Backend], count: int) -> list[int]:
    """Requests in prefill on each engine, once all have come or half of the prefill's time is over."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _PREFILL_S / 2
    while True:
        pages = [await page(f"http://{engine.addresses[0]}/metrics") for engine in engines]
        running = [int(sum_of(text, "vllm:num_requests_running")) for text in pages]
        if sum(running) >= count or loop.time() > deadline:
            return running
        await asyncio.sleep(0.05)


@bar("direct.long-stream", "streams of 30 minutes that do not reach their end", at_most=0, part=2)
def long_stream(scale: float, flags: Sequence[str] = DIRECT) -> Figure:
    """Two streams at once: one that speaks every second, and one that is silent for ten minutes at a time."""
    return uvloop.run(_last(max(6.0, _STREAM_S * scale), flags))


async def _last(seconds: float, flags: Sequence[str]) -> Figure:
    plan = unique(np.random.default_rng(6), requests=2, prompt_chars=1_000)
    paces_s = {"every second": 1.0, "silent": seconds / _SILENCES}
    with backends(2) as addresses:
        async with pool_of(addresses, flags) as pool:
            client = Client(pool.url, timeout_s=seconds + 60.0)

            async def one(i: int, pace_s: float) -> Answer:
                chunks = round(seconds / pace_s) + 1
                headers = {"x-bench-chunks": str(chunks), "x-bench-pace-us": str(int(pace_s * 1e6))}
                body = chat_body(plan.chats[i], [], model=MODEL)
                answer = await client.post("/v1/chat/completions", body, headers=headers)
                usage = answer.read().usage
                if not failure_of(answer) and (usage is None or usage.completion_tokens != chunks):
                    answer.failure = "incomplete"
                return answer

            answers = await asyncio.gather(*(one(i, pace_s) for i, pace_s in enumerate(paces_s.values())))
            await client.close()
    lasted = [round(answer.ended_s - answer.first_s, 1) for answer in answers]
    failed = {name: failure_of(answer) for name, answer in zip(paces_s, answers, strict=True) if failure_of(answer)}
    why = "; ".join(f"{name}: {failure}" for name, failure in failed.items())
    return Figure(value=float(len(failed)), why=why, details={"lasted_s": lasted, "failures": failed})
