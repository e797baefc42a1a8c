"""What a request asks to be tokenised: chat messages, texts, or token ids; read from its body.

Owns which requests can be tokenised exactly, and says why one cannot.  Judging a request is the engine's part: what the
engine would refuse need not be exact here.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from shoal.kernel import UNREADABLE, InvalidInput
from shoal.pool import Api
from shoal.wire.compression import inflate
from shoal.wire.limits import BodyTooLarge
from shoal.wire.token_ids import is_id_list, pack_ids

MAX_SALT_CHARS = 1024


class NoTokens(Exception):
    """A prompt's exact tokens cannot be had.  reason: a word for metrics, never text of a prompt."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Chat(NamedTuple):
    """Messages for a chat template, every field as the client sent it."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]


class Texts(NamedTuple):
    """Texts that are tokenised as they are.  has_special_tokens: whether the tokenizer's own are put around each."""

    texts: list[str]
    has_special_tokens: bool


class Ids(NamedTuple):
    """Prompts that came as token ids: little-endian uint32."""

    prompts: list[bytes]


class Prompt(NamedTuple):
    """One request to be tokenised.  api: which shape its body has.  salt: its `cache_salt`, "" for none."""

    api: Api
    body: dict[str, Any]
    content: Chat | Texts | Ids | None
    salt: str


_object = msgspec.json.Decoder(dict[str, Any])
# Fields that make an engine tokenise otherwise than is known here, or that it may refuse.
_UNKNOWN_EFFECT = ("truncate_prompt_tokens", "prompt_embeds", "chat_template", "mm_processor_kwargs")


def inflated(headers: Mapping[str, str], body: bytes, max_bytes: int) -> bytes:
    """Return a body without its content coding.  Raises NoTokens when it is, or becomes, longer than `max_bytes`."""
    if len(body) > max_bytes:
        raise NoTokens("too-large")
    encoding = headers.get("content-encoding")
    if not encoding:
        return body
    try:
        plain = inflate(body, encoding, max_bytes)
    except BodyTooLarge:
        raise NoTokens("too-large") from None
    except InvalidInput:
        raise NoTokens("unreadable") from None
    if plain is None:
        raise NoTokens("unreadable")
    return plain


def salt_of(salt: object) -> str:
    """Return a request's `cache_salt`, "" for none."""
    return salt if isinstance(salt, str) and len(salt) <= MAX_SALT_CHARS else ""


def read_prompt(api: Api, body: bytes) -> Prompt:
    """Return what is to be tokenised of a body without content coding.  Raises NoTokens.

    `content` is None where only the engine knows how it makes a prompt of the body.
    """
    try:
        read = _object.decode(body)
    except UNREADABLE:
        raise NoTokens("unreadable") from None
    salt = salt_of(read.get("cache_salt"))
    for name in _UNKNOWN_EFFECT:
        if read.get(name) is not None:
            raise NoTokens("unsupported")
    return Prompt(api, read, _content(api, read), salt)


def _content(api: Api, body: dict[str, Any]) -> Chat | Texts | Ids | None:
    match api:
        case Api.CHAT:
            return Chat(body, _messages(body))
        case Api.COMPLETIONS:
            return _texts(body.get("prompt"), body.get("add_special_tokens") is not False)
        case Api.GENERATE:
            if body.get("features") is not None:
                raise NoTokens("media")
            ids = body.get("token_ids", body.get("input_ids"))
            if not isinstance(ids, list):
                # SGLang's /generate with text; which special tokens it adds depends on the model.
                raise NoTokens("unsupported")
            return _texts(ids, False)
        case Api.RESPONSES | Api.MESSAGES:
            return None
        case _:
            raise NoTokens("unsupported")


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise NoTokens("unreadable")
    return messages


def _texts(given: Any, has_special_tokens: bool) -> Texts | Ids:
    if isinstance(given, str):
        return Texts([given], has_special_tokens)
    if not isinstance(given, list) or not given:
        raise NoTokens("unreadable")
    if is_id_list(given):
        given = [given]
    if all(map(is_id_list, given)):
        try:
            return Ids([pack_ids(each) for each in given])
        except InvalidInput:
            raise NoTokens("unreadable") from None
    if all(isinstance(each, str) for each in given):
        return Texts(given, has_special_tokens)
    raise NoTokens("unsupported")
