"""A pool that follows the KV events of its engines, and what it predicts of each request."""

import os
import signal
import time
from typing import Any, NamedTuple

from tests.hosts.supervisor.pool_rig import until
from tests.scenarios.pools import ScenarioPool
from tests.vllm.prompts import says

EXACT = """
---
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: token-producer
  parameters: {{{backend}, deadline: 10s}}
- type: precise-prefix-cache-producer
"""
"""Settings for `pool`.  backend: where tokens come from."""


class Asked(NamedTuple):
    """One request as the picker saw it.  predicted, cached, prompt: tokens."""

    served: str
    predicted: int
    cached: int
    prompt: int
    is_exact: bool


class ExactPool:
    """A pool that follows the KV events of its engines."""

    def __init__(self, running: ScenarioPool) -> None:
        self.pool = running

    def ask(self, path: str, body: dict[str, Any], **headers: str) -> Asked:
        """One request to its end, and to the end of what its engine tells.  headers: with _ for -."""
        name = f"asked-{time.monotonic_ns()}"
        asked = {"model": "tiny", "max_tokens": 5, "temperature": 0, **body}
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self.pool.post(asked, {"x-request-id": name, **more}, path)
        assert answer.status_code == 200, answer.text
        found = self.pool.explained(name)
        self.settle()
        return Asked(
            found["served"],
            found["predicted_cached_tokens"],
            found["cached_tokens"],
            found["reported_prompt_tokens"],
            found["is_exact"],
        )

    def settle(self) -> None:
        """Wait until no more events come."""
        before = -1.0
        while (now := self.pool.sample("llm_d_epp_kv_cache_events_messages_received_total")) != before:
            before = now
            time.sleep(0.1)

    def kill_picker(self) -> None:
        """Kill the only worker, and wait until its successor knows every cache."""
        (old,) = self.pool.worker_pids()
        os.kill(old, signal.SIGKILL)
        until(lambda: self.pool.worker_pids() not in ([], [old]), why=self.pool.said)
        until(lambda: all(worker.is_answering for worker in self.pool.client.picture().workers), why=self.pool.said)
        self.wait_fresh()

    def wait_fresh(self) -> None:
        """Wait until every cache is known."""
        until(lambda: {each.cache for each in self.pool.client.picture().endpoints} == {"fresh"}, why=self.pool.said)

    @staticmethod
    def fresh(body: dict[str, Any]) -> dict[str, Any]:
        """The body with a prompt that nobody has asked before."""
        beginning = f"{time.monotonic_ns()}\n"
        if "prompt" in body:
            prompt = body["prompt"]
            return {
                **body,
                "prompt": beginning + prompt if isinstance(prompt, str) else [*map(ord, beginning), *prompt],
            }
        first, *others = body["messages"]
        content = first["content"]
        content = beginning + content if isinstance(content, str) else [{"type": "text", "text": beginning}, *content]
        return {**body, "messages": [{**first, "content": content}, *others]}

    @staticmethod
    def longer(body: dict[str, Any]) -> dict[str, Any]:
        """The body with a prompt that goes on."""
        if "prompt" in body:
            prompt = body["prompt"]
            return {
                **body,
                "prompt": prompt + "x = 1\n" * 20 if isinstance(prompt, str) else [*prompt, *range(300, 340)],
            }
        messages = [*body["messages"], says("ok", "assistant"), says("and more\n" * 20)]
        kept = {name: value for name, value in body.items() if not name.endswith(("_final_message", "_prompt"))}
        return {**kept, "messages": messages}
