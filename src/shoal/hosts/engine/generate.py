"""The shape of /inference/v1/generate: token ids in, token ids out."""

import msgspec

from shoal.hosts.engine.answer import DONE, Answer, data_event, usage_final, usage_of, usage_whole
from shoal.hosts.engine.bodies import GenerateBody, StreamOptions
from shoal.hosts.engine.generation import Generation
from shoal.hosts.engine.streams import Frame
from shoal.hosts.engine.tokens import ids


class GenerateShape:
    """One token-level answer, whole or streamed; its id is the client's `request_id` without a prefix."""

    __slots__ = ("_answer", "_options")

    def __init__(self, answer: Answer, body: GenerateBody) -> None:
        self._answer = answer
        self._options = body.stream_options or StreamOptions()

    def whole(self, generations: list[Generation]) -> bytes:
        """Return the body of the unstreamed answer."""
        choices = [self._choice(generation, generation.answer_ids, generation.reason) for generation in generations]
        return msgspec.json.encode(
            {
                "request_id": self._answer.id,
                "model": self._answer.model,
                "created": self._answer.created,
                "choices": choices,
                "usage": usage_whole(usage_of(generations), self._answer.has_cached),
                "prompt_logprobs": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
            }
        )

    def preamble(self) -> list[bytes]:
        """Nothing comes before the first token."""
        return []

    def opening(self, generation: Generation) -> list[bytes]:
        """Nothing but the first token itself."""
        return []

    def frame(self, generation: Generation) -> Frame | None:
        """A token id has no fixed length."""
        return None

    def token(self, generation: Generation, position: int) -> bytes:
        """One chunk with one token id."""
        is_last = position + 1 == generation.output_tokens
        word = generation.answer[4 * position : 4 * position + 4]
        choice = self._choice(generation, ids(word), generation.reason if is_last else None)
        return data_event({"request_id": self._answer.id, "choices": [choice]})

    def aborted(self, generation: Generation) -> list[bytes]:
        """A chunk without token that has the reason."""
        choice = self._choice(generation, [], generation.reason)
        return [data_event({"request_id": self._answer.id, "choices": [choice]})]

    def closing(self, generations: list[Generation]) -> list[bytes]:
        """The usage chunk when it was asked for, and the end mark."""
        if not self._options.include_usage:
            return [DONE]
        usage = usage_final(usage_of(generations), self._answer.has_cached)
        return [data_event({"request_id": self._answer.id, "choices": [], "usage": usage}), DONE]

    @staticmethod
    def _choice(generation: Generation, token_ids: list[int], reason: str | None) -> dict[str, object]:
        return {
            "index": generation.index,
            "logprobs": None,
            "finish_reason": reason,
            "token_ids": token_ids,
            "routed_experts": None,
        }
