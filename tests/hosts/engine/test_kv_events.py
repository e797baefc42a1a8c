"""KV events of a running engine over real sockets: the live stream, replays, faults, and that they tell the truth."""

import asyncio
import json
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.engine.cache import HostPolicy
from shoal.hosts.engine import EngineServer
from shoal.hosts.engine.kvevents import KvEvents, read_kv_events
from shoal.hosts.engine.kvforms import KvForm
from shoal.hosts.engine.tokens import pack
from shoal.kernel import ConfigError
from shoal.pool.kvevents import KvEvent, KvStored, Tier
from shoal.wire.kvevents import decode
from tests.hosts.engine.engine_http import Engine, quick, run_async
from tests.hosts.engine.kv_reader import (
    Believed,
    Message,
    events_on,
    model_of,
    publishing,
    receive,
    replay,
    sources_of,
    subscribed,
)

BLOCK = 4
SEED = 77


async def complete(engine: Engine, prompt: list[int] | str, max_tokens: int = 1, **more: Any) -> int:
    """Complete a prompt; returns its cached tokens."""
    body = {"prompt": prompt, "max_tokens": max_tokens, **more}
    status, answer = await engine.post("/v1/completions", body)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def read(messages: list[Message]) -> list[KvEvent]:
    """The events of some messages; each must be understood."""
    out: list[KvEvent] = []
    for message in messages:
        batch = decode(message.payload)
        assert batch.skipped == 0
        out += batch.events
    return out


def numbers(messages: list[Message]) -> list[int]:
    return [message.number for message in messages]


workloads = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2]),  # which document
        st.integers(1, 60),  # how much of it
        st.integers(1, 12),  # answer
        st.sampled_from(["", "a"]),  # salt
        st.sampled_from(["tiny", "sql"]),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize(
    ("form", "has_bytes", "policy"),
    [
        *((form, False, HostPolicy.WRITE_THROUGH) for form in KvForm),
        (KvForm.VLLM_MAP, True, HostPolicy.WRITE_BACK),
    ],
)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rounds=st.lists(workloads, min_size=1, max_size=3))
def test_a_replay_from_the_beginning_gives_what_the_cache_holds(
    form: KvForm, has_bytes: bool, policy: HostPolicy, rounds: list[list[tuple[int, int, int, str, str]]]
) -> None:
    config = quick(
        kv_events=events_on(), kv_form=form, has_bytes_hashes=has_bytes, block_size=BLOCK, num_blocks=40,
        host_blocks=30, host_policy=policy, is_describing_host_blocks=True, loras=("sql",), hash_seed=SEED,
    )  # fmt: skip

    async def prompted(engine: Engine, document: int, count: int, answer: int, salt: str, model: str) -> None:
        prompt = [document * 1000 + each for each in range(count)]
        await complete(engine, prompt, answer, cache_salt=salt, model=model)

    async def check() -> None:
        async with publishing(config) as (engine, server):
            for workload in rounds:
                await asyncio.gather(*[prompted(engine, *each) for each in workload])
                messages = await replay(server)
                assert numbers(messages) == list(range(len(messages)))
                believed = Believed()
                believed.apply(read(messages))
                model = model_of(server)
                assert believed.held[Tier.GPU] == set(model.pool.cached_hashes())
                assert model.host is not None
                if form is not KvForm.VLLM_ARRAY_OLD:
                    assert believed.held[Tier.CPU] == set(model.host.hashes())
                check_hashes(read(messages))

    run_async(check())


def check_hashes(events: list[KvEvent]) -> None:
    """Each hash is that of its parent and the tokens that the event tells."""
    for event in events:
        if not isinstance(event, KvStored):
            continue
        assert event.block_size == BLOCK
        assert len(event.tokens) == BLOCK * len(event.hashes)
        packed = pack(event.tokens)
        parent = event.parent
        for position, block_hash in enumerate(event.hashes):
            if parent is not None:
                tokens = packed[4 * BLOCK * position : 4 * BLOCK * (position + 1)]
                assert block_hash == xxhash.xxh3_64_intdigest(tokens, parent)
            parent = block_hash


def test_the_live_stream_has_three_frames_and_goes_on_where_a_replay_ends() -> None:
    async def check() -> None:
        config = quick(kv_events=events_on(topic="kv@tiny"))
        async with publishing(config) as (engine, server), subscribed(server, b"kv@") as sub:
            live: list[Message] = []
            while len(live) < 3:
                await complete(engine, f"{len(live)} {asyncio.get_running_loop().time()}" * 20)
                while await sub.poll(50):
                    live.append(await receive(sub))
            assert {message.topic for message in live} == {b"kv@tiny"}
            assert numbers(live) == list(range(live[0].number, live[0].number + len(live)))
            assert (await replay(server, live[0].number))[: len(live)] == live
            assert await replay(server, 10**9) == []

    run_async(check())


def test_dropped_batches_leave_a_gap_that_a_replay_fills() -> None:
    async def check() -> None:
        async with publishing(quick(kv_events=events_on())) as (engine, server), subscribed(server) as sub:
            while not await sub.poll(50):
                await complete(engine, f"warm {asyncio.get_running_loop().time()}" * 20)
            while await sub.poll(50):
                last = await receive(sub)
            _, faults = await engine.post("/faults", {"kv_drop_batches": 2})
            assert faults["kv_drop_batches"] == 2
            for number in range(3):
                await complete(engine, f"{number} after" * 20)
            assert (await receive(sub)).number == last.number + 3
            assert numbers(await replay(server, last.number + 1)) == [last.number + each for each in (1, 2, 3)]
            assert (await engine.get("/faults"))[1]["kv_drop_batches"] == 0

    run_async(check())


def test_a_stalled_replay_answers_when_the_fault_ends() -> None:
    async def check() -> None:
        async with publishing(quick(kv_events=events_on())) as (engine, server):
            await complete(engine, "x" * 400)
            await engine.post("/faults", {"is_kv_replay_stalled": True})
            asked = asyncio.ensure_future(replay(server))
            assert await asyncio.wait([asked], timeout=0.3) == (set(), {asked})
            await complete(engine, "y" * 400)
            await engine.post("/faults", {"is_kv_replay_stalled": False})
            assert numbers(await asked) == [0, 1]

    run_async(check())


def test_only_the_last_batches_can_be_had_again_and_nonsense_is_not_answered() -> None:
    async def check() -> None:
        async with publishing(quick(kv_events=events_on(buffer_steps=2))) as (engine, server):
            for number in range(5):
                await complete(engine, f"{number}" * 400)
            assert numbers(await replay(server)) == [3, 4]
            for request in ([b"", b"short"], [b"", b"", bytes(8)], [bytes(8)], [b"", b"x" * 5000]):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(replay(server, request=request), 0.1)
            assert numbers(await replay(server)) == [3, 4]

    run_async(check())


@pytest.mark.parametrize(
    ("form", "has_topic", "expected"),
    [
        (KvForm.VLLM_MAP, None, True),
        (KvForm.VLLM_MAP, False, False),
        (KvForm.VLLM_ARRAY, None, False),
        (KvForm.VLLM_ARRAY, True, True),
        (KvForm.SGLANG, None, True),
    ],
)
def test_a_replay_has_the_frames_of_its_time(form: KvForm, has_topic: bool | None, expected: bool) -> None:
    async def check() -> None:
        config = quick(kv_events=events_on(topic="t"), kv_form=form, has_replay_topic=has_topic)
        async with publishing(config) as (engine, server):
            await complete(engine, "x" * 400)
            (message,) = await replay(server)
            assert message.topic == (b"t" if expected else None)

    run_async(check())


@pytest.mark.parametrize(("form", "is_at_once"), [(KvForm.VLLM_MAP, False), (KvForm.SGLANG, True)])
def test_an_emptied_cache_is_told_with_the_next_step_by_vllm_and_at_once_by_sglang(
    form: KvForm, is_at_once: bool
) -> None:
    async def check() -> None:
        async with publishing(quick(kv_events=events_on(), kv_form=form)) as (engine, server):
            await complete(engine, "x" * 400)
            assert (await engine.post("/reset_prefix_cache", b""))[1] == {"success": True}
            assert len(await replay(server)) == (2 if is_at_once else 1)
            assert await complete(engine, "x" * 400) == 0
            kinds = [[type(each).__name__ for each in decode(m.payload).events] for m in await replay(server)]
            rest = [["KvCleared"], ["KvStored"]] if is_at_once else [["KvCleared", "KvStored"]]
            assert kinds == [["KvStored"], *rest]

    run_async(check())


def test_a_cache_hit_publishes_nothing_and_an_answer_its_full_blocks() -> None:
    async def check() -> None:
        async with publishing(quick(kv_events=events_on(), block_size=BLOCK)) as (engine, server):
            prompt = list(range(1, 14))
            assert await complete(engine, prompt) == 0
            assert await complete(engine, prompt) == 12
            assert len(await replay(server)) == 1
            _, answer = await engine.post(
                "/v1/completions", {"prompt": prompt, "max_tokens": 8, "return_token_ids": True}
            )
            stored = [each for each in read((await replay(server))[1:]) if isinstance(each, KvStored)]
            tokens = [token for run in stored for token in run.tokens]
            assert tokens == [13, *answer["choices"][0]["token_ids"][:7]]

    run_async(check())


def test_engines_with_other_seeds_give_the_same_tokens_other_hashes() -> None:
    async def check() -> None:
        seen = []
        for seed in (1, 2, 1):
            async with publishing(quick(kv_events=events_on(), hash_seed=seed)) as (engine, server):
                await complete(engine, "x" * 400)
                (event,) = read(await replay(server))
                assert isinstance(event, KvStored)
                seen.append(event)
        assert seen[0] == seen[2]
        assert seen[0].tokens == seen[1].tokens
        assert not set(seen[0].hashes) & set(seen[1].hashes)

    run_async(check())


def test_sources_are_told_as_each_engine_tells_them() -> None:
    async def check() -> None:
        async with publishing(quick(kv_events=events_on(topic="t"))) as (engine, server):
            _, sources = await engine.get("/kv_event_sources")
            assert sources == {"0": msgspec.to_builtins(sources_of(server))}
            assert sources["0"]["endpoint"].startswith("tcp://127.0.0.1:")
            assert not sources["0"]["endpoint"].endswith(":0")
            assert list(sources["0"]) == [
                *("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint"),
                *("buffer_steps", "hwm", "max_queue_size", "topic"),
            ]
            assert (await engine.get("/server_info"))[0] == 404
        async with publishing(quick(kv_events=events_on(), kv_form=KvForm.SGLANG)) as (engine, server):
            assert (await engine.get("/kv_event_sources"))[0] == 404
            _, info = await engine.get("/server_info")
            told = info["kv_events"]
            assert f"tcp://{told['endpoint_host']}:{told['endpoint_port_base']}" == sources_of(server).endpoint
            assert (told["block_size"], told["dp_size"], told["publisher"]) == (16, 1, "zmq")
        async with publishing(quick()) as (engine, server):
            assert (await engine.get("/kv_event_sources"))[1] == {}

    run_async(check())


def test_a_taken_port_and_a_wrong_configuration_are_one_clear_line() -> None:
    async def check() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            for changes in ({"endpoint": f"tcp://*:{port}"}, {"replay_endpoint": f"tcp://127.0.0.1:{port}"}):
                with pytest.raises(ConfigError, match=rf"--kv-events-config: tcp://.*:{port} is already taken"):
                    await EngineServer().start(quick(kv_events=events_on(**changes)))
        with pytest.raises(ConfigError, match="--kv-events-config: udp://x cannot be used"):
            await EngineServer().start(quick(kv_events=events_on(endpoint="udp://x")))

    run_async(check())
    for text, message in (
        ("{", "truncated"),
        ('{"endpoints": "x"}', "unknown field `endpoints`"),
        ('{"publisher": "kafka"}', "unknown publisher 'kafka'; known: zmq, null"),
        ('{"buffer_steps": 0}', "buffer_steps must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_kv_events(text)


def test_events_are_on_only_where_the_engine_would_send_them() -> None:
    on = KvEvents(enable_kv_cache_events=True)
    assert on.is_on(KvForm.VLLM_MAP)
    assert not KvEvents().is_on(KvForm.VLLM_MAP)
    assert not KvEvents(publisher="zmq").is_on(KvForm.VLLM_MAP)
    assert KvEvents(publisher="zmq").is_on(KvForm.SGLANG)
    assert not msgspec.structs.replace(on, publisher="null").is_on(KvForm.VLLM_MAP)


def test_a_subscriber_that_reads_nothing_stops_nobody() -> None:
    async def check() -> None:
        config = quick(kv_events=events_on(hwm=2, buffer_steps=5), block_size=BLOCK)
        async with publishing(config) as (engine, server), subscribed(server) as sub:
            while not await sub.poll(50):
                await complete(engine, f"warm {asyncio.get_running_loop().time()}" * 20)
            for number in range(40):
                await complete(engine, [number, *range(2000)])
            assert len(await replay(server)) == 5
            assert (await engine.get("/health"))[0] == 200

    run_async(check())


def test_a_prefix_that_left_the_gpu_counts_as_cached_and_as_external() -> None:
    async def check() -> None:
        config = quick(kv_events=events_on(), block_size=BLOCK, num_blocks=40, host_blocks=200)
        async with publishing(config) as (engine, server):
            prompt = list(range(1, 102))
            assert await complete(engine, prompt) == 0
            assert await complete(engine, list(range(2000, 2158))) == 0
            assert await complete(engine, prompt) == 100
            samples = await engine.samples()
            assert samples["vllm:external_prefix_cache_hits_total"] == 100
            assert samples["vllm:external_prefix_cache_queries_total"] == 101 + 158 + 101
            assert samples["vllm:prefix_cache_hits_total"] == 0
            assert samples["vllm:prompt_tokens_cached_total"] == 100
            assert samples["vllm:prompt_tokens_cached_by_source_total{source=host}"] == 100
            assert samples["vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"] == 100
            placeholders = [
                each for each in read(await replay(server)) if isinstance(each, KvStored) and each.tier is Tier.CPU
            ]
            assert placeholders
            assert all((each.tokens, each.block_size, each.parent) == ([], 0, None) for each in placeholders)

    run_async(check())


def test_an_adapter_that_is_loaded_again_never_hits_blocks_of_the_old_one() -> None:
    async def check() -> None:
        async with publishing(quick(kv_events=events_on(), loras=("sql",))) as (engine, server):
            for _ in range(2):
                cached = await complete(engine, "x" * 400, model="sql")
            assert cached > 0
            again = {"lora_name": "sql", "lora_path": "/new"}
            assert (await engine.post("/v1/load_lora_adapter", again))[0] == 400
            assert (await engine.post("/v1/load_lora_adapter", {**again, "load_inplace": True}))[0] == 200
            assert await complete(engine, "x" * 400, model="sql") == 0
            first, second = read(await replay(server))
            assert isinstance(first, KvStored)
            assert isinstance(second, KvStored)
            assert (first.lora, first.tokens) == (second.lora, second.tokens) == ("sql", first.tokens)
            assert not set(first.hashes) & set(second.hashes)
            await engine.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
            await engine.post("/v1/load_lora_adapter", again)
            assert await complete(engine, "x" * 400, model="sql") == 0

    run_async(check())


@asynccontextmanager
async def process(endpoint: str) -> AsyncIterator[Engine]:
    """`shoal engine` as a process that publishes; it must end cleanly."""
    config = json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint})
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "shoal.cli", "engine", "--port", "0", "--slow-factor", "0.02", "--kv-events-config", config),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        found = re.search(rb"http://127.0.0.1:(\d+)", await child.stdout.readline())
        assert found is not None
        async with aiohttp.ClientSession() as session:
            yield Engine(int(found[1]), session)
        child.send_signal(signal.SIGTERM)
        _, errors = await child.communicate()
        assert (child.returncode, errors) == (0, b"")
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.mark.e2e
def test_a_process_that_starts_again_on_its_port_counts_from_zero() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def check() -> None:
        async with subscribed(f"tcp://127.0.0.1:{port}") as sub:
            seen: list[list[int]] = []
            for _ in range(2):
                async with process(f"tcp://*:{port}") as engine:
                    sent = 0
                    while not await sub.poll(50):
                        await complete(engine, f"{sent} once" * 20)
                        sent += 1
                    seen.append([(await receive(sub)).number, sent])
                    await asyncio.sleep(0.1)
                    while await sub.poll(0):
                        await receive(sub)
            assert all(number < sent for number, sent in seen), "numbers begin anew with the process"

    run_async(check())


def test_a_free_port_is_taken_on_the_interface_that_the_engine_listens_on() -> None:
    async def check() -> None:
        for host, expected in (("::1", r"tcp://\[::1\]:\d+"), ("localhost", r"tcp://127\.0\.0\.1:\d+")):
            server = EngineServer()
            try:
                await server.start(quick(kv_events=events_on(), host=host))
            except ConfigError as error:
                pytest.skip(f"no such interface here: {error}")
            try:
                assert re.fullmatch(expected, sources_of(server).endpoint)
                assert await replay(server) == []
            finally:
                await server.stop()

    run_async(check())
