"""The JSON bodies of each API, read once and only as far as routing needs.

Owns one typed shape and one reader per API; fields that nobody needs are skipped by the decoder and never become
Python objects.  Values that an engine may take in several types (`max_tokens: "5"`) are read leniently: judging
them is the engine's part.  Rendering of messages is in `rendering`, token arrays in `token_ids`.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from shoal.kernel import UNREADABLE, InvalidInput
from shoal.pool import Api
from shoal.wire.rendering import FIELD, Message, render_content, render_head, render_messages
from shoal.wire.token_ids import is_id_list, mark_media, pack_ids

BILLING_HEADER = "x-anthropic-billing-header"
"""Claude Code puts a hash per request in a system text that starts so; engines drop that text, so must we."""


class BodyFacts(NamedTuple):
    """What one body says.

    prompts: canonical bytes.  salt: `cache_salt`, b"" when absent.  extension: `nvext` as it came, None when absent.
    """

    model: str = ""
    prompts: tuple[bytes, ...] = ()
    is_streaming: bool = False
    is_token_exact: bool = False
    max_output_tokens: int | None = None
    salt: bytes = b""
    retry_allowed: bool = True
    extension: Raw | None = None


class Envelope(msgspec.Struct, gc=False):
    """Fields that every API shares."""

    model: str | None = None
    stream: Any = None
    cache_salt: Any = None
    disable_fallbacks: Any = None
    nvext: Raw = Raw()


class ChatBody(Envelope, gc=False):
    """`/v1/chat/completions`, and `/tokenize` and `/pooling` when they carry messages."""

    messages: list[Message] | None = None
    tools: Raw = Raw()
    documents: Raw = Raw()
    chat_template: Any = None
    chat_template_kwargs: Raw = Raw()
    reasoning_effort: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None


class PromptBody(ChatBody, gc=False):
    """Every API that takes text or token ids: completions, embeddings, tokenize, pooling, score, rerank, speech."""

    prompt: Any = None
    input: Any = None
    query: Any = None
    queries: Any = None
    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None


class ResponsesBody(Envelope, gc=False):
    """`/v1/responses`.  `previous_response_id` is not followed: its history is in one engine's memory."""

    input: Any = None
    instructions: Any = None
    tools: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    reasoning: Any = None
    max_output_tokens: Any = None


class MessagesBody(Envelope, gc=False):
    """Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

    messages: list[Message] | None = None
    system: Any = None
    tools: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    max_tokens: Any = None


class GenerateBody(Envelope, gc=False):
    """vLLM's token-in `/inference/v1/generate` and SGLang's `/generate`."""

    token_ids: Any = None
    input_ids: Any = None
    features: Any = None
    text: Any = None
    sampling_params: Any = None


class NamedBody(msgspec.Struct, gc=False):
    """Any other JSON body: a model name if there is one."""

    model: Any = None
    stream: Any = None
    disable_fallbacks: Any = None


_CHAT = msgspec.json.Decoder(ChatBody)
_PROMPT = msgspec.json.Decoder(PromptBody)
_RESPONSES = msgspec.json.Decoder(ResponsesBody)
_MESSAGES = msgspec.json.Decoder(MessagesBody)
_GENERATE = msgspec.json.Decoder(GenerateBody)
_NAMED = msgspec.json.Decoder(NamedBody)
_ANY = msgspec.json.Decoder(Any)


def read_body(api: Api, body: bytes) -> BodyFacts:
    """Return the facts of a JSON `body` of `api`.

    Raises InvalidInput when it is not JSON, not an object, or a field that routing needs has a wrong type.
    """
    reader = _READERS.get(api)
    if reader is None:
        return read_named(body)
    try:
        return reader(body)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"the request body does not fit this API: {error}") from None
    except msgspec.DecodeError as error:
        raise InvalidInput(f"the request body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidInput("the request body is nested too deeply") from None


def read_named(body: bytes) -> BodyFacts:
    """Return the model of a body of an unknown API, "" when it is not JSON or names none.  Never raises."""
    if body[:64].lstrip()[:1] != b"{":
        return BodyFacts()
    try:
        named = _NAMED.decode(body)
    except UNREADABLE:
        return BodyFacts()
    model = named.model if isinstance(named.model, str) else ""
    return BodyFacts(model, is_streaming=_truth(named.stream), retry_allowed=named.disable_fallbacks is not True)


def _read_chat(body: bytes) -> BodyFacts:
    chat = _CHAT.decode(body)
    if chat.messages is None:
        raise InvalidInput("`messages` is missing; it must be a list of messages")
    return _facts(chat, (_render_chat(chat, chat.messages),), chat.max_completion_tokens or chat.max_tokens)


def _read_messages(body: bytes) -> BodyFacts:
    chat = _MESSAGES.decode(body)
    if chat.messages is None:
        raise InvalidInput("`messages` is missing; it must be a list of messages")
    out = render_head(((b"tools", chat.tools), (b"kwargs", chat.chat_template_kwargs)))
    messages = chat.messages
    system = _without_billing(chat.system)
    if system:
        messages = [Message(role="system", content=system), *messages]
    for message in messages:
        if message.role == "system":
            message.content = _without_billing(message.content)
    return _facts(chat, (render_messages(out, messages),), chat.max_tokens)


def _without_billing(system: Any) -> Any:
    if isinstance(system, str):
        return None if system.startswith(BILLING_HEADER) else system
    if not isinstance(system, list):
        return system
    return [
        block
        for block in system
        if not (isinstance(block, dict) and str(block.get("text", "")).startswith(BILLING_HEADER))
    ]


def _read_responses(body: bytes) -> BodyFacts:
    asked = _RESPONSES.decode(body)
    effort = asked.reasoning.get("effort") if isinstance(asked.reasoning, dict) else None
    out = render_head(
        (
            (b"tools", asked.tools),
            (b"kwargs", asked.chat_template_kwargs),
            (b"effort", effort if isinstance(effort, str) else None),
        )
    )
    messages = [Message(role="system", content=asked.instructions)] if asked.instructions else []
    if isinstance(asked.input, list):
        messages += [_item(item) for item in asked.input]
    elif asked.input is not None:
        messages.append(Message(role="user", content=asked.input))
    return _facts(asked, (render_messages(out, messages),), asked.max_output_tokens)


def _item(item: Any) -> Message:
    """Return an item of a Responses input as the chat message that an engine makes of it."""
    if not isinstance(item, dict):
        return Message(content=item)
    kind = item.get("type")
    if kind in ("message", None):
        return Message(role=item.get("role"), content=item.get("content"), name=item.get("name"))
    if kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments", item.get("input"))
        return Message(role="assistant", tool_calls=[{"name": item.get("name"), "arguments": arguments}])
    if kind in ("function_call_output", "custom_tool_call_output"):
        return Message(role="tool", content=item.get("output"))
    if kind == "reasoning":
        return Message(role="assistant", content=item.get("content") or item.get("summary"))
    return Message(role=kind, content={name: value for name, value in item.items() if name not in ("id", "status")})


def _read_prompt(body: bytes) -> BodyFacts:
    asked = _PROMPT.decode(body)
    given = asked.input if asked.prompt is None else asked.prompt
    if given is not None:
        prompts, is_exact = _prompts(given)
    elif asked.messages is not None:
        prompts, is_exact = (_render_chat(asked, asked.messages),), False
    else:
        prompts, is_exact = _pairs(asked), False
    return _facts(asked, prompts, asked.max_completion_tokens or asked.max_tokens, is_exact)


def _prompts(given: Any) -> tuple[tuple[bytes, ...], bool]:
    """Return the prompts of a `prompt` or `input` value, and whether they are token ids."""
    if isinstance(given, str):
        return (given.encode(),), False
    if not isinstance(given, list):
        raise InvalidInput("the prompt must be a string, a list of strings, or token ids")
    if is_id_list(given):
        return (pack_ids(given),), True
    if given and all(map(is_id_list, given)):
        return tuple(map(pack_ids, given)), True
    return tuple(map(_rendered, given)), False


def _pairs(asked: PromptBody) -> tuple[bytes, ...]:
    """Return the one prompt of a scoring body: the query first, which all its documents share."""
    documents = _ANY.decode(asked.documents) if asked.documents else None
    parts = (asked.query, asked.queries, asked.text_1, asked.data_1, asked.text_2, asked.data_2, documents)
    out = [_rendered(part) for part in parts if part is not None]
    return (FIELD.join(out),) if out else ()


def _rendered(content: Any) -> bytes:
    out: list[bytes] = []
    render_content(out, content)
    return b"".join(out)


def _read_generate(body: bytes) -> BodyFacts:
    asked = _GENERATE.decode(body)
    limit = None
    if isinstance(asked.sampling_params, dict):
        limit = asked.sampling_params.get("max_tokens", asked.sampling_params.get("max_new_tokens"))
    ids = asked.input_ids if asked.token_ids is None else asked.token_ids
    if not isinstance(ids, list):
        texts = asked.text if isinstance(asked.text, list) else [asked.text]
        return _facts(asked, tuple(text.encode() for text in texts if isinstance(text, str)), limit)
    if ids and isinstance(ids[0], list):
        return _facts(asked, tuple(map(pack_ids, ids)), limit, is_token_exact=True)
    return _facts(asked, (mark_media(pack_ids(ids), asked.features),), limit, is_token_exact=True)


def _render_chat(chat: ChatBody, messages: Iterable[Message]) -> bytes:
    if not (chat.tools or chat.documents or chat.chat_template or chat.chat_template_kwargs or chat.reasoning_effort):
        return render_messages([], messages)
    out = render_head(
        (
            (b"template", chat.chat_template if isinstance(chat.chat_template, str) else None),
            (b"tools", chat.tools),
            (b"documents", chat.documents),
            (b"kwargs", chat.chat_template_kwargs),
            (b"effort", chat.reasoning_effort if isinstance(chat.reasoning_effort, str) else None),
        )
    )
    return render_messages(out, messages)


def _facts(body: Envelope, prompts: tuple[bytes, ...], limit: Any, is_token_exact: bool = False) -> BodyFacts:
    salt = body.cache_salt
    return BodyFacts(
        body.model or "",
        prompts,
        body.stream is not None and _truth(body.stream),
        is_token_exact,
        None if limit is None else _count(limit),
        salt.encode() if isinstance(salt, str) else b"",
        body.disable_fallbacks is not True,
        body.nvext or None,
    )


def _truth(value: Any) -> bool:
    return value is True or value == 1 or (isinstance(value, str) and value.lower() in ("true", "1", "yes", "on"))


# No context is as long; and what goes into a journal must fit its integers.
_MAX_COUNT = 1 << 31


def _count(value: Any) -> int | None:
    is_digits = isinstance(value, str) and value.isdecimal() and len(value) < 12
    if is_digits or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    return value if type(value) is int and 0 <= value < _MAX_COUNT else None


_READERS: dict[Api, Callable[[bytes], BodyFacts]] = {
    Api.CHAT: _read_chat,
    Api.MESSAGES: _read_messages,
    Api.RESPONSES: _read_responses,
    Api.GENERATE: _read_generate,
    Api.COMPLETIONS: _read_prompt,
    Api.EMBEDDINGS: _read_prompt,
    Api.TOKENIZE: _read_prompt,
    Api.POOLING: _read_prompt,
    Api.SCORE: _read_prompt,
    Api.RERANK: _read_prompt,
    Api.AUDIO: _read_prompt,
}
