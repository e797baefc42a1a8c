"""A real vLLM on CPU behind `shoal up`.  `make vllm` installs it; without it these tests are skipped."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

HERE = Path(__file__).parent
VENV = Path(os.environ.get("SHOAL_VLLM_VENV", HERE.parents[1] / ".venv-vllm"))
START_S = 170.0
PROMPT = "def main():\n    return sum(range(10))\n" * 12

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not (VENV / ".installed").exists(), reason="no vLLM installed: make vllm"),
]


class RealPool(NamedTuple):
    url: str
    run_dir: Path
    backends: list[str]

    def status(self) -> dict[str, Any]:
        return self._verb("status", "--json")

    def explain(self, request_id: str) -> dict[str, Any]:
        for _ in range(100):
            (found,) = self._verb("explain", request_id, "--json")["found"]
            if found["cached_tokens"] is not None:
                return dict(found)
            time.sleep(0.1)
        raise AssertionError(f"no record of {request_id}: {found}")

    def _verb(self, *words: str) -> dict[str, Any]:
        run = subprocess.run(
            [sys.executable, "-m", "shoal.cli", *words, "--run-dir", str(self.run_dir)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        found: dict[str, Any] = json.loads(run.stdout)
        return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def process(argv: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        child = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **env})
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def vllm(model: Path, port: int) -> list[str]:
    return [
        str(VENV / "bin/vllm"), "serve", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1",
        "--port", str(port), "--max-model-len", "2048", "--block-size", "32", "--kv-cache-memory-bytes", "655360",
        "--enforce-eager", "--distributed-executor-backend", "uni", "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip


def wait_for(url: str, children: list[subprocess.Popen[bytes]], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if any(child.poll() is not None for child in children):
            raise AssertionError(f"a process ended while starting:\n{log.read_text()[-3000:]}")
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.3)
    raise AssertionError(f"{url} did not come up:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    room = tmp_path_factory.mktemp("vllm")
    model = room / "model"
    subprocess.run([str(VENV / "bin/python"), str(HERE / "make_model.py"), str(model)], check=True, timeout=120)
    env = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip
    ports = [free_port(), free_port()]
    backends = [f"http://127.0.0.1:{port}" for port in ports]
    port, run_dir = free_port(), room / "run"
    up = [
        sys.executable,
        "-m",
        "shoal.cli",
        "up",
        "--port",
        str(port),
        "--metrics-port",
        "0",
        "--run-dir",
        str(run_dir),
    ]
    up += [word for backend in backends for word in ("--backend", backend)]
    with (
        process(vllm(model, ports[0]), room / "a.log", **env) as first,
        process(vllm(model, ports[1]), room / "b.log", **env) as second,
        process(up, room / "up.log") as shoal,
    ):
        for number, backend in enumerate(backends):
            wait_for(f"{backend}/health", [first, second], room / ("a.log", "b.log")[number])
        running = RealPool(f"http://127.0.0.1:{port}", run_dir, backends)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert shoal.poll() is None, (room / "up.log").read_text()[-3000:]
            try:
                if sum(endpoint["state"] == "ready" for endpoint in running.status()["endpoints"]) == 2:
                    break
            except subprocess.CalledProcessError:
                pass
            time.sleep(0.5)
        yield running


@pytest.fixture(scope="module")
def client(pool: RealPool) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, request_id: str, text: str = PROMPT) -> int:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": text}],
        max_tokens=6,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-request-id": request_id},
    )
    chunks = list(stream)
    usage = chunks[-1].usage
    assert usage is not None
    return usage.completion_tokens


def test_a_repeated_prompt_returns_to_the_vllm_that_cached_it(pool: RealPool, client: openai.OpenAI) -> None:
    assert ask(client, "cold") == 6
    first = pool.explain("cold")
    time.sleep(0.3)
    ask(client, "warm")
    second = pool.explain("warm")
    assert second["served"] == first["served"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] > 0.7 * second["reported_prompt_tokens"]
    assert second["candidates"][0].keys() >= {"id", "total", "scores"}


def test_the_engines_own_figures_are_read(pool: RealPool, client: openai.OpenAI) -> None:
    ask(client, "figures")
    time.sleep(3)
    for endpoint in pool.status()["endpoints"]:
        assert endpoint["models"] == ["tiny"]
        assert endpoint["running"] == 0
        assert endpoint["kv_usage_ratio"] is not None


def test_answers_of_vllm_pass_unchanged(pool: RealPool) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 99999}
    through = httpx.post(f"{pool.url}/v1/chat/completions", json=body, timeout=30)
    direct = httpx.post(f"{pool.backends[0]}/v1/chat/completions", json=body, timeout=30)
    assert (through.status_code, through.json()) == (direct.status_code, direct.json())
    assert through.status_code == 400


def test_every_api_of_vllm_is_reached_through_the_pool(pool: RealPool, client: openai.OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt="import os", max_tokens=3).choices[0].text
    assert client.responses.create(model="tiny", input="hi", max_output_tokens=16).output
    tokenized = httpx.post(f"{pool.url}/tokenize", json={"model": "tiny", "prompt": "import os"}, timeout=30)
    assert tokenized.json()["count"] > 0
    message = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    answer = httpx.post(f"{pool.url}/v1/messages", json=message, timeout=30).json()
    assert answer["type"] == "message"


def test_a_client_that_leaves_frees_the_vllm_within_seconds(pool: RealPool) -> None:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "go on"}], "max_tokens": 1900, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    with httpx.stream("POST", f"{pool.url}/v1/chat/completions", json=body, timeout=30) as answer:
        next(answer.iter_bytes())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        pages = [httpx.get(f"{backend}/metrics", timeout=10).text for backend in pool.backends]
        running = [
            float(line.split()[-1])
            for page in pages
            for line in page.splitlines()
            if line.startswith("vllm:num_requests_running")
        ]
        if sum(running) == 0:
            break
        time.sleep(0.1)
    assert running == [0.0, 0.0]
