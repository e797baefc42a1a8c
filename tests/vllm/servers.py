"""Real engines as child processes that a test may kill, start again and question."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.scenarios.engines import free_port, totals

START_S = 420.0
"""Longest start, on a busy machine; 15 seconds on two idle cores."""

VLLM_VENV = Path(os.environ.get("SHOAL_VLLM_VENV", Path(__file__).parents[2] / ".venv-vllm"))
VLLM_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_SERVER_DEV_MODE": "1",
}


class Server:
    """One engine.  It keeps its ports over a restart; what it prints goes to `log`.

    ready: path that answers 200 when it can serve.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], port: int, log: Path, ready: str) -> None:
        self.port = port
        self.log = log
        self._command = list(command)
        self._env = {**os.environ, **env}
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(timeout=60.0)
        self.start()

    @property
    def address(self) -> str:
        """Its `ip:port`."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{self.address}"

    def start(self) -> None:
        """Start it; `listening` says when it is there."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._env, start_new_session=True
            )

    def listening(self, timeout_s: float = START_S) -> "Server":
        """Wait until it can serve."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self._process is not None
            assert self._process.poll() is None, f"the engine ended while starting:\n{self.said()}"
            try:
                if self.http.get(self.url + self._ready).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"{self.url} did not come up:\n{self.said()}")

    def said(self) -> str:
        """The end of what it printed."""
        return self.log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """End it and its children as the kernel does."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """End it for good."""
        self.kill()
        self.http.close()

    def heal(self) -> None:
        """Start it again where it was killed."""
        if self._process is None or self._process.poll() is not None:
            self.start()
            self.listening()

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        """One request to it, beside the pool."""
        return self.http.post(self.url + path, json=body)

    def samples(self) -> dict[str, float]:
        """Its metrics page as name -> sum over the label sets."""
        return totals(self.http.get(f"{self.url}/metrics").text)


def vllm(model: Path, log: Path, *flags: str) -> Server:
    """Start a vLLM whose cache holds 80 blocks of 32 tokens, and which tells what its cache holds."""
    port, events, replay = free_port(), free_port(), free_port()
    config = (
        f'{{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:{events}",'
        f'"replay_endpoint":"tcp://*:{replay}","topic":"kv@tiny"}}'
    )
    command = [
        str(VLLM_VENV / "bin/vllm"), "serve", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1",
        "--port", str(port), "--max-model-len", "2048", "--kv-cache-memory-bytes", "655360",
        "--enforce-eager", "--distributed-executor-backend", "uni", "--enable-prompt-tokens-details",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--disable-uvicorn-access-log", "--kv-events-config", config, *flags,
    ]  # fmt: skip
    return Server(command, VLLM_ENV, port, log, "/health")
