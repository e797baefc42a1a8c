"""What chat and text completions share: the head of each object, the chunk around a choice, usage, the end of a stream.

The choices themselves are `chat`'s and `completions`'.
"""

from collections.abc import Iterable

import msgspec

from shoal.hosts.engine.answer import (
    DONE,
    FINGERPRINT,
    Answer,
    data_event,
    usage_final,
    usage_of,
    usage_running,
)
from shoal.hosts.engine.bodies import Sampling, StreamOptions
from shoal.hosts.engine.generation import Generation
from shoal.hosts.engine.streams import Frame
from shoal.hosts.engine.tokens import ids

Choice = dict[str, object]


class Chunks:
    """The objects of one answer.  kind: the `object` that they say; prefix: of the answer's id."""

    __slots__ = ("_answer", "_options", "has_ids", "head")

    def __init__(self, answer: Answer, body: Sampling, prefix: str, kind: str) -> None:
        self._answer = answer
        self._options = body.stream_options or StreamOptions()
        self.has_ids = bool(body.return_token_ids)
        self.head = {"id": f"{prefix}-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}

    def whole(self, choices: Iterable[Choice], usage: dict[str, object], **more: object) -> bytes:
        """Return the body of the unstreamed answer."""
        said = {"choices": list(choices), "service_tier": None, "system_fingerprint": FINGERPRINT, "usage": usage}
        tail = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
        return msgspec.json.encode(self.head | said | more | tail)

    def running(self, generation: Generation, tokens: int) -> dict[str, object]:
        """Return the usage that a chunk carries after `tokens`, nothing when it was not asked for."""
        if not self._options.continuous_usage_stats:
            return {}
        return {"usage": usage_running(generation.prompt_tokens, tokens)}

    def frame(self, generation: Generation, opening: bytes, rest: bytes, finish: bytes) -> Frame | None:
        """Return constant bytes around the words, None when each chunk carries its usage or token id.

        opening: a choice up to its text.  rest: what follows the text while the stream runs.  finish: what follows its
        end, without the end of the chunk.
        """
        if self._options.continuous_usage_stats or self.has_ids:
            return None
        head = msgspec.json.encode(self.head)[:-1]
        prefix = b'data: %b,"choices":[{"index":%d,%b' % (head, generation.index, opening)
        mark = b"" if self._options.include_usage else b',"system_fingerprint":"%b"' % FINGERPRINT.encode()
        return Frame(prefix, rest + b"}]}\n\n", finish + b"}]%b}\n\n" % mark)

    def token(self, generation: Generation, position: int, choice: Choice) -> bytes:
        """Return the chunk of one token with all that was asked for."""
        chunk = self.head | {"choices": [choice]} | self.running(generation, position + 1)
        if position + 1 == generation.output_tokens and not self._options.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        return data_event(chunk)

    def closing(self, generations: list[Generation]) -> list[bytes]:
        """Return the usage chunk when it was asked for, and the end mark."""
        if not self._options.include_usage:
            return [DONE]
        usage = usage_final(usage_of(generations), self._answer.has_cached)
        return [data_event(self.head | {"choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}), DONE]

    def ids_of(self, text: bytes, is_told: bool = True) -> list[int] | None:
        """Return token ids where they were asked for and `is_told`."""
        return ids(text) if self.has_ids and is_told else None


def word_at(generation: Generation, position: int) -> bytes:
    """Return the text of one token."""
    return generation.answer[4 * position : 4 * position + 4]


def reason_at(generation: Generation, position: int) -> str | None:
    """Return the finish reason that the chunk of a token carries: only the last one has it."""
    return generation.reason if position + 1 == generation.output_tokens else None
