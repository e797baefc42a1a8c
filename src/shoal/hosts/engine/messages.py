"""The shape of Anthropic's /v1/messages as vLLM 0.32 sends it.

By Anthropic's definition `input_tokens` leaves out what was read from the cache; the two add up to the prompt.
"""

import msgspec

from shoal.hosts.engine.answer import Answer, Usage, named_event, usage_of
from shoal.hosts.engine.generation import Generation
from shoal.hosts.engine.streams import Frame

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class MessagesShape:
    """One Anthropic message, whole or streamed."""

    __slots__ = ("_answer",)

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def whole(self, generations: list[Generation]) -> bytes:
        """Return the body of the unstreamed answer."""
        generation = generations[0]
        return msgspec.json.encode(
            {
                "id": self._id,
                "type": "message",
                "role": "assistant",
                "content": [{"type": "text", "text": generation.text}],
                "model": self._answer.model,
                "stop_reason": _STOP_REASONS.get(generation.reason),
                "usage": self._usage(usage_of(generations)),
            }
        )

    def preamble(self) -> list[bytes]:
        """Nothing comes before the first token."""
        return []

    def opening(self, generation: Generation) -> list[bytes]:
        """The message and its one text block begin."""
        message: dict[str, object] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._answer.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": generation.prompt_tokens, "output_tokens": 0},
        }
        block = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
        return [
            named_event("message_start", {"type": "message_start", "message": message}),
            named_event("content_block_start", block),
        ]

    def frame(self, generation: Generation) -> Frame | None:
        """All deltas look alike."""
        prefix = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"'
        )
        suffix = b'"},"index":0}\n\n'
        return Frame(prefix, suffix, suffix)

    def token(self, generation: Generation, position: int) -> bytes:
        """Never asked: `frame` is constant."""
        raise NotImplementedError

    def aborted(self, generation: Generation) -> list[bytes]:
        """Nothing of its own: the end of the message says it."""
        return []

    def closing(self, generations: list[Generation]) -> list[bytes]:
        """The block ends, the usage comes, the message ends."""
        delta = {"stop_reason": _STOP_REASONS.get(generations[0].reason), "stop_sequence": None}
        usage = self._usage(usage_of(generations))
        return [
            named_event("content_block_stop", {"type": "content_block_stop", "index": 0}),
            named_event("message_delta", {"type": "message_delta", "delta": delta, "usage": usage}),
            named_event("message_stop", {"type": "message_stop"}),
        ]

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self._answer.id}"

    def _usage(self, usage: Usage) -> dict[str, object]:
        if not self._answer.has_cached:
            return {"input_tokens": usage.prompt, "output_tokens": usage.completion}
        return {
            "input_tokens": usage.prompt - usage.cached,
            "output_tokens": usage.completion,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
        }
