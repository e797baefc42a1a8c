"""Requests as they reach an engine: headers, bodies of every size and form, other protocols."""

import asyncio
import gzip
import hashlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import aiohttp
import httpx
import msgspec
import psutil
import pytest

from tests.hosts.supervisor.pool_rig import body, until
from tests.scenarios.backends import Backend, backend
from tests.scenarios.pools import ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MIB = 1 << 20
LIMIT = 64 * MIB


@pytest.fixture(scope="module")
def echo() -> Iterator[Backend]:
    """The backend that shows what it got."""
    with backend() as running:
        yield running


@pytest.fixture(autouse=True)
def as_before(echo: Backend) -> Iterator[None]:
    """Every test starts with a backend without scripts."""
    yield
    echo.seen.clear()
    echo.scripts.clear()
    echo.answers.clear()
    echo.delay_s = 0.0


@pytest.fixture(scope="module")
def front(plane: str, tmp_path_factory: pytest.TempPathFactory, echo: Backend) -> Iterator[ScenarioPool]:
    """A pool before it, with a small budget for half-sent bodies."""
    settings = "limits: {max_body_bytes: 64Mi, max_buffered_bytes: 100Mi}\n"
    with pool(plane, tmp_path_factory.mktemp("front"), ["--backend", echo.url], settings) as running:
        yield running


def padded(size: int) -> bytes:
    """A chat request of exactly `size` bytes."""
    empty = msgspec.json.encode(body(""))
    return msgspec.json.encode(body("x" * (size - len(empty))))


@pytest.mark.parametrize("size", [1024, 32 * 1024, 200 * 1024, 5 * MIB, 20 * MIB, LIMIT])
def test_a_body_of_any_size_up_to_the_limit_arrives_byte_for_byte(
    size: int, front: ScenarioPool, echo: Backend
) -> None:
    sent = padded(size)
    assert len(sent) == size
    answer = front.http.post(f"{front.url}/v1/chat/completions", content=sent)
    assert answer.json() == {"bytes": size}
    arrived = echo.seen.pop()
    assert hashlib.sha256(arrived.body).digest() == hashlib.sha256(sent).digest()
    assert arrived.values("content-length") == [str(size)]


@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "chunked"])
def test_a_body_over_the_limit_is_413_and_the_limit_is_named(is_declared: bool, front: ScenarioPool) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(65):
            yield b"x" * MIB

    content = b"x" * (LIMIT + 1) if is_declared else pieces()
    answer = front.http.post(f"{front.url}/v1/chat/completions", content=content)
    assert answer.status_code == 413
    assert str(LIMIT) in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "body_too_large"


def resident(front: ScenarioPool, name: str) -> int:
    """Memory of Envoy or of the workers, in bytes."""
    if name == "envoy":
        return int(psutil.Process(front.envoy_pid()).memory_info().rss)
    return sum(int(psutil.Process(pid).memory_info().rss) for pid in front.worker_pids())


def test_half_sent_bodies_hold_no_more_than_their_budget_and_are_forgotten(front: ScenarioPool) -> None:
    url = httpx.URL(front.url)
    # Who receives bodies may hold the budget, and as much again for what is not read yet.
    allowed = {"envoy": 200 * MIB, "workers": 50 * MIB} if front.plane == "envoy" else {"workers": 200 * MIB}
    before = {name: resident(front, name) for name in allowed}
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2097152\r\n\r\n"
    refused = 0
    with ExitStack() as stack:
        connections = []
        for _ in range(200):
            connection = stack.enter_context(socket.create_connection((url.host, url.port or 80), timeout=30.0))
            connection.sendall(head)
            connections.append(connection)
        for connection in connections:
            connection.setblocking(False)
            try:
                connection.send(b"x" * MIB)
            except OSError:
                refused += 1
        asyncio.run(asyncio.sleep(1.0))
        for connection in connections:
            try:
                refused += b" 429 " in connection.recv(4096)
            except BlockingIOError:
                pass
            except ConnectionError:
                refused += 1
        # 100 MiB of budget take fifty bodies of 2 MiB; the others are told so on their head.
        assert refused >= 150
        for name, most in allowed.items():
            assert resident(front, name) - before[name] < most, name
    until(lambda: front.chat().status_code == 200, why=front.said)
    front.idle()


def test_a_compressed_body_passes_as_it_is_and_is_still_understood(front: ScenarioPool, echo: Backend) -> None:
    sent = gzip.compress(msgspec.json.encode(body("packed " * 500)))
    headers = {"content-encoding": "gzip", "content-type": "application/json", "x-request-id": "packed"}
    assert front.http.post(f"{front.url}/v1/chat/completions", content=sent, headers=headers).status_code == 200
    arrived = echo.seen.pop()
    assert arrived.body == sent
    assert arrived.values("content-encoding") == ["gzip"]
    explained = front.explained("packed")
    assert explained["model"] == "tiny"
    assert explained["prompt_tokens"] > 500
    unknown = gzip.compress(msgspec.json.encode({**body("x"), "model": "other"}))
    answer = front.http.post(f"{front.url}/v1/chat/completions", content=unknown, headers=headers)
    assert answer.status_code == 404


@pytest.mark.only_plane("envoy", "the direct plane speaks HTTP/1 alone")
def test_an_http2_client_is_served(front: ScenarioPool, echo: Backend) -> None:
    with httpx.Client(http1=False, http2=True, timeout=30.0) as client:
        answer = client.post(f"{front.url}/v1/chat/completions", json=body("two"))
    assert (answer.http_version, answer.status_code) == ("HTTP/2", 200)
    assert json.loads(echo.seen.pop().body)["messages"][0]["content"] == "two"


def test_a_websocket_passes_both_ways_and_leaves_no_booking(front: ScenarioPool) -> None:
    async def talk() -> list[str]:
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{front.url}/v1/realtime") as connection:
            heard = []
            for word in ("one", "two"):
                await connection.send_str(word)
                heard.append(await connection.receive_str(timeout=10.0))
            assert front.client.picture().inflight == 1
            return heard

    assert asyncio.run(talk()) == ["echo one", "echo two"]
    front.idle()


def test_a_multipart_upload_is_routed_by_its_model_and_passes_unchanged(front: ScenarioPool, echo: Backend) -> None:
    sound = bytes(range(256)) * 400
    files = {"file": ("a.wav", sound, "audio/wav")}
    path = f"{front.url}/v1/audio/transcriptions"
    assert front.http.post(path, files=files, data={"model": "tiny"}).status_code == 200
    assert sound in echo.seen.pop().body
    assert front.http.post(path, files=files, data={"model": "other"}).status_code == 404


def test_the_engine_never_sees_a_clients_key_twice_or_at_all(front: ScenarioPool, echo: Backend) -> None:
    headers = [
        ("authorization", "Bearer mine"),
        ("authorization", "Bearer another"),
        ("x-api-key", "mine"),
        ("content-type", "application/json"),
    ]
    front.http.post(f"{front.url}/v1/chat/completions", json=body("x"), headers=headers)
    arrived = echo.seen.pop()
    assert arrived.values("authorization") == []
    assert arrived.values("x-api-key") == []


def test_a_client_cannot_set_what_only_the_router_may(front: ScenarioPool, echo: Backend) -> None:
    control = {
        "x-gateway-destination-endpoint": "127.0.0.1:1",
        "x-gateway-destination-endpoint-subset": "127.0.0.1:1",
        "x-prefiller-host-port": "127.0.0.1:1",
        "x-encoder-hosts-ports": "127.0.0.1:1",
        "x-data-parallel-host-port": "127.0.0.1:1",
        "x-envoy-max-retries": "99",
        "x-envoy-upstream-rq-timeout-ms": "1",
    }
    answer = front.post(body("x"), {**control, "x-my-own": "kept", "connection": "keep-alive, x-hop", "x-hop": "1"})
    assert answer.status_code == 200
    arrived = echo.seen.pop()
    assert arrived.values("x-my-own") == ["kept"]
    assert arrived.values("x-hop") == []
    for name, value in control.items():
        assert value not in arrived.values(name), name
    assert not [name for name, _ in arrived.headers if name.startswith("x-envoy-")]


def test_an_engines_own_errors_pass_word_for_word(front: ScenarioPool, echo: Backend) -> None:
    said = b'{ "object":"error",  "message" : "context too long", "code":422 }'
    for status in (400, 404, 422, 429, 500):
        echo.answers["/v1/completions"] = (status, said)
        answer = front.post({"model": "tiny", "prompt": "x"}, path="/v1/completions")
        assert (answer.status_code, answer.content) == (status, said)
        assert answer.headers["content-type"].startswith("application/json")
    assert len([one for one in echo.seen if one.path == "/v1/completions"]) == 5


def test_a_hundred_400_of_an_engine_leave_it_ready(front: ScenarioPool, echo: Backend) -> None:
    echo.answers["/v1/completions"] = (400, b'{"error":{"message":"no"}}')
    front.idle()  # the records of earlier requests have come
    failures = front.sample("shoal_endpoint_failures_total")
    before = len(echo.seen)
    statuses = {
        front.post({"model": "tiny", "prompt": f"{turn}"}, path="/v1/completions").status_code for turn in range(100)
    }
    assert statuses == {400}
    assert len(echo.seen) == before + 100
    front.idle()
    assert front.sample("shoal_endpoint_failures_total") == failures
    assert list(front.states().values()) == ["ready"]


def test_an_event_stream_passes_byte_for_byte_however_it_is_cut(front: ScenarioPool, echo: Backend) -> None:
    pieces = [
        b": a comment\n\n",
        b'data: {"choices":[{"delta":{"content":"\xc3',
        b'\xa9t\xc3\xa9"}}]}\r\n\r\n',
        b'data:{"choices":[{"delta":{}}],"usage":{"prompt_tokens":7,"completion_tokens":2,',
        b'"odd_details":{"kept":[1,2]}}}\n\nevent: ping\ndata: {}\n\n',
        b"data: [DONE]\n\n",
    ]
    echo.scripts["/v1/chat/completions"] = pieces
    answer = front.post(body("x", stream=True))
    assert answer.content == b"".join(pieces)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/embeddings"),
        ("POST", "/tokenize"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/v1/rerank"),
        ("POST", "/score"),
        ("POST", "/pooling"),
        ("POST", "/something/else"),
        ("GET", "/something/else"),
    ],
)
def test_every_path_counts_as_load_while_it_runs_and_not_after(
    method: str, path: str, front: ScenarioPool, echo: Backend
) -> None:
    front.idle()
    asked = {**body("x"), "prompt": "x", "input": "x", "token_ids": [1, 2], "query": "q", "documents": ["d"]}
    asked |= {"text_1": "a", "text_2": "b"}
    content = msgspec.json.encode(asked) if method == "POST" else b""
    echo.close_gate()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(front.http.request, method, front.url + path, content=content)
        try:
            until(lambda: front.sample("llm_d_epp_inflight_requests") == 1 or answer.done(), why=front.said)
            assert not answer.done(), answer.result().text
        finally:
            echo.open_gate()
        assert answer.result().status_code == 200
    assert echo.seen.pop().path == path
    until(lambda: front.sample("llm_d_epp_inflight_requests") == 0, why=front.said)


def test_retries_stay_within_their_budget_when_everything_is_overloaded(front: ScenarioPool, echo: Backend) -> None:
    asked, count = msgspec.json.encode({"model": "tiny", "prompt": "x"}), 800

    async def send(session: aiohttp.ClientSession) -> int:
        async with session.post(f"{front.url}/v1/completions", data=asked) as answer:
            return answer.status

    async def send_all() -> set[int]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            return set(await asyncio.gather(*(send(session) for _ in range(count))))

    with backend() as other:
        front.client.endpoint("add", other.url)
        until(lambda: list(front.states().values()) == ["ready", "ready"], why=front.said)
        for each in (echo, other):
            each.answers["/v1/completions"] = (503, b'{"error":{"message":"full"}}')
            each.delay_s = 1.0
        before = len(echo.seen)
        assert asyncio.run(send_all()) == {503}
        retries = len(echo.seen) - before + len(other.seen) - count
        front.client.endpoint("remove", other.url.removeprefix("http://"))
        until(lambda: len(front.states()) == 1, why=front.said)
    # At each moment 20 % of what is in flight, or 128: a dead engine's requests must all find another one.
    assert 0 < retries <= 0.5 * count
    until(lambda: front.chat("wake").status_code == 200 and list(front.states().values()) == ["ready"], why=front.said)
