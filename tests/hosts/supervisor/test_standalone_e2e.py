"""`shoal picker` alone: a foreign gateway asks it over TCP."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as rpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal.cli import main
from tests.hosts.supervisor.pool_rig import until
from tests.hosts.supervisor.standalone_rig import Alone
from tests.scenarios.engines import engines
from tests.scenarios.pools import HEAD
from tests.vllm.exactpool import EXACT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    """A picker that is ready."""
    running = Alone(tmp_path)
    try:
        running.wait_ready()
        yield running
    finally:
        running.end()


def _request(session: str = "") -> list[pb.ProcessingRequest]:
    """What a gateway with buffered bodies asks."""
    headers = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
    if session:
        headers["x-session-id"] = session
    head = pb.ProcessingRequest()
    head.request_headers.headers.headers.extend(
        base_pb2.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()
    )
    body = pb.ProcessingRequest()
    body.request_body.body = b'{"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}'
    body.request_body.end_of_stream = True
    return [head, body]


def _ask(port: int) -> str:
    """Ask as a gateway does; return the endpoint that was chosen."""
    answered = threading.Event()

    def messages() -> Iterator[pb.ProcessingRequest]:
        yield from _request()
        answered.wait(20.0)

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answers = rpc.ExternalProcessorStub(channel).Process(messages(), timeout=20.0)
        next(answers)
        answer = next(answers)
        answered.set()
    mutations = answer.request_body.response.header_mutation.set_headers
    return next(
        option.header.raw_value.decode()
        for option in mutations
        if option.header.key == "x-gateway-destination-endpoint"
    )


def _health(port: int) -> int:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service="")
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=20.0).status)


def test_a_gateway_is_told_the_endpoint_and_the_verbs_find_the_picker(
    alone: Alone, capsys: pytest.CaptureFixture[str]
) -> None:
    address = alone.engine_urls[0].removeprefix("http://")
    assert _ask(alone.port) == address
    serving = health_pb2.HealthCheckResponse.SERVING
    assert _health(alone.port) == serving
    assert _health(alone.health_port) == serving
    assert main(["status", "--once", "--interval", "0.1", *alone.flags]) == 0
    page = capsys.readouterr().out
    assert f"grpc://127.0.0.1:{alone.port}" in page
    assert address in page
    assert " ERROR " not in alone.said("picker")
    assert main(["endpoint", "drain", address, *alone.flags]) == 0
    assert "drained" in capsys.readouterr().out


def test_a_session_is_aborted_on_the_gateways_streams_and_an_engine_reset(
    alone: Alone, capsys: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()

    def messages() -> Iterator[pb.ProcessingRequest]:
        yield from _request("doomed")
        over.wait(60.0)

    with grpc.insecure_channel(f"127.0.0.1:{alone.port}") as channel:
        answers = rpc.ExternalProcessorStub(channel).Process(messages(), timeout=60.0)
        next(answers)
        assert next(answers).HasField("request_body")
        assert main(["abort", "--session", "doomed", *alone.flags]) == 0
        assert next(answers).immediate_response.status.code == 410
        over.set()
        assert list(answers) == []
    assert main(["abort", "--session", "doomed", *alone.flags]) == 0
    assert main(["endpoint", "reset", "--all", *alone.flags]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["ended 1 request of session doomed", "ended 0 requests of session doomed"]
    assert said[2].endswith("its prefix cache is empty")


def test_an_engine_that_is_asked_for_tokens_gets_its_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("engine-secret\n")
    events = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}'
    with engines(tmp_path, ["--api-key", "engine-secret", "--kv-events-config", events]) as (guarded,):
        backend = f"{{url: '{guarded.url}', api_key_file: {tmp_path}/key, engine: vllm}}"
        (tmp_path / "pool.yaml").write_text(HEAD + f"backends: [{backend}]\n" + EXACT.format(backend="engine: {}"))
        picker = Alone(tmp_path, engines=0, more=["--config-file", str(tmp_path / "pool.yaml")])
        try:
            picker.wait_ready()
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 40}]}
            for _ in range(2):
                # Its blocks are known from here on, so tokens are worth asking for.
                guarded.post(asked, "engine-secret")
            until(lambda: _ask(picker.port) and guarded.arrivals("/tokenize"), why=lambda: picker.said("picker"))
            (shown, *_) = [dict(each["headers"]) for each in guarded.arrivals("/tokenize")]
            assert {name.lower(): value for name, value in shown.items()}["authorization"] == "Bearer engine-secret"
            kept = tmp_path / "run" / "backends.json"
            assert kept.stat().st_mode & 0o077 == 0
            picker.picker.send_signal(signal.SIGTERM)
            assert picker.picker.wait(60.0) == 0
            assert not kept.exists()
        finally:
            picker.end()


def test_status_warns_of_an_engine_whose_load_the_picker_cannot_read(
    alone: Alone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engines(tmp_path / "mute", ["--no-metrics"]) as (mute,):
        assert main(["endpoint", "add", mute.url, *alone.flags]) == 0

        def warned() -> bool:
            assert main(["status", "--once", "--interval", "0.1", *alone.flags]) == 0
            return f"the load of {mute.url} is not known: /metrics: HTTP 404" in capsys.readouterr().out

        until(warned, why=lambda: alone.said("picker"))


def test_sigterm_ends_the_picker_and_its_sockets(alone: Alone) -> None:
    alone.picker.send_signal(signal.SIGTERM)
    assert alone.picker.wait(60.0) == 0
    assert not list((alone.directory / "run").glob("*.sock"))


def test_a_picker_whose_engine_does_not_answer_says_what_it_waits_for(alone: Alone) -> None:
    assert f"open to the gateway address=127.0.0.1:{alone.port} tls=off" in alone.said("picker")
    alone.engines[0].kill()
    until(lambda: "waiting for an endpoint to pick" in alone.said("picker"), why=lambda: alone.said("picker"))
    (line, *_) = [line for line in alone.said("picker").splitlines() if "waiting for an endpoint" in line]
    assert f"{alone.engine_urls[0]}: " in line


def test_flags_of_the_other_picker_that_mean_nothing_here_are_accepted_or_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["picker", "--backend", "http://127.0.0.1:1", "--pool-name", "p", "--tracing=false"]
    assert main([*flags, "--secure-serving=true"]) == 2
    assert "--secure-serving: needs --cert-path" in capsys.readouterr().err
    assert main([*flags, "--metrics-endpoint-auth=true"]) == 2
    assert "--metrics-host" in capsys.readouterr().err
    assert main(["picker"]) == 2
    assert "nothing to pick from" in capsys.readouterr().err
