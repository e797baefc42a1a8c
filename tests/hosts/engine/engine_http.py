"""A running engine server and plain HTTP for the tests of this folder."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from shoal.hosts.engine import EngineServer, EngineServerConfig, Faults

FAST = 0.02
"""Slow factor that makes an engine 50 times faster than real time."""


class Engine:
    """A client of one running server."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.session = session

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        """POST JSON (or raw bytes) and return status and decoded answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.url + path, data=data, headers=names) as response:
            text = await response.text()
            is_json = response.content_type == "application/json" and text
            return response.status, json.loads(text) if is_json else text

    async def get(self, path: str) -> tuple[int, Any]:
        """GET and return status and decoded answer."""
        async with self.session.get(self.url + path) as response:
            text = await response.text()
            is_json = response.content_type == "application/json" and text
            return response.status, json.loads(text) if is_json else text

    async def events(self, path: str, body: dict[str, object]) -> list[tuple[str, Any]]:
        """POST a streaming request and return its events as (name, data); `[DONE]` stays a string."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            text = await response.text()
        assert text.endswith("\n\n")
        return [_event(block) for block in text[:-2].split("\n\n")]

    async def samples(self) -> dict[str, float]:
        """Return /metrics as {name{labels}: value}, without the model and engine labels."""
        _, page = await self.get("/metrics")
        found = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = {key: value for key, value in sample.labels.items() if key not in ("engine", "model_name")}
                inside = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
                found[f"{sample.name}{{{inside}}}" if inside else sample.name] = sample.value
        return found

    async def until(self, name: str, value: float) -> None:
        """Wait until a metric has a value; the test's own timeout is the limit."""
        while (await self.samples())[name] != value:
            await asyncio.sleep(0.01)


def _event(block: str) -> tuple[str, Any]:
    lines = block.split("\n")
    name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else ""
    assert len(lines) == 1
    data = lines[0].removeprefix("data: ")
    return name, data if data == "[DONE]" else json.loads(data)


@asynccontextmanager
async def running(config: EngineServerConfig | None = None) -> AsyncIterator[Engine]:
    """Run a server on a free port."""
    server = EngineServer()
    port = await server.start(config or quick())
    try:
        async with aiohttp.ClientSession() as session:
            yield Engine(port, session)
    finally:
        await server.stop()


def quick(**changes: Any) -> EngineServerConfig:
    """A configuration for tests: a free port and fast steps, unless `faults` says otherwise."""
    faults = Faults(**{"slow_factor": FAST, **changes.pop("faults", {})})
    return EngineServerConfig(port=0, faults=faults, **changes)


def run(test: Callable[[Engine], Awaitable[None]], config: EngineServerConfig | None = None) -> None:
    """Run an async test against a fresh server."""

    async def main() -> None:
        async with running(config) as engine:
            await test(engine)

    run_async(main())


def run_async(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on the loop that the server uses in production."""
    uvloop.run(coroutine)


CHAT: dict[str, object] = {"model": "tiny", "messages": [{"role": "user", "content": "hello world"}], "max_tokens": 8}
