"""The canonical bytes of a chat prompt: what stands in them, in which order.

Two requests share a prefix of these bytes where an engine would see the same prefix of its rendered template:
tools and template arguments first, then message after message.  No template and no tokenizer is applied here.

The marks are bytes that never occur in UTF-8 text, so no content can imitate them:
    FF starts a record (a head entry or a message), FE starts a field of it, FD starts 16 bytes of media hash.
Nothing is written after the last message, so a conversation that grows only appends.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import xxhash

RECORD = b"\xff"
FIELD = b"\xfe"
MEDIA = b"\xfd"

_TEXT_KINDS = frozenset(("text", "input_text", "output_text", "reasoning_text", "summary_text", None))
_MEDIA_KINDS = {
    "image_url": b"image",
    "input_image": b"image",
    "image": b"image",
    "image_pil": b"image",
    "input_audio": b"audio",
    "audio_url": b"audio",
    "video_url": b"video",
    "input_video": b"video",
    "file": b"file",
    "input_file": b"file",
    "document": b"file",
}
_PAYLOAD_FIELDS = ("url", "data", "file_data", "file_id", "file_url", "uuid")


class Message(msgspec.Struct, gc=False):
    """One chat message, as far as it is part of the prompt; every field as the client sent it."""

    role: Any = None
    content: Any = None
    name: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    function_call: Any = None


def render_head(entries: Iterable[tuple[bytes, msgspec.Raw | str | None]]) -> list[bytes]:
    """Return the records that stand before the messages; absent and null entries leave no trace.

    JSON entries lose their white space, so that clients with different JSON writers share them.
    """
    out: list[bytes] = []
    for tag, value in entries:
        if not value:
            continue
        if isinstance(value, str):
            out += (RECORD, tag, FIELD, value.encode())
            continue
        raw = bytes(value)
        if raw in (b"", b"null", b"[]", b"{}"):
            continue
        out += (RECORD, tag, FIELD, msgspec.json.format(raw, indent=-1))
    return out


def render_messages(out: list[bytes], messages: Iterable[Message]) -> bytes:
    """Append the records of `messages` to `out` and return all as one."""
    for message in messages:
        role = message.role
        out.append(RECORD + role.encode() + FIELD if isinstance(role, str) else RECORD + FIELD)
        content = message.content
        if isinstance(content, str):
            out.append(content.encode())
        elif content is not None:
            render_content(out, content)
        if message.name is not None:
            out += (FIELD, b"name", FIELD, _text(message.name))
        reasoning = message.reasoning or message.reasoning_content
        if reasoning:
            out += (FIELD, b"reasoning", FIELD, _text(reasoning))
        if message.tool_calls:
            for call in message.tool_calls if isinstance(message.tool_calls, list) else (message.tool_calls,):
                _render_call(out, call.get("function", call) if isinstance(call, dict) else call)
        if message.function_call:
            _render_call(out, message.function_call)
    return b"".join(out)


def render_content(out: list[bytes], content: Any) -> None:
    """Append message content in any of its forms; text parts are joined by a newline, as vLLM joins them."""
    if isinstance(content, str):
        out.append(content.encode())
        return
    if isinstance(content, dict):
        content = (content,)
    if not isinstance(content, list | tuple):
        if content is not None:
            out.append(_text(content))
        return
    after_text = False
    for part in content:
        text = part if isinstance(part, str) else _text_of(part)
        if text is None:
            _render_part(out, part)
            after_text = False
            continue
        if after_text:
            out.append(b"\n")
        out.append(text.encode())
        after_text = True


def _text_of(part: Any) -> str | None:
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if (kind is None or isinstance(kind, str)) and kind in _TEXT_KINDS:
        text = part.get("text")
        return text if isinstance(text, str) else None
    return None


def _render_part(out: list[bytes], part: Any) -> None:
    if not isinstance(part, dict):
        out.append(_text(part))
        return
    kind = part.get("type")
    if not isinstance(kind, str):
        out.append(MEDIA + media_digest(b"other", part))
    elif kind in _MEDIA_KINDS:
        out.append(MEDIA + media_digest(_MEDIA_KINDS[kind], part))
    elif kind == "tool_use":
        _render_call(out, part)
    elif kind == "tool_result":
        out += (FIELD, b"result", FIELD)
        render_content(out, part.get("content"))
    elif kind == "thinking":
        out += (FIELD, b"reasoning", FIELD, _text(part.get("thinking")))
    elif kind == "refusal":
        out.append(_text(part.get("refusal")))
    elif kind != "redacted_thinking":
        out.append(MEDIA + media_digest(b"other", part))


def _render_call(out: list[bytes], call: Any) -> None:
    """Append a tool call.  Call ids are left out: few templates render them, and they are random."""
    if not isinstance(call, dict):
        out += (FIELD, b"call", FIELD, _text(call))
        return
    arguments = call.get("arguments", call.get("input"))
    out += (FIELD, b"call", FIELD, _text(call.get("name")), FIELD, _text(arguments))


def media_digest(kind: bytes, part: dict[str, Any]) -> bytes:
    """Return 16 bytes for a media part: equal for equal (kind, url or data)."""
    digest = xxhash.xxh3_128(kind + b"\0")
    digest.update(_payload(part))
    return digest.digest()


def _payload(part: dict[str, Any]) -> bytes:
    inner = part.get(str(part.get("type")), part.get("source"))
    for holder in (inner, part.get("image_url"), part.get("source"), part):
        if isinstance(holder, str):
            return holder.encode()
        if isinstance(holder, dict):
            for field in _PAYLOAD_FIELDS:
                value = holder.get(field)
                if isinstance(value, str):
                    return value.encode()
    # Nothing that names the content: hash the part, less the mark that clients move from turn to turn.
    return msgspec.json.encode({name: value for name, value in part.items() if name != "cache_control"})


def _text(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    return b"" if value is None else msgspec.json.encode(value)
