"""The service that fetches tokens: what is asked of whom, bounds, and what goes wrong."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from shoal.hosts.backends import Backends, BackendsFile, write_backends
from shoal.hosts.envoy import EndpointAddress
from shoal.hosts.tokens import Backend, EngineList, TokenSettings, settings_of
from shoal.hosts.tokens.local import LocalTokenizer
from shoal.hosts.tokens.prompts import read_prompt
from shoal.hosts.tokens.service import Tokenizers
from shoal.hosts.waiting import Asked
from shoal.kernel import ConfigError
from shoal.pool import Api, Endpoint, EndpointState, Request, ServedModel
from shoal.routing.commands import Fetch
from shoal.routing.config import load
from shoal.routing.events import (
    EndpointChanged,
    EndpointJoined,
    EndpointLeft,
    Fetched,
    FetchFailed,
    ModelsSeen,
    TokenKeys,
)
from tests.hosts.tokens.tiny_model import write

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
CANARY = "the canary sings at midnight"


class Maker:
    """Makes keys that say what they were made of."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def hash_tokens(
        self,
        tokens: bytes,
        model: str,
        adapter: str,
        salt: str,
        block_size: int,
        extras: Sequence[tuple[str, ...] | None] | None = None,
    ) -> bytes:
        self.calls.append((len(tokens) // 4, model, adapter, salt, block_size, extras))
        return bytes(8 * (len(tokens) // 4 // block_size))


class Scene:
    """A service and what it has told."""

    def __init__(self, settings: TokenSettings, backends: Path | None) -> None:
        self.maker = Maker()
        self.engines = EngineList()
        self.tokens = Tokenizers(self.maker, settings, self.engines, BackendsFile(backends))
        self.told: list[Fetched | FetchFailed] = []

        self.headers: dict[str, str] = {}

    def fetch(self, body: Any, api: Api = Api.CHAT, **command: Any) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        name = f"r-{len(self.maker.calls)}"
        asked = Asked(Request(id=name, api=api), self.headers, data)
        wanted = {"model": "m", "adapter": "", "block_sizes": (16,), **command}
        return self.tokens.fetch(Fetch(name, **wanted), asked, self.told.append)

    async def tell(self, body: Any, api: Api = Api.CHAT, **command: Any) -> Fetched | FetchFailed:
        count = len(self.told)
        self.fetch(body, api, **command)
        assert len(self.told) == count, "told from within fetch"
        while len(self.told) == count:
            await asyncio.sleep(0.002)
        return self.told[-1]

    def join(self, name: str, engine: str, *models: str, address: str = "127.0.0.1:1") -> None:
        for event in (
            EndpointJoined(Endpoint(id=name, address=address, engine=engine)),
            ModelsSeen(name, tuple(ServedModel(id=model) for model in models)),
            EndpointChanged(name, EndpointState.READY),
        ):
            self.engines.on_event(event)


def play(
    scene: Callable[[Scene], Awaitable[None]], settings: TokenSettings = TokenSettings(), backends: Path | None = None
) -> None:
    async def main() -> None:
        made = Scene(settings, backends)
        async with asyncio.timeout(60):
            await scene(made)
        await made.tokens.close()

    uvloop.run(main())


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def local(tmp_path: Path, **more: Any) -> TokenSettings:
    return TokenSettings(backends=(Backend(path=write(tmp_path / "model")),), **more)


def test_a_local_tokenizer_gives_keys_for_each_block_size_and_no_ids(tmp_path: Path) -> None:
    async def scene(made: Scene) -> None:
        event = await made.tell(chat("x" * 100, cache_salt="s"), adapter="lora", block_sizes=(16, 32))
        model = LocalTokenizer(tmp_path / "model", 1 << 20, 1)
        (ids,) = model.tokenise(read_prompt(Api.CHAT, json.dumps(chat("x" * 100)).encode()))
        count = len(ids) // 4
        keys = tuple(TokenKeys(size, bytes(8 * (count // size))) for size in (16, 32))
        assert event == Fetched("r-0", count, keys)
        assert made.maker.calls == [(count, "m", "lora", "s", 16, None), (count, "m", "lora", "s", 32, None)]

    play(scene, local(tmp_path))


def test_tools_go_by_the_estimate_where_an_engine_writes_them_otherwise(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]

    async def scene(made: Scene) -> None:
        made.join("a", "vllm", "m")
        assert isinstance(await made.tell(chat("x", tools=tools)), Fetched)
        made.join("b", "sglang", "m")
        assert await made.tell(chat("x", tools=tools)) == FetchFailed("r-1", "unsupported")
        assert isinstance(await made.tell(chat("x")), Fetched)
        made.engines.on_event(EndpointLeft("b"))
        assert isinstance(await made.tell(chat("x", tools=tools)), Fetched)

    play(scene, local(tmp_path))


def test_prompts_beyond_the_first_count_as_tokens_only(tmp_path: Path) -> None:
    async def scene(made: Scene) -> None:
        event = await made.tell({"prompt": [[1] * 40, [2] * 20]}, Api.COMPLETIONS)
        assert event == Fetched("r-0", 60, (TokenKeys(16, bytes(16)),))

    play(scene, local(tmp_path))


def test_a_model_without_a_backend_of_its_own_goes_by_the_estimate(tmp_path: Path) -> None:
    async def scene(made: Scene) -> None:
        assert isinstance(await made.tell(chat()), Fetched)
        assert await made.tell(chat(), model="other") == FetchFailed("r-1", "unconfigured")

    play(scene, TokenSettings(backends=(Backend(model="m", path=write(tmp_path / "model")),)))


def test_embedded_engines_are_tokenised_for_in_process() -> None:
    async def scene(made: Scene) -> None:
        made.join("a", "shoal", "m")
        event = await made.tell(chat("x" * 400))
        assert isinstance(event, Fetched)
        assert event.prompt_tokens > 100

    play(scene)


@asynccontextmanager
async def an_engine() -> AsyncIterator[tuple[str, list[tuple[str, str, dict[str, str]]]]]:
    """One that gives four tokens for a render and three else: its address, and (path, model, headers) of each call."""
    asked: list[tuple[str, str, dict[str, str]]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        start, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        asked.append((start.split(" ")[1], body["model"], headers))
        data = b'{"tokens":[1,2,3],"token_ids":[1,2,3,4]}'
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


def test_other_engines_are_asked_themselves() -> None:
    async def scene(made: Scene) -> None:
        async with an_engine() as (address, asked):
            made.join("a", "vllm", "m", "lora", address=address)
            made.join("b", "sglang", "s", address=address)
            first = await made.tell(chat(), adapter="lora")
            second = await made.tell(chat(), model="s")
            assert [event.prompt_tokens for event in (first, second) if isinstance(event, Fetched)] == [4, 3]
            assert [call[:2] for call in asked] == [("/v1/chat/completions/render", "lora"), ("/tokenize", "s")]
            assert "authorization" not in asked[0][2]

    play(scene)


@pytest.mark.parametrize(
    ("own", "forwards", "sent"),
    [("own", True, "Bearer own"), ("", True, "Bearer client"), ("", False, None), ("own", False, "Bearer own")],
)
def test_an_engine_gets_its_own_key_or_the_clients_where_that_goes_on(
    own: str, forwards: bool, sent: str | None, tmp_path: Path
) -> None:
    async def scene(made: Scene) -> None:
        async with an_engine() as (address, asked):
            for key in ("old", own):
                dialled = EndpointAddress(address=address, authorization=f"Bearer {key}" if key else "")
                write_backends(tmp_path / "backends.json", Backends(endpoints=(dialled,)))
                made.join("a", "vllm", "m", address=address)
                made.headers = {"authorization": "Bearer client"}
                assert isinstance(await made.tell(chat()), Fetched)
            assert [headers.get("authorization") for _, _, headers in asked] == ["Bearer old", sent]

    play(scene, TokenSettings(forwards_client_key=forwards), tmp_path / "backends.json")


def test_a_render_server_gets_the_key_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    file = "plugins: [{type: token-producer, parameters: {vllm: {apiKeyFile: %s}}}]"
    settings = settings_of(load(HEAD + file % (tmp_path / "key"), "test"))
    assert settings.backends[0].authorization == "Bearer secret"
    with pytest.raises(ConfigError, match="gone"):
        settings_of(load(HEAD + file % (tmp_path / "gone"), "test"))

    async def scene(made: Scene) -> None:
        async with an_engine() as (address, asked):
            made.tokens.configure(settings._replace(backends=(settings.backends[0]._replace(url=f"http://{address}"),)))
            await asyncio.sleep(0.05)
            assert isinstance(await made.tell(chat()), Fetched)
            assert asked[0][2]["authorization"] == "Bearer secret"

    play(scene)


def test_only_ready_engines_that_serve_the_model_are_asked() -> None:
    async def scene(made: Scene) -> None:
        engines = made.engines
        assert await made.tell(chat()) == FetchFailed("r-0", "no-engine")
        made.join("a", "shoal", "m")
        made.join("b", "shoal", "other")
        assert [engine.id for engine in (engines.serving("m"), engines.serving("other")) if engine] == ["a", "b"]
        engines.on_event(EndpointChanged("a", EndpointState.DRAINING))
        assert engines.serving("m") is None
        engines.on_event(EndpointChanged("a", EndpointState.READY))
        engines.on_event(EndpointLeft("a"))
        assert engines.serving("m") is None

    play(scene)


def test_too_much_at_once_goes_by_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = LocalTokenizer.tokenise
    monkeypatch.setattr(LocalTokenizer, "tokenise", lambda self, prompt: (gate.wait(30), real(self, prompt))[1])

    async def scene(made: Scene) -> None:
        for _ in range(5):
            made.fetch(chat())
        while len(made.told) < 2:
            await asyncio.sleep(0.002)
        assert [event.reason for event in made.told if isinstance(event, FetchFailed)] == ["overloaded"] * 2
        gate.set()
        while len(made.told) < 5:
            await asyncio.sleep(0.002)
        assert isinstance(await made.tell(chat()), Fetched)

    play(scene, local(tmp_path, max_waiting=3))


def test_bytes_that_wait_are_bounded_and_given_back(tmp_path: Path) -> None:
    async def scene(made: Scene) -> None:
        for _ in range(3):
            assert isinstance(await made.tell(chat("x" * 5000)), Fetched)
        assert await made.tell(chat("x" * 12_000)) == FetchFailed("r-3", "overloaded")
        assert isinstance(await made.tell(chat("x" * 5000)), Fetched)

    play(scene, local(tmp_path, max_waiting_bytes=10_000))


def test_a_cancelled_fetch_tells_nothing_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = LocalTokenizer.tokenise
    begun: list[int] = []

    def tokenise(self: LocalTokenizer, prompt: Any) -> Any:
        begun.append(1)
        gate.wait(30)
        return real(self, prompt)

    monkeypatch.setattr(LocalTokenizer, "tokenise", tokenise)

    async def scene(made: Scene) -> None:
        jobs = [made.fetch(chat()) for _ in range(4)]
        while not begun:
            await asyncio.sleep(0.002)
        for job in jobs:
            job.cancel()
        gate.set()
        event = await made.tell(chat())
        assert made.told == [event]
        assert len(begun) == 2, "what had not begun was not tokenised"
        waiting = next(family for family in made.tokens.families() if family.name == "shoal_token_fetches_waiting")
        assert waiting.samples[0].value == 0

    play(scene, local(tmp_path))


def test_a_body_that_is_too_long_or_unreadable_has_a_reason(tmp_path: Path) -> None:
    async def scene(made: Scene) -> None:
        assert await made.tell(chat("x" * 2000)) == FetchFailed("r-0", "too-large")
        assert await made.tell(b"{") == FetchFailed("r-0", "unreadable")
        assert await made.tell({"prompt": []}, Api.COMPLETIONS) == FetchFailed("r-0", "unreadable")

    play(scene, local(tmp_path, max_body_bytes=1000))


def test_a_fault_is_a_reason_and_its_log_holds_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: LocalTokenizer, prompt: Any) -> Any:
        raise RuntimeError(f"cannot do {prompt}")

    monkeypatch.setattr(LocalTokenizer, "tokenise", fail)

    async def scene(made: Scene) -> None:
        assert await made.tell(chat(CANARY)) == FetchFailed("r-0", "fault")

    with caplog.at_level(logging.DEBUG):
        play(scene, local(tmp_path))
    assert "RuntimeError" in caplog.text
    assert CANARY not in caplog.text


def test_a_directory_that_cannot_be_read_is_told_at_the_start_and_keeps_the_old_one_later(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError):
            Tokenizers(Maker(), TokenSettings(backends=(Backend(path=tmp_path / "none"),)), EngineList())

    uvloop.run(main())

    async def scene(made: Scene) -> None:
        made.tokens.configure(TokenSettings(backends=(Backend(path=tmp_path / "none"),)))
        await asyncio.sleep(0.1)
        assert isinstance(await made.tell(chat()), Fetched)
        made.tokens.configure(TokenSettings(backends=(Backend(model="m", path=write(tmp_path / "two")),)))
        while await made.tell(chat(), model="other") != FetchFailed(f"r-{len(made.maker.calls)}", "unconfigured"):
            await asyncio.sleep(0.01)

    play(scene, local(tmp_path))


def test_outcomes_are_counted(tmp_path: Path) -> None:
    async def scene(made: Scene) -> None:
        await made.tell(chat())
        await made.tell(b"{")
        families = {family.name: family for family in made.tokens.families()}
        counts = {tuple(sample.labels.values()): sample.value for sample in families["shoal_token_fetches"].samples}
        assert counts == {("local", "ok"): 1, ("local", "unreadable"): 1}

    play(scene, local(tmp_path))


def test_a_question_that_is_taken_back_at_once_takes_no_place() -> None:
    async def scene(made: Scene) -> None:
        for _ in range(4):
            made.fetch(chat()).cancel()
            await asyncio.sleep(0.05)
        # Else the fifth would be one too many.
        assert (await made.tell(chat())) == FetchFailed("r-0", "unavailable")

    settings = TokenSettings(backends=(Backend(url="http://127.0.0.1:1"),), max_waiting=4)
    play(scene, settings)
