"""An engine of several data-parallel ranks: who serves, what each counts and publishes, and orders to all of them."""

import asyncio
import re
import socket
from typing import Any

import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from shoal.hosts.engine import EngineServer
from shoal.hosts.engine.kvevents import KvEvents
from shoal.hosts.engine.kvforms import KvForm
from shoal.kernel import ConfigError
from shoal.wire.kvevents import decode
from shoal.wire.kvsources import parse_event_sources, parse_server_info
from tests.hosts.engine.engine_http import Engine, quick, run_async, running
from tests.hosts.engine.kv_reader import events_on, publishing, receive, sources_of, subscribed


async def cached(engine: Engine, prompt: str, rank: int | None = None) -> int:
    """Complete a prompt on a rank, None for any; returns its cached tokens."""
    headers = {} if rank is None else {"x_data_parallel_rank": str(rank)}
    status, answer = await engine.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}, **headers)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def by_rank(engine: Engine, name: str) -> dict[str, float]:
    """A metric by rank."""
    _, page = await engine.get("/metrics")
    samples = [each for family in text_string_to_metric_families(page) for each in family.samples if each.name == name]
    return {each.labels["engine"]: each.value for each in samples}


def test_ranks_share_no_cache_and_a_client_may_say_which_one_it_means() -> None:
    async def check() -> None:
        async with running(quick(data_parallel_size=2)) as engine:
            for rank in (0, 1):
                assert await cached(engine, "x" * 400, rank) == 0
                assert await cached(engine, "x" * 400, rank) > 0
            assert await by_rank(engine, "vllm:prompt_tokens_total") == {"0": 200, "1": 200}
            assert await by_rank(engine, "vllm:cache_config_info") == {"0": 1, "1": 1}
            status, answer = await engine.post("/v1/completions", {"prompt": "x"}, x_data_parallel_rank="2")
            assert (status, answer["error"]["message"]) == (400, "data_parallel_rank 2 is out of range [0, 2).")

    run_async(check())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/pooling", {"input": "x"}),
        ("/score", {"text_1": "x", "text_2": "y"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ],
)
def test_what_only_reads_a_prompt_goes_to_the_rank_that_was_asked_for(path: str, body: dict[str, Any]) -> None:
    async def check() -> None:
        async with running(quick(data_parallel_size=2)) as engine:
            assert (await engine.post(path, body, x_data_parallel_rank="1"))[0] == 200
            counted = await by_rank(engine, "vllm:prompt_tokens_total")
            assert counted["0"] == 0 < counted["1"]
            assert (await engine.post(path, body, x_data_parallel_rank="2"))[0] == 400

    run_async(check())


def test_a_request_goes_to_the_rank_with_the_least_to_do_and_is_aborted_there() -> None:
    async def check() -> None:
        async with running(quick(data_parallel_size=3, faults={"slow_factor": 50.0})) as engine:
            body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}
            waiting = [asyncio.create_task(engine.post("/v1/completions", body)) for _ in range(6)]
            while sum((await by_rank(engine, "vllm:num_requests_running")).values()) < 6:
                await asyncio.sleep(0.01)
            assert await by_rank(engine, "vllm:num_requests_running") == {"0": 2, "1": 2, "2": 2}
            waiting[0].cancel()
            while sum((await by_rank(engine, "vllm:num_requests_running")).values()) != 5:
                await asyncio.sleep(0.01)
            assert (await engine.post("/pause?mode=abort", b""))[0] == 200
            assert sum((await by_rank(engine, "vllm:num_requests_running")).values()) == 0
            reasons = [(await each)[1]["choices"][0]["finish_reason"] for each in waiting[1:]]
            assert reasons == ["abort"] * 5

    run_async(check())


def test_each_rank_publishes_its_own_events_and_says_whose_they_are() -> None:
    async def check() -> None:
        async with publishing(quick(data_parallel_size=2, kv_events=events_on())) as (engine, server):
            _, told = await engine.get("/kv_event_sources")
            assert [told[rank]["endpoint"] for rank in ("0", "1")] == [sources_of(server, r).endpoint for r in (0, 1)]
            async with subscribed(sources_of(server, 1).endpoint) as sub:
                while not await sub.poll(50):
                    await cached(engine, f"{asyncio.get_running_loop().time()}" * 20, 1)
                assert decode((await receive(sub)).payload).rank == 1
                while await sub.poll(200):
                    await receive(sub)
                await cached(engine, "for the first rank " * 20, 0)
                assert not await sub.poll(200)
            assert (await engine.post("/reset_prefix_cache", b""))[1] == {"success": True}
            for rank in (0, 1):
                assert await cached(engine, "for the first rank " * 20, rank) == 0

    run_async(check())


def neighbours() -> int:
    """A port that was free a moment ago, as was the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


@pytest.mark.parametrize("form", [KvForm.VLLM_MAP, KvForm.SGLANG])
def test_ports_of_ranks_are_one_after_the_other_where_the_first_is_given(form: KvForm) -> None:
    async def check() -> None:
        port = neighbours()
        events = KvEvents(enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{port}")
        async with publishing(quick(data_parallel_size=2, kv_events=events, kv_form=form)) as (engine, _):
            is_sglang = form is KvForm.SGLANG
            async with engine.session.get(f"{engine.url}/{'server_info' if is_sglang else 'kv_event_sources'}") as told:
                body = await told.read()
            sources = (parse_server_info if is_sglang else parse_event_sources)(body, "127.0.0.1")
            assert [each.rank for each in sources] == [0, 1]
            assert [each.endpoint for each in sources] == [f"tcp://127.0.0.1:{port + rank}" for rank in (0, 1)]

    run_async(check())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel_size": 0}, "--data-parallel-size: it must be 1 to 64"),
        ({"kv_form": KvForm.SGLANG, "kv_events": events_on(publisher="zmq")}, "need a port each"),
        ({"kv_events": events_on(endpoint="ipc:///tmp/events", replay_endpoint=None)}, "give tcp:// with a port"),
    ],
)
def test_what_ranks_cannot_have_is_one_clear_line(changes: dict[str, Any], message: str) -> None:
    async def check() -> None:
        with pytest.raises(ConfigError, match=re.escape(message)):
            await EngineServer().start(quick(**{"data_parallel_size": 2, **changes}))

    run_async(check())


def test_a_rank_whose_port_is_taken_leaves_none_of_the_others_open() -> None:
    async def check() -> None:
        port = neighbours()
        context = zmq.Context()
        taken = context.socket(zmq.PUB)
        taken.bind(f"tcp://127.0.0.1:{port + 1}")
        events = KvEvents(enable_kv_cache_events=True, endpoint=f"tcp://*:{port}")
        with pytest.raises(ConfigError, match="already taken"):
            await EngineServer().start(quick(data_parallel_size=2, kv_events=events))
        again = context.socket(zmq.PUB)
        again.bind(f"tcp://*:{port}")
        for each in (taken, again):
            each.close(linger=0)
        context.term()

    run_async(check())
