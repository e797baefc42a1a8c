"""Control of a running engine: pause, sleep, aborts, cache resets, weights, by vLLM's calls and by SGLang's."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from shoal.hosts.engine.controlling import HANDLERS
from shoal.hosts.envoy.denied import DENIED
from tests.hosts.engine.engine_http import CHAT, Engine, quick, run

SLOW = quick(faults={"slow_factor": 2.0})
LONG = {**CHAT, "max_tokens": 400}


@asynccontextmanager
async def answering(engine: Engine, **changes: Any) -> AsyncIterator[asyncio.Task[tuple[int, Any]]]:
    """A chat request that runs."""
    task = asyncio.ensure_future(engine.post("/v1/chat/completions", {**LONG, **changes}, x_request_id="mine"))
    await engine.until("vllm:num_requests_running", 1)
    yield task
    await engine.post("/faults", {"slow_factor": 0.01})
    await task


def test_a_pause_that_aborts_ends_requests_with_that_reason_and_holds_new_ones() -> None:
    async def check(engine: Engine) -> None:
        async with answering(engine) as running:
            assert await engine.post("/pause", b"") == (200, {"status": "paused"})
            _, answer = await running
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert answer["usage"]["completion_tokens"] * 4 == len(choice["message"]["content"]) < 1600
        assert (await engine.get("/is_paused"))[1] == {"is_paused": True}
        assert (await engine.get("/health"))[0] == 200
        held = asyncio.ensure_future(engine.post("/v1/chat/completions", CHAT))
        await engine.until("vllm:num_requests_waiting", 1)
        assert not held.done()
        assert (await engine.post("/resume", b""))[1] == {"status": "resumed"}
        assert (await held)[0] == 200
        assert (await engine.get("/is_paused"))[1] == {"is_paused": False}

    run(check, SLOW)


def test_a_pause_that_waits_answers_when_the_last_request_has_ended() -> None:
    async def check(engine: Engine) -> None:
        async with answering(engine) as running:
            paused = asyncio.ensure_future(engine.post("/pause?mode=wait", b""))
            await asyncio.sleep(0.05)
            assert not paused.done()
            await engine.post("/faults", {"slow_factor": 0.01})
            _, answer = await running
            assert (await paused)[0] == 200
        assert answer["choices"][0]["finish_reason"] == "length"

    run(check, SLOW)


def test_a_pause_that_keeps_freezes_requests_until_the_engine_goes_on() -> None:
    async def check(engine: Engine) -> None:
        async with answering(engine) as running:
            assert (await engine.post("/pause?mode=keep", b""))[0] == 200
            generated = (await engine.samples())["vllm:generation_tokens_total"]
            await asyncio.sleep(0.05)
            samples = await engine.samples()
            assert samples["vllm:generation_tokens_total"] == generated < 400
            assert samples["vllm:kv_cache_usage_perc"] == 0
            await engine.post("/resume", b"")
            await engine.post("/faults", {"slow_factor": 0.01})
            _, answer = await running
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 400

    run(check, SLOW)


def test_an_aborted_stream_ends_with_the_reason_and_the_end_mark() -> None:
    async def check(engine: Engine) -> None:
        async def aborted(path: str, body: dict[str, object]) -> list[Any]:
            streamed = asyncio.ensure_future(engine.events(path, body))
            before = (await engine.samples())["vllm:generation_tokens_total"]
            while (await engine.samples())["vllm:generation_tokens_total"] < before + 3:
                await asyncio.sleep(0.01)
            assert await engine.post("/abort_request", {"abort_all": True}) == (200, "")
            return [data for _, data in await streamed]

        events = await aborted("/v1/chat/completions", LONG)
        assert events[-1] == "[DONE]"
        last = events[-2]["choices"][0]
        assert (last["finish_reason"], last["delta"]) == ("abort", {"content": ""})
        events = await aborted("/v1/completions", {"prompt": "x", "max_tokens": 400})
        assert (events[-2]["choices"][0]["finish_reason"], events[-2]["choices"][0]["text"]) == ("abort", "")
        tokens = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 400}}
        events = await aborted("/inference/v1/generate", tokens)
        assert (events[-2]["choices"][0]["finish_reason"], events[-2]["choices"][0]["token_ids"]) == ("abort", [])
        events = await aborted("/v1/messages", LONG)
        assert [each["delta"]["stop_reason"] for each in events if each["type"] == "message_delta"] == [None]
        events = await aborted("/v1/responses", {"input": "x", "max_output_tokens": 400})
        assert events[-1]["response"]["status"] == "cancelled"

    run(check, SLOW)


def test_requests_are_aborted_by_the_id_that_they_carry() -> None:
    async def check(engine: Engine) -> None:
        for path, body in (
            ("/abort_requests", {"request_ids": ["chatcmpl-mine"]}),
            ("/abort_requests", {"request_ids": ["other", "mine"]}),
            ("/abort_request", {"rid": "mi"}),
        ):
            async with answering(engine) as running:
                await engine.post("/abort_requests", {"request_ids": ["min", "chatcmpl-other"]})
                assert (await engine.samples())["vllm:num_requests_running"] == 1
                assert (await engine.post(path, body))[0] == 200
                assert (await running)[1]["choices"][0]["finish_reason"] == "abort"
            await engine.post("/faults", {"slow_factor": 2.0})
        assert (await engine.post("/abort_requests", {}))[0] == 400
        assert (await engine.post("/abort_request", {}))[0] == 400

    run(check, SLOW)


def test_an_aborted_embedding_is_an_error() -> None:
    async def check(engine: Engine) -> None:
        asked = asyncio.ensure_future(engine.post("/v1/embeddings", {"input": "x" * 40_000}))
        await engine.until("vllm:num_requests_running", 1)
        await engine.post("/abort_request", {"abort_all": True})
        assert (await asked)[0] == 500

    run(check, SLOW)


@pytest.mark.parametrize(("level", "state"), [(1, "weights_offloaded"), (2, "discard_all")])
def test_a_sleeping_engine_holds_requests_and_says_how_deep_it_sleeps(level: int, state: str) -> None:
    async def check(engine: Engine) -> None:
        assert (await engine.post(f"/sleep?level={level}", b""))[0] == 200
        assert (await engine.get("/is_sleeping"))[1] == {"is_sleeping": True}
        samples = await engine.samples()
        assert samples[f"vllm:engine_sleep_state{{sleep_state={state}}}"] == 1
        assert samples["vllm:engine_sleep_state{sleep_state=awake}"] == 0
        held = asyncio.ensure_future(engine.post("/v1/chat/completions", CHAT))
        await engine.until("vllm:num_requests_waiting", 1)
        assert (await engine.post("/wake_up?tags=weights", b""))[1] == {"status": "sleeping", "tags": ["weights"]}
        assert (await engine.get("/is_sleeping"))[1] == {"is_sleeping": True}
        assert not held.done()
        assert (await engine.post("/wake_up?tags=kv_cache", b""))[1]["status"] == "awake"
        assert (await held)[0] == 200
        assert (await engine.samples())["vllm:engine_sleep_state{sleep_state=awake}"] == 1

    run(check)


def test_an_engine_that_is_paused_and_asleep_runs_only_when_both_are_over() -> None:
    async def check(engine: Engine) -> None:
        await engine.post("/sleep?level=0", b"")
        await engine.post("/pause", b"")
        held = asyncio.ensure_future(engine.post("/v1/chat/completions", CHAT))
        await engine.until("vllm:num_requests_waiting", 1)
        await engine.post("/wake_up", b"")
        assert (await engine.get("/is_sleeping"))[1] == {"is_sleeping": False}
        assert not held.done()
        await engine.post("/resume", b"")
        assert (await held)[0] == 200

    run(check)


def test_what_makes_no_sense_is_a_bad_request() -> None:
    async def check(engine: Engine) -> None:
        for path in ("/pause?mode=later", "/sleep?level=3", "/sleep?level=x", "/sleep?mode=x", "/wake_up?tags=soul"):
            assert (await engine.post(path, b""))[0] == 400, path
        assert (await engine.post("/pause_generation", {"mode": "later"}))[0] == 400
        assert (await engine.post("/update_weight_version", {}))[0] == 400
        assert (await engine.get("/pause"))[0] == 405
        assert (await engine.get("/is_paused"))[1] == {"is_paused": False}

    run(check)


def test_a_cache_in_use_is_emptied_only_by_force() -> None:
    async def check(engine: Engine) -> None:
        async with answering(engine) as running:
            assert (await engine.post("/reset_prefix_cache", b""))[1] == {"success": False}
            assert (await engine.post("/flush_cache", b""))[0] == 400
            forced = "/reset_prefix_cache?reset_running_requests=true"
            assert (await engine.post(forced, b""))[1] == {"success": True}
            assert (await engine.samples())["vllm:num_preemptions_total"] == 1
            await engine.post("/faults", {"slow_factor": 0.01})
            assert (await running)[1]["usage"]["completion_tokens"] == 400
        assert (await engine.get("/flush_cache"))[0] == 200

    run(check, SLOW)


def test_new_weights_have_a_version_and_an_empty_cache() -> None:
    async def check(engine: Engine) -> None:
        async def cached() -> int:
            _, answer = await engine.post("/v1/completions", {"prompt": "y" * 400, "max_tokens": 1})
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert (await engine.get("/weight_info"))[1] == {"weight_version": "default"}
        assert [await cached(), await cached()] == [0, 96]
        assert (await engine.post("/update_weight_version", {"weight_version": "step-7"}))[1]["success"] is True
        assert await cached() == 0
        for path in ("/weight_info", "/get_weight_version", "/model_info"):
            assert (await engine.get(path))[1]["weight_version"] == "step-7"
        await engine.post("/update_weight_version", {"new_version": "step-8"})
        assert await cached() == 0

    run(check, quick(host_blocks=100))


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("retract", "length"), ("in_place", "length")])
def test_sglang_pauses_and_continues(mode: str, reason: str) -> None:
    async def check(engine: Engine) -> None:
        async with answering(engine) as running:
            assert (await engine.post("/pause_generation", {"mode": mode}))[1]["status"] == "ok"
            samples = await engine.samples()
            assert samples["vllm:num_requests_running"] == (1 if mode == "in_place" else 0)
            assert (await engine.post("/continue_generation", {}))[1]["status"] == "ok"
            await engine.post("/faults", {"slow_factor": 0.01})
            assert (await running)[1]["choices"][0]["finish_reason"] == reason

    run(check, SLOW)


def test_a_client_that_leaves_while_a_pause_waits_frees_it() -> None:
    async def check(engine: Engine) -> None:
        async with aiohttp.ClientSession() as session:
            body = {**LONG, "max_tokens": 20_000}
            request = asyncio.ensure_future(session.post(engine.url + "/v1/chat/completions", json=body))
            await engine.until("vllm:num_requests_running", 1)
            paused = asyncio.ensure_future(engine.post("/pause?mode=wait", b""))
            await asyncio.sleep(0.02)
            request.cancel()
            assert (await paused)[0] == 200

    run(check, SLOW)


def test_a_pools_clients_cannot_control_its_engines() -> None:
    public = {path for _, path in HANDLERS if re.fullmatch(DENIED, path) is None}
    assert public == {"/model_info"}
