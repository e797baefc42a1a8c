"""How the running engine behaves: caching, aborts, faults, metrics, start and stop."""

import asyncio
import re
import signal
import socket
import ssl
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.hosts.engine import EngineServer, EngineServerConfig
from shoal.kernel import ConfigError
from tests.hosts.engine.engine_http import CHAT, Engine, quick, run, run_async, running

CAPTURE = Path(__file__).parents[2] / "wire/golden/vllm-0.32-metrics.txt"
LONG_CHAT = {**CHAT, "messages": [{"role": "user", "content": "x" * 40_000}]}


def test_the_second_request_with_a_prefix_reports_its_cached_tokens() -> None:
    async def check(engine: Engine) -> None:
        system = {"role": "system", "content": "You are terse. " * 40}
        for turn, cached in (("a", 0), ("b", 144)):
            body = {"messages": [system, {"role": "user", "content": turn}], "max_tokens": 2}
            _, answer = await engine.post("/v1/chat/completions", body)
            details = answer["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] == cached
        _, message = await engine.post("/v1/messages", {**body, "max_tokens": 2})
        assert message["usage"]["cache_read_input_tokens"] > 0
        assert (
            message["usage"]["cache_read_input_tokens"] + message["usage"]["input_tokens"]
            == answer["usage"]["prompt_tokens"]
        )
        samples = await engine.samples()
        assert samples["vllm:prefix_cache_hits_total"] >= 144
        assert samples["vllm:prompt_tokens_cached_total"] == samples["vllm:prefix_cache_hits_total"]

    run(check)


def test_the_next_turn_of_a_chat_hits_the_answer_of_the_last_one() -> None:
    async def check(engine: Engine) -> None:
        first = {"role": "user", "content": "tell me a long story, please"}
        _, answer = await engine.post("/v1/chat/completions", {"messages": [first], "max_tokens": 100})
        said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        body = {"messages": [first, said, {"role": "user", "content": "more"}], "max_tokens": 1}
        _, again = await engine.post("/v1/chat/completions", body)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 96

    run(check)


def test_salts_and_adapters_do_not_share_a_cache_and_a_reset_empties_it() -> None:
    async def check(engine: Engine) -> None:
        async def cached(**changes: object) -> int:
            _, answer = await engine.post("/v1/completions", {"prompt": "y" * 4000, "max_tokens": 1, **changes})
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert await cached() == 0
        assert await cached() == 992
        assert await cached(cache_salt="tenant") == 0
        assert await cached(model="sql") == 0
        assert (await engine.post("/reset_prefix_cache", b""))[1] == {"success": True}
        assert await cached() == 0

    run(check, quick(loras=("sql",)))


def test_tools_calls_and_template_arguments_are_part_of_the_prompt() -> None:
    async def check(engine: Engine) -> None:
        async def prompt_tokens(path: str = "/v1/chat/completions", **more: object) -> int:
            status, answer = await engine.post(path, {**CHAT, **more})
            assert status == 200, answer
            usage = answer["usage"]
            return int(usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))

        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        called = [
            {"role": "user", "content": "hello world"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "seen"},
        ]
        plain = await prompt_tokens()
        assert await prompt_tokens(tools=None, chat_template_kwargs=None) == plain
        assert await prompt_tokens(tools=tools) > plain + 20
        assert await prompt_tokens(chat_template_kwargs={"enable_thinking": True}) > plain
        assert await prompt_tokens(messages=called) > plain + 20
        assert await prompt_tokens("/v1/messages", tools=tools) > await prompt_tokens("/v1/messages")
        responses = {"input": "hello"}
        assert await prompt_tokens("/v1/responses", **responses, tools=tools) > await prompt_tokens(
            "/v1/responses", **responses
        )

    run(check)


def test_cached_tokens_can_be_switched_off() -> None:
    async def check(engine: Engine) -> None:
        _, answer = await engine.post("/v1/chat/completions", CHAT)
        assert answer["usage"]["prompt_tokens_details"] is None
        events = await engine.events("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
        assert list(events[-2][1]["usage"]) == ["prompt_tokens", "total_tokens", "completion_tokens"]

    run(check, quick(is_reporting_cached_tokens=False))


def test_answers_depend_on_the_seed_and_the_request_only() -> None:
    async def text(seed: int, content: str) -> str:
        async with running(quick(seed=seed)) as engine:
            body = {**CHAT, "messages": [{"role": "user", "content": content}]}
            return str((await engine.post("/v1/chat/completions", body))[1]["choices"][0]["message"]["content"])

    async def check() -> None:
        assert await text(1, "a") == await text(1, "a")
        assert await text(1, "a") != await text(2, "a")
        assert await text(1, "a") != await text(1, "b")

    run_async(check())


def test_an_answer_without_a_limit_stops_by_itself() -> None:
    async def check(engine: Engine) -> None:
        _, answer = await engine.post("/v1/chat/completions", {"messages": CHAT["messages"]})
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert 48 <= answer["usage"]["completion_tokens"] <= 176

    run(check)


def test_the_head_of_a_stream_comes_before_prefill_is_done() -> None:
    async def check(engine: Engine) -> None:
        async with engine.session.post(
            engine.url + "/v1/chat/completions", json={**LONG_CHAT, "stream": True}
        ) as response:
            assert response.status == 200
            samples = await engine.samples()
            assert samples["vllm:num_requests_running"] == 1
            assert samples["vllm:time_to_first_token_seconds_count"] == 0
            assert samples["vllm:kv_cache_usage_perc"] > 0

    run(check, quick(faults={"slow_factor": 5.0}))


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_client_that_leaves_frees_the_engine(is_streaming: bool) -> None:
    async def check(engine: Engine) -> None:
        async with aiohttp.ClientSession() as session:
            body = {**LONG_CHAT, "stream": is_streaming}
            request = asyncio.ensure_future(session.post(engine.url + "/v1/chat/completions", json=body))
            await engine.until("vllm:num_requests_running", 1)
            assert (await engine.get("/load"))[1] == {"server_load": 1}
            if is_streaming:
                (await request).close()
            else:
                request.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await request
        await engine.until("vllm:num_requests_running", 0)
        samples = await engine.samples()
        assert samples["vllm:kv_cache_usage_perc"] == 0
        assert samples["vllm:request_success_total{finished_reason=abort}"] == 0, "vLLM does not count aborts there"
        assert (await engine.get("/load"))[1] == {"server_load": 0}
        _, arrivals = await engine.get("/requests")
        assert [each["outcome"] for each in arrivals if each["method"] == "POST"] == ["left"]

    run(check, quick(faults={"slow_factor": 5.0}, record_last=1000))


def test_what_arrived_can_be_asked_for() -> None:
    async def check(engine: Engine) -> None:
        await engine.post("/v1/chat/completions", CHAT, X_Probe="1")
        _, arrivals = await engine.get("/requests")
        assert arrivals[0]["path"] == "/v1/chat/completions"
        assert ["X-Probe", "1"] in arrivals[0]["headers"]
        assert (len(arrivals[0]["body_sha256"]), arrivals[0]["outcome"]) == (64, "200")

    run(check, quick(record_last=4))


def test_injected_failures_hit_about_the_asked_share() -> None:
    async def check(engine: Engine) -> None:
        statuses = [(await engine.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))[0] for _ in range(60)]
        assert 10 < statuses.count(500) < 50
        assert set(statuses) == {200, 500}
        status, faults = await engine.post("/faults", {"fail_rate": 1, "fail_status": 503})
        assert (status, faults["fail_rate"]) == (200, 1)
        status, answer = await engine.post("/v1/completions", {"prompt": "a"})
        assert (status, answer["error"]["code"]) == (503, 503)
        assert (await engine.post("/faults", {"fail_rate": 2}))[0] == 400
        assert (await engine.post("/faults", {"nonsense": 2}))[0] == 400
        await engine.post("/faults", {"fail_rate": 0, "is_healthy": False})
        assert (await engine.get("/health"))[0] == 503
        assert (await engine.post("/v1/completions", {"prompt": "a"}))[0] == 200

    run(check, quick(faults={"fail_rate": 0.5}))


def test_a_stalled_stream_stays_open_and_silent() -> None:
    async def check(engine: Engine) -> None:
        async with engine.session.post(engine.url + "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            for _ in range(3):  # the role and two tokens
                assert (await response.content.readuntil(b"\n\n")).startswith(b"data: {")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(response.content.readany(), 0.2)
            assert not response.content.at_eof()

    run(check, quick(faults={"stall_after": 2}))


def test_a_cut_stream_breaks_visibly() -> None:
    async def check(engine: Engine) -> None:
        with pytest.raises(aiohttp.ClientError):
            await engine.events("/v1/chat/completions", CHAT)
        await engine.post("/faults", {"cut_after": 0})
        with pytest.raises(aiohttp.ClientError):
            await engine.post("/v1/chat/completions", CHAT)
        await engine.post("/faults", {"cut_after": None})
        assert (await engine.post("/v1/chat/completions", CHAT))[0] == 200
        await engine.until("vllm:num_requests_running", 0)

    run(check, quick(faults={"cut_after": 3}))


def test_a_loading_engine_answers_503_until_it_is_ready() -> None:
    async def check(engine: Engine) -> None:
        assert (await engine.get("/health"))[0] == 503
        assert (await engine.post("/v1/chat/completions", CHAT))[0] == 503
        while (await engine.get("/health"))[0] != 200:
            await asyncio.sleep(0.02)
        assert (await engine.post("/v1/chat/completions", CHAT))[0] == 200

    run(check, quick(startup_delay_s=0.5))


def test_a_key_is_wanted_when_one_is_set() -> None:
    async def check(engine: Engine) -> None:
        assert (await engine.post("/v1/chat/completions", CHAT))[0] == 401
        assert (await engine.post("/v1/chat/completions", CHAT, Authorization="Bearer k"))[0] == 200
        assert (await engine.get("/health"))[0] == 200

    run(check, quick(api_key="k"))


def test_metrics_can_be_missing() -> None:
    async def check(engine: Engine) -> None:
        assert (await engine.get("/metrics"))[0] == 404

    run(check, quick(has_metrics=False))


def test_a_lower_priority_value_overtakes_the_queue() -> None:
    async def check(engine: Engine) -> None:
        order: list[int] = []

        async def one(priority: int) -> None:
            await engine.post("/v1/completions", {"prompt": "a" * 800, "max_tokens": 20, "priority": priority})
            order.append(priority)

        first = asyncio.ensure_future(one(0))
        await engine.until("vllm:num_requests_running", 1)
        late = [asyncio.ensure_future(one(priority)) for priority in (9, 8)]
        await engine.until("vllm:num_requests_waiting", 2)
        late.append(asyncio.ensure_future(one(-5)))
        await engine.until("vllm:num_requests_waiting", 3)
        await engine.post("/faults", {"slow_factor": 0.1})
        await asyncio.gather(first, *late)
        assert order == [0, -5, 8, 9]

    run(check, quick(max_num_seqs=1, is_priority_scheduling=True, faults={"slow_factor": 20.0}))


def test_the_metrics_page_counts_what_was_done() -> None:
    async def check(engine: Engine) -> None:
        for _ in range(3):
            await engine.post("/v1/chat/completions", CHAT)
        samples = await engine.samples()
        assert samples["vllm:prompt_tokens_total"] == 30
        assert samples["vllm:generation_tokens_total"] == 24
        assert samples["vllm:request_success_total{finished_reason=length}"] == 3
        assert samples["vllm:e2e_request_latency_seconds_count"] == 3
        assert samples["vllm:time_to_first_token_seconds_bucket{le=+Inf}"] == 3
        assert samples["vllm:inter_token_latency_seconds_count"] == 21
        assert samples["vllm:iteration_tokens_total_sum"] == 30 + 21, "the first token comes from prefill"
        assert samples["http_requests_total{handler=/v1/chat/completions,method=POST,status=2xx}"] == 3
        assert samples["shoal_engine_loop_lag_seconds{quantile=0.99}"] >= 0
        _, page = await engine.get("/metrics")
        info = re.search(r"^vllm:cache_config_info\{(.*)\} 1.0$", page, re.MULTILINE)
        assert info is not None
        assert 'block_size="16"' in info[1]
        assert 'num_gpu_blocks="1600"' in info[1]
        assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in page

    run(check)


def test_adapters_in_use_are_named_on_the_metrics_page() -> None:
    async def check(engine: Engine) -> None:
        body = {**LONG_CHAT, "model": "sql", "stream": True}
        async with engine.session.post(engine.url + "/v1/chat/completions", json=body):
            _, page = await engine.get("/metrics")
        lora = re.search(r"^vllm:lora_requests_info\{(.*)\} (.*)$", page, re.MULTILINE)
        assert lora is not None
        assert lora[1] == 'max_lora="4",running_lora_adapters="sql",waiting_lora_adapters=""'
        assert float(lora[2]) > 1.7e9

    run(check, quick(loras=("sql",), faults={"slow_factor": 5.0}))


def test_families_types_and_labels_are_those_of_a_real_vllm() -> None:
    def families(page: str) -> dict[str, str]:
        found = re.findall(r"^# TYPE (vllm:\S+) (\w+)$", page, re.MULTILINE)
        return dict(found)

    def labels(page: str) -> dict[str, set[str]]:
        out: dict[str, set[str]] = {}
        for name, inside in re.findall(r"^(vllm:\w+)\{(.*)\} \S+$", page, re.MULTILINE):
            out.setdefault(name, set()).update(re.findall(r'(\w+)="', inside))
        return out

    def buckets(page: str) -> set[tuple[str, str]]:
        return set(re.findall(r'^(vllm:\w+_bucket)\{.*le="([^"]*)"', page, re.MULTILINE))

    async def check(engine: Engine) -> None:
        ours, theirs = (await engine.get("/metrics"))[1], CAPTURE.read_text()
        assert families(ours) == families(theirs)
        assert labels(ours) == labels(theirs)
        assert buckets(ours) == buckets(theirs)

    run(check)


def test_requests_beyond_the_batch_wait_and_are_counted_as_waiting() -> None:
    async def check(engine: Engine) -> None:
        streams = [
            await engine.session.post(engine.url + "/v1/chat/completions", json={**LONG_CHAT, "stream": True})
            for _ in range(3)
        ]
        samples = await engine.samples()
        assert samples["vllm:num_requests_running"] == 1
        assert samples["vllm:num_requests_waiting"] == 2
        assert samples["vllm:num_requests_waiting_by_reason{reason=capacity}"] == 2
        for stream in streams:
            stream.close()
        await engine.until("vllm:num_requests_waiting", 0)

    run(check, quick(max_num_seqs=1, faults={"slow_factor": 5.0}))


def test_a_hundred_streams_at_once_all_get_all_their_tokens() -> None:
    async def check(engine: Engine) -> None:
        async def one(number: int) -> int:
            body = {"prompt": f"stream {number}", "max_tokens": 20}
            return len(await engine.events("/v1/completions", body))

        assert await asyncio.gather(*[one(number) for number in range(100)]) == [21] * 100
        samples = await engine.samples()
        assert samples["vllm:generation_tokens_total"] == 2000
        assert samples["vllm:kv_cache_usage_perc"] == 0

    run(check, quick(num_blocks=100))


def test_a_taken_port_and_an_unknown_profile_are_one_clear_error() -> None:
    async def check() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"--port: 127.0.0.1:{port} is already taken"):
                await EngineServer().start(EngineServerConfig(port=port))
        with pytest.raises(ConfigError, match="unknown profile 'h200'; known: tiny"):
            await EngineServer().start(quick(profile="h200"))
        with pytest.raises(ConfigError, match="--num-blocks: -1 is below 0"):
            await EngineServer().start(quick(num_blocks=-1))
        with pytest.raises(ConfigError, match="--port: 99999 is no port"):
            await EngineServer().start(EngineServerConfig(port=99999))

    run_async(check())


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_verb_serves_and_ends_cleanly_on_a_signal(number: signal.Signals) -> None:
    async def check() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "shoal.cli", "engine", "--port", "0", "--model", "one", "--model", "two", "--blocks", "50"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            line = (await process.stdout.readline()).decode()
            found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", line)
            assert found is not None
            async with aiohttp.ClientSession() as session, session.get(found[1] + "/v1/models") as response:
                models = (await response.json())["data"]
            assert [(card["id"], card["max_model_len"]) for card in models] == [("one", 800), ("two", 800)]
            process.send_signal(number)
            _, errors = await process.communicate()
            assert (process.returncode, errors) == (0, b"")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    run_async(check())


def test_an_engine_with_a_certificate_speaks_tls(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = (
        builder.serial_number(1).not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    )
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    (tmp_path / "cert.pem").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )

    async def check(engine: Engine) -> None:
        trust = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        url = f"https://localhost:{engine.port}/v1/chat/completions"
        async with engine.session.post(url, json={**CHAT, "stream": True}, ssl=trust) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")

    run(check, quick(tls_cert=str(tmp_path / "cert.pem"), tls_key=str(tmp_path / "key.pem")))
