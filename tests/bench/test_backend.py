"""The cheap backend answers as it is told and counts what it saw."""

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter

import numpy as np

from bench.backend import Pace, Site, serve
from bench.ground import page, sum_of
from shoal.hosts.load import Client, LoadReport, run_load
from shoal.workload import unique

Play = Callable[[list[Site]], Awaitable[None]]


def play(count: int, act: Play) -> list[Site]:
    async def run() -> list[Site]:
        async with serve(count, "m") as sites:
            await act(sites)
            await asyncio.sleep(0.01)  # the other ends of the connections close
        return sites

    return asyncio.run(run())


async def load(site: Site, requests: int, *, stream: bool = False, **headers: str) -> LoadReport:
    plan = unique(np.random.default_rng(1), requests=requests, prompt_chars=400, concurrency=4)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await run_load(plan, f"http://{site.address}", stream=stream, headers=named)


def test_a_plain_answer_has_usage() -> None:
    async def act(sites: list[Site]) -> None:
        report = await load(sites[0], 20)
        assert (report.requests, report.errors, report.completion_tokens) == (20, {}, 160)

    (site,) = play(1, act)
    assert (site.total, site.running, site.aborted) == (20, 0, 0)


def test_a_stream_has_as_many_chunks_as_the_header_asks() -> None:
    async def act(sites: list[Site]) -> None:
        report = await load(sites[0], 8, stream=True, x_bench_chunks="30")
        assert (report.errors, report.completion_tokens) == ({}, 240)

    play(1, act)


def test_a_large_body_is_read_to_its_end() -> None:
    async def act(sites: list[Site]) -> None:
        plan = unique(np.random.default_rng(1), requests=6, prompt_chars=400_000, concurrency=3)
        report = await run_load(plan, f"http://{sites[0].address}", stream=False)
        assert (report.errors, report.requests) == ({}, 6)

    play(1, act)


def test_each_endpoint_counts_its_own() -> None:
    async def act(sites: list[Site]) -> None:
        await load(sites[0], 3)
        await load(sites[2], 5)
        assert sum_of(await page(f"http://{sites[2].address}/metrics"), "bench:requests_total") == 5.0

    assert [site.total for site in play(3, act)] == [3, 0, 5]


def test_a_client_that_leaves_is_counted_as_aborted() -> None:
    began = perf_counter()

    async def act(sites: list[Site]) -> None:
        client = Client(f"http://{sites[0].address}")
        headers = {"x-bench-chunks": "2", "x-bench-pace-us": "30000000"}
        answer = await client.post("/v1/chat/completions", b"{}", headers=headers, leave_after_s=0.05)
        assert answer.failure == "left"
        await client.close()
        while not sites[0].aborted:
            await asyncio.sleep(0.01)

    (site,) = play(1, act)
    assert (site.aborted, site.running) == (1, 0)
    assert began <= site.aborted_at_s <= perf_counter()


def test_a_request_that_no_picker_sent_here_is_unrouted() -> None:
    async def act(sites: list[Site]) -> None:
        client = Client(f"http://{sites[0].address}")
        for chosen in (sites[0].address, "127.0.0.1:1", f"{sites[0].address},127.0.0.1:1"):
            await client.post("/x", b"{}", headers={"x-gateway-destination-endpoint": chosen})
        await client.close()

    (site,) = play(1, act)
    assert (site.total, site.unrouted) == (3, 1)


def test_what_is_due_is_called_in_order_whoever_asked_first() -> None:
    async def act(_: list[Site]) -> None:
        pace, called, began = Pace(asyncio.get_running_loop()), list[str](), perf_counter()
        over = asyncio.Event()

        def third() -> None:
            called.append("third")
            pace.at(began, over.set)

        def first() -> None:
            called.append("first")
            pace.at(began + 0.02, lambda: called.append("second"))

        pace.at(began + 0.03, third)
        pace.at(began + 0.01, first)
        async with asyncio.timeout(30):
            await over.wait()
        assert called == ["first", "second", "third"]
        assert perf_counter() - began > 0.029
        # It has come to rest and goes on when it is asked again.
        over.clear()
        pace.at(perf_counter() + 0.01, over.set)
        async with asyncio.timeout(30):
            await over.wait()

    play(1, act)


def test_a_stamped_chunk_says_when_it_was_written() -> None:
    async def act(sites: list[Site]) -> None:
        client = Client(f"http://{sites[0].address}")
        headers = {"x-bench-chunks": "3", "x-bench-stamp": "1", "x-bench-pace-us": "2000"}
        before = perf_counter()
        answer = await client.post("/v1/chat/completions", b"{}", headers=headers)
        await client.close()
        times = [float(piece.split(b",")[0]) for piece in bytes(answer.body).split(b'"t":')[1:]]
        assert len(times) == 3
        assert before <= times[0] < times[1] < times[2] <= perf_counter()

    play(1, act)


def test_a_head_may_go_out_before_the_wait() -> None:
    async def act(sites: list[Site]) -> None:
        client = Client(f"http://{sites[0].address}")
        headers = {"x-bench-chunks": "1", "x-bench-wait-us": "200000", "x-bench-head-first": "1"}
        answer = await client.post("/v1/chat/completions", b"{}", headers=headers)
        await client.close()
        assert answer.read().is_done
        assert answer.first_s - answer.head_s > 0.1

    play(1, act)


def test_a_plain_answer_may_begin_before_the_wait() -> None:
    async def act(sites: list[Site]) -> None:
        client = Client(f"http://{sites[0].address}")
        headers = {"x-bench-wait-us": "200000", "x-bench-head-first": "1"}
        answer = await client.post("/v1/chat/completions", b"{}", headers=headers)
        await client.close()
        assert answer.read().is_done
        assert answer.ended_s - answer.first_s > 0.1

    play(1, act)
