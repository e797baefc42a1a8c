"""`shoal up` for the scenarios: the pool rig with configuration, metrics and explanations."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import openai
from prometheus_client.parser import text_string_to_metric_families

from shoal.hosts.admin import ADMIN_SOCKET
from tests.hosts.supervisor.pool_rig import Pool, body, until

HEAD = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\n"

ONE_AT_A_TIME = """---
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: concurrency-detector
  parameters: {maxConcurrency: 1}
- type: static-usage-limit-policy
flowControl:
  saturationDetector: {pluginRef: concurrency-detector}
  usageLimitPolicyPluginRef: static-usage-limit-policy
"""
"""Behind the settings of a pool: each engine gets one request at a time, the others wait."""


class ScenarioPool(Pool):
    """A running pool.  config: its file, which a test may change.  plane: its data plane."""

    def __init__(self, directory: Path, flags: Sequence[str], settings: str | None, plane: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.config = directory / "pool.yaml"
        self.plane = plane
        flags = [*flags, "--data-plane", plane]
        if settings is not None:
            self.config.write_text(HEAD + settings)
            flags = [*flags, "--config", str(self.config)]
        super().__init__(directory, flags)
        self.http = httpx.Client(timeout=60.0, verify=False, limits=httpx.Limits(max_connections=None))
        self._openai: openai.OpenAI | None = None
        self._anthropic: anthropic.Anthropic | None = None

    def chat(self, text: str = "hello", tokens: int = 4, request_id: str = "") -> httpx.Response:
        """One plain chat request, on a kept connection."""
        headers = {"x-request-id": request_id} if request_id else {}
        return self.post(body(text, tokens), headers)

    def post(
        self, asked: dict[str, Any], headers: dict[str, str] | None = None, path: str = "/v1/chat/completions"
    ) -> httpx.Response:
        """One request with a JSON body."""
        return self.http.post(self.url + path, json=asked, headers=headers)

    def send(self, name: str, prompt: str, tokens: int, is_streaming: bool = True) -> socket.socket:
        """Send a chat request under a name and return its connection, which can be dropped at any moment."""
        url = httpx.URL(self.url)
        content = msgspec.json.encode(body(prompt, tokens, is_streaming))
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"x-request-id: {name}\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        connection = socket.create_connection((url.host, url.port or 80), timeout=60.0)
        connection.sendall(head.encode() + content)
        return connection

    def admin(self, path: str) -> httpx.Response:
        """GET from the admin socket."""
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.run_dir / ADMIN_SOCKET))) as client:
            return client.get(f"http://pool{path}", timeout=30.0)

    def sample(self, name: str, /, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        total = 0.0
        for family in text_string_to_metric_families(self.admin("/metrics").text):
            for each in family.samples:
                if each.name == name and labels.items() <= each.labels.items():
                    total += each.value
        return total

    def explained(self, request_id: str) -> dict[str, Any]:
        """The one explanation of a request whose record has come."""

        def closed() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = self.client.explain(request_id)["found"]
            return [each for each in found if each["status"] is not None]

        (found,) = until(closed, why=self.said)
        return found

    @property
    def openai(self) -> openai.OpenAI:
        """The official client of this pool, without retries of its own."""
        if self._openai is None:
            self._openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        return self._openai

    @property
    def anthropic(self) -> anthropic.Anthropic:
        """The official Anthropic client of this pool, without retries of its own."""
        if self._anthropic is None:
            self._anthropic = anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0)
        return self._anthropic

    def states(self) -> dict[str, str]:
        """Address -> state."""
        return {each.address: each.state for each in self.client.picture().endpoints}

    def idle(self) -> None:
        """Wait until no booking and no missing record is left."""
        until(lambda: self.sample("shoal_flights_open") == 0, why=self.said)

    def worker_pids(self) -> list[int]:
        """The picker workers."""
        return [worker.pid for worker in self.client.picture().workers if worker.pid is not None]

    def end(self) -> None:
        for client in (self._openai, self._anthropic):
            if client is not None:
                client.close()
        self.http.close()
        super().end()


@contextmanager
def pool(plane: str, directory: Path, flags: Sequence[str], settings: str | None = None) -> Iterator[ScenarioPool]:
    """Start a pool and wait until it is ready; it is gone at the end."""
    running = ScenarioPool(directory, flags, settings, plane)
    try:
        running.wait_ready()
        yield running
    finally:
        running.end()
