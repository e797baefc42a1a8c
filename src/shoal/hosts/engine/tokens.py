"""A tokeniser that needs no download: one token is four bytes of UTF-8, as a little-endian number.

About the four bytes a token of English text with a real tokeniser, so prompt sizes come out right.  Text pieces
are padded to whole tokens on their own, so the tokens of a chat message do not depend on what stands before it,
and an answer sent back as the next turn's history gives the tokens that were generated.  Control tokens have a last
byte of 0xff, which no UTF-8 text contains.  Tokens are handled packed, as bytes, four a token.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import xxhash

TOKEN_BYTES = 4
_START = b"\x01\x00\x00\xff"
_END = b"\x02\x00\x00\xff"
_MEDIA = b"\x03\x00\x00\xff"
_MEDIA_TOKENS = 64
_MEDIA_WORDS = ("image", "audio", "video", "file", "document")
_NOTHING = (b"", b"null", b"[]", b"{}")
_CONTROL_NAMES = {1: "<|start|>", 2: "<|end|>", 3: "<|media|>"}


class Turn(msgspec.Struct):
    """One chat message as clients send it; `content` parts and tool calls stay raw."""

    role: str
    content: str | list[msgspec.Raw] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()
    tool_call_id: str | None = None


class Part(msgspec.Struct):
    """The kind of a content part and its text, None when it has none."""

    type: str = ""
    text: str | None = None


def encode(text: str) -> bytes:
    """Return the packed tokens of `text`."""
    return _pad(text.encode())


def decode(packed: bytes) -> str:
    """Return the text of packed tokens; control tokens come as `<|name|>`, broken UTF-8 as U+FFFD."""
    if b"\xff" not in packed:
        return packed.replace(b"\0", b"").decode(errors="replace")
    return "".join(pieces(packed))


def pieces(packed: bytes) -> list[str]:
    """Return the text of each token on its own."""
    out = []
    for start in range(0, len(packed), TOKEN_BYTES):
        token = packed[start : start + TOKEN_BYTES]
        if token[3] == 0xFF:
            out.append(_CONTROL_NAMES.get(token[0], "<|unknown|>"))
        else:
            out.append(token.rstrip(b"\0").decode(errors="replace"))
    return out


def ids(packed: bytes) -> list[int]:
    """Return packed tokens as numbers."""
    return np.frombuffer(packed, dtype="<u4").tolist()  # type: ignore[no-any-return]


def pack(token_ids: Sequence[int]) -> bytes:
    """Return token numbers packed.  Raises OverflowError for one outside 0 to 2**32 - 1."""
    return np.array(token_ids, dtype="<u4").tobytes()


def chat(turns: Iterable[Turn], preface: Sequence[msgspec.Raw] = (), *, has_generation_prompt: bool = True) -> bytes:
    """Return the packed tokens of a chat.

    Each turn is start, role, content, end.  preface: raw JSON that shapes the prompt (tools, template arguments) and
    stands at its front.  has_generation_prompt: whether the assistant's turn is opened at the end.
    """
    out: list[bytes] = []
    for raw in preface:
        if (body := bytes(raw)) not in _NOTHING:
            out += (_START, _pad(body), _END)
    for turn in turns:
        out += (_START, encode(turn.role), content(turn.content))
        if (calls := bytes(turn.tool_calls)) not in _NOTHING:
            out.append(_pad(calls))
        if turn.tool_call_id is not None:
            out.append(encode(turn.tool_call_id))
        out.append(_END)
    if has_generation_prompt:
        out += (_START, encode("assistant"))
    return b"".join(out)


def content(value: str | list[msgspec.Raw] | None) -> bytes:
    """Return the packed tokens of a message's content; an image or sound becomes 64 tokens of its digest.

    Any other part without text (a tool's result, say) counts by its JSON.
    """
    if value is None:
        return b""
    if isinstance(value, str):
        return encode(value)
    return b"".join(_part(bytes(raw)) for raw in value)


def _part(raw: bytes) -> bytes:
    if raw.startswith(b'"'):
        return encode(msgspec.json.decode(raw, type=str))
    part = msgspec.json.decode(raw, type=Part)
    if part.text is not None:
        return encode(part.text)
    return media(raw) if any(word in part.type for word in _MEDIA_WORDS) else _pad(raw)


def media(raw: bytes) -> bytes:
    """Return the tokens that stand for an image or sound: the same bytes give the same tokens."""
    digest = xxhash.xxh3_128_digest(raw)
    return _MEDIA + digest.replace(b"\xff", b"\xfe") * (_MEDIA_TOKENS // TOKEN_BYTES - 1)


def _pad(text: bytes) -> bytes:
    return text + b"\0" * (-len(text) % TOKEN_BYTES)
