"""Exact tokens from an engine over HTTP: vLLM's render endpoints, and `/tokenize` where these are closed.

Owns which endpoint is asked for which request, and the reading of answers.  What an engine says is input like any
other: bounded in size and time, checked, and never fatal.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from shoal.hosts.backends import PLAIN, Backend
from shoal.hosts.tokens.prompts import Chat, Ids, NoTokens, Prompt, Texts
from shoal.kernel import UNREADABLE, InvalidInput
from shoal.pool import Api
from shoal.wire.token_ids import pack_ids

Read = TypeVar("Read")

MAX_ANSWER_BYTES = 64 << 20
_NOT_ALLOWED = (401, 403)
_NOT_THERE = (404, 405, 501)
# An engine that has no render endpoint is asked again after so long: it may have been started anew.
CLOSED_S = 600.0
MAX_CLOSED = 4096

_RENDER_PATHS = {
    Api.CHAT: "/v1/chat/completions/render",
    Api.COMPLETIONS: "/v1/completions/render",
    Api.MESSAGES: "/v1/messages/render",
    Api.RESPONSES: "/v1/responses/render",
}
_TOKENIZE_CHAT_FIELDS = (
    "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "add_special_tokens",
)  # fmt: skip
# Fields that reach the template in a chat completion, and that `/tokenize` does not know.
_UNKNOWN_TO_TOKENIZE = ("documents", "reasoning_effort")


class Server(NamedTuple):
    """Who is asked.

    url: its base.  backend: how it is dialled, with its own key.  client_key: headers with the client's, which it gets
    if it has none of its own, None where no client's is handed on.  has_render: False for engines that only have
    `/tokenize`.
    """

    url: str
    backend: Backend = PLAIN
    client_key: Mapping[str, str] | None = None
    has_render: bool = True


class Rendered(NamedTuple):
    """A request's prompts as an engine has tokenised them.

    ids: little-endian uint32 of each prompt.  media: what stands among the tokens of the first prompt: (hash, place of
    its first token, tokens).
    """

    ids: list[bytes]
    media: list[tuple[str, int, int]]


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str | None]] = {}
    mm_placeholders: dict[str, list[_Place]] = {}


class _RenderAnswer(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


class _TokenizeAnswer(msgspec.Struct):
    tokens: list[int]


_render_answer = msgspec.json.Decoder(_RenderAnswer | list[_RenderAnswer])
_tokenize_answer = msgspec.json.Decoder(_TokenizeAnswer)


class RemoteTokenizer:
    """Asks engines.  session, threads: the caller's; long answers are read in a thread."""

    def __init__(
        self, session: aiohttp.ClientSession, threads: Executor, timeout_s: float = 5.0, media_timeout_s: float = 30.0
    ) -> None:
        self._session = session
        self._threads = threads
        self._timeout_s = timeout_s
        self._media_timeout_s = media_timeout_s
        self._closed: dict[str, float] = {}

    async def tokenise(self, server: Server, prompt: Prompt, model: str) -> Rendered:
        """Return the tokens of a request's prompts, as `server` makes them.  Raises NoTokens.

        model: its name at that server.
        """
        if isinstance(prompt.content, Ids):
            return Rendered(prompt.content.prompts, [])
        has_media = _has_media(prompt.content)
        timeout_s = self._media_timeout_s if has_media else self._timeout_s
        path = _RENDER_PATHS.get(prompt.api)
        if server.has_render and path is not None and not self._is_closed(server.url + path):
            body = {**prompt.body, "model": model, "stream": False, "return_mm_kwargs": False}
            body.pop("stream_options", None)
            status, answer = await self._post(server, path, body, timeout_s)
            if status == 200:
                return await self._off_loop(_read_render, answer)
            # vLLM wants its API key here, and none for `/tokenize`.
            if status not in (*_NOT_ALLOWED, *_NOT_THERE):
                raise NoTokens(_reason(status))
            if status in _NOT_THERE or server.backend.authorization or server.client_key is None:
                # One client's key, or the lack of one, says nothing of the next one's.
                self._close(server.url + path)
        if has_media:
            # Its answer does not say what stands where.
            raise NoTokens("media")
        bodies = _tokenize_bodies(prompt, model)
        ids = []
        for body in bodies:
            status, answer = await self._post(server, "/tokenize", body, timeout_s)
            if status != 200:
                raise NoTokens(_reason(status))
            ids.append(await self._off_loop(_read_tokenize, answer))
        return Rendered(ids, [])

    async def _off_loop(self, read: Callable[[bytes], Read], data: bytes) -> Read:
        return await asyncio.get_running_loop().run_in_executor(self._threads, read, data)

    async def _post(self, server: Server, path: str, body: dict[str, Any], timeout_s: float) -> tuple[int, bytes]:
        backend = server.backend
        key = {"authorization": backend.authorization} if backend.authorization else server.client_key or {}
        try:
            async with asyncio.timeout(timeout_s):
                asking = self._session.post(
                    server.url + path,
                    data=msgspec.json.encode(body),
                    headers={"content-type": "application/json", **key},
                    allow_redirects=False,
                    ssl=True if backend.tls is None else backend.tls,
                    server_hostname=backend.server_name,
                )
                async with asking as answer:
                    data = bytearray()
                    async for piece in answer.content.iter_chunked(1 << 16):
                        data += piece
                        if len(data) > MAX_ANSWER_BYTES:
                            raise NoTokens("too-large")
                    return answer.status, bytes(data)
        except TimeoutError:
            raise NoTokens("timeout") from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise NoTokens("unavailable") from None

    def _is_closed(self, url: str) -> bool:
        until = self._closed.get(url)
        if until is None:
            return False
        if until > time.monotonic():
            return True
        del self._closed[url]
        return False

    def _close(self, url: str) -> None:
        if len(self._closed) >= MAX_CLOSED:
            self._closed.clear()
        self._closed[url] = time.monotonic() + CLOSED_S


def _reason(status: int) -> str:
    if status in _NOT_ALLOWED:
        return "unauthorized"
    return "refused" if status in (400, 422) else "unavailable"


def _has_media(content: object) -> bool:
    if not isinstance(content, Chat):
        return False
    for message in content.messages:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind not in ("text", "input_text", "output_text", "refusal", "thinking"):
                return True
    return False


def _tokenize_bodies(prompt: Prompt, model: str) -> list[dict[str, Any]]:
    """The questions to `/tokenize`, one per prompt."""
    content = prompt.content
    if isinstance(content, Texts):
        around = content.has_special_tokens
        return [{"model": model, "prompt": text, "add_special_tokens": around} for text in content.texts]
    if isinstance(content, Chat):
        if any(content.body.get(name) is not None for name in _UNKNOWN_TO_TOKENIZE):
            raise NoTokens("unsupported")
        fields = {name: content.body[name] for name in _TOKENIZE_CHAT_FIELDS if content.body.get(name) is not None}
        return [{"model": model, **fields}]
    raise NoTokens("unsupported")


def _read_render(data: bytes) -> Rendered:
    try:
        read = _render_answer.decode(data)
        answers = read if isinstance(read, list) else [read]
        ids = [pack_ids(answer.token_ids) for answer in answers]
    except (*UNREADABLE, InvalidInput):
        raise NoTokens("bad-answer") from None
    if not ids:
        raise NoTokens("bad-answer")
    features = answers[0].features
    return Rendered(ids, [] if features is None else _media(features, len(ids[0]) // 4))


def _media(features: _Features, tokens: int) -> list[tuple[str, int, int]]:
    found = []
    for kind, names in sorted(features.mm_hashes.items()):
        places = features.mm_placeholders.get(kind, [])
        if len(names) != len(places):
            raise NoTokens("bad-answer")
        for name, place in zip(names, places, strict=True):
            if name is None or not 0 <= place.offset < place.offset + place.length <= tokens:
                raise NoTokens("bad-answer")
            found.append((name, place.offset, place.length))
    return sorted(found, key=lambda each: each[1])


def _read_tokenize(data: bytes) -> bytes:
    try:
        return pack_ids(_tokenize_answer.decode(data).tokens)
    except (*UNREADABLE, InvalidInput):
        raise NoTokens("bad-answer") from None
