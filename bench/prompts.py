"""Requests whose prompts share no prefix, made for a sender that must cost little.

Every request of one `Prompts` has the same length and differs in the first 32 characters of its prompt only, so that
making one is a concatenation.  What is sent by chats and turns comes from `shoal.workload`.
"""

import secrets

import msgspec
import numpy as np

from bench.ground import MODEL
from shoal.workload import text

_MARK = "M" * 32
# Above this a copy of the body costs more than one more piece to write.
_JOIN_BELOW = 65_536


class Prompts:
    """An endless supply of chat requests to one host.

    prompt_chars: characters of each prompt (at least 32).  stream: asks for a streamed answer with its usage.
    headers: sent with each.  unique: False repeats one prompt for ever.
    """

    __slots__ = ("_after", "_before", "_count", "_is_unique", "_salt", "body_bytes")

    def __init__(
        self,
        host: str,
        prompt_chars: int,
        *,
        stream: bool = False,
        headers: dict[str, str] | None = None,
        model: str = MODEL,
        unique: bool = True,
    ) -> None:
        # One long text is cut to size and repeated: a prompt of 400,000 characters need not be 400,000 drawn ones.
        filler = text(np.random.default_rng(1), min(max(prompt_chars - 32, 1), 65_536))
        said = (_MARK + filler * (prompt_chars // len(filler) + 1))[: max(prompt_chars, 32)]
        asked: dict[str, object] = {"model": model, "messages": [{"role": "user", "content": said}], "max_tokens": 8}
        if stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        body = msgspec.json.encode(asked)
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items()).encode("latin-1")
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: %s\r\n%scontent-type: application/json\r\n" % (
            host.encode(),
            lines,
        )
        before, _, self._after = (head + b"content-length: %d\r\n\r\n" % len(body) + body).partition(_MARK.encode())
        self._before = before
        self.body_bytes = len(body)
        self._salt = secrets.token_hex(8).encode()
        self._count = 0
        self._is_unique = unique

    def take(self) -> tuple[bytes, ...]:
        """Return the next request, in pieces to be written one after the other."""
        self._count += self._is_unique
        opening = b"%s%s%016x" % (self._before, self._salt, self._count)
        if len(self._after) < _JOIN_BELOW:
            return (opening + self._after,)
        return opening, self._after
