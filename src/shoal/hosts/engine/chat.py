"""The shape of /v1/chat/completions, key for key as vLLM 0.32 sends it."""

from shoal.hosts.engine.answer import Answer, data_event, usage_of, usage_whole
from shoal.hosts.engine.bodies import Sampling
from shoal.hosts.engine.chunks import Choice, Chunks, reason_at, word_at
from shoal.hosts.engine.generation import Generation
from shoal.hosts.engine.streams import Frame


class ChatShape:
    """One chat answer, whole or streamed."""

    __slots__ = ("_chunks", "_has_cached")

    def __init__(self, answer: Answer, body: Sampling) -> None:
        self._chunks = Chunks(answer, body, "chatcmpl", "chat.completion.chunk")
        self._has_cached = answer.has_cached

    def whole(self, generations: list[Generation]) -> bytes:
        """Return the body of the unstreamed answer."""
        return self._chunks.whole(
            map(self._choice, generations),
            usage_whole(usage_of(generations), self._has_cached, created_cache_tokens=0),
            object="chat.completion",
            prompt_logprobs=None,
            prompt_token_ids=self._chunks.ids_of(generations[0].prompt),
            prompt_text=None,
        )

    def preamble(self) -> list[bytes]:
        """Nothing comes before the first token."""
        return []

    def opening(self, generation: Generation) -> list[bytes]:
        """The chunk that names the role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": generation.index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._chunks.head | {"choices": [choice]} | self._chunks.running(generation, 0)
        return [data_event(chunk | {"prompt_token_ids": self._chunks.ids_of(generation.prompt), "prompt_text": None})]

    def frame(self, generation: Generation) -> Frame | None:
        """Constant bytes, unless each chunk carries its usage or token id."""
        finish = (
            b'"},"logprobs":null,"finish_reason":"%b","stop_reason":null,"token_ids":null' % generation.reason.encode()
        )
        rest = b'"},"logprobs":null,"finish_reason":null,"token_ids":null'
        return self._chunks.frame(generation, b'"delta":{"content":"', rest, finish)

    def token(self, generation: Generation, position: int) -> bytes:
        """One content chunk with all that was asked for."""
        return self._content(generation, position, word_at(generation, position), reason_at(generation, position))

    def aborted(self, generation: Generation) -> list[bytes]:
        """A chunk without content that has the reason."""
        return [self._content(generation, generation.output_tokens - 1, b"", generation.reason)]

    def _content(self, generation: Generation, position: int, word: bytes, reason: str | None) -> bytes:
        choice: Choice = {
            "index": generation.index,
            "delta": {"content": word.decode()},
            "logprobs": None,
            "finish_reason": reason,
            **({"stop_reason": None} if reason is not None else {}),
            "token_ids": self._chunks.ids_of(word),
        }
        return self._chunks.token(generation, position, choice)

    def closing(self, generations: list[Generation]) -> list[bytes]:
        """The usage chunk when it was asked for, and the end mark."""
        return self._chunks.closing(generations)

    def _choice(self, generation: Generation) -> Choice:
        message = {
            "role": "assistant",
            "content": generation.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        return {
            "index": generation.index,
            "message": message,
            "logprobs": None,
            "finish_reason": generation.reason,
            "stop_reason": None,
            "token_ids": generation.answer_ids if self._chunks.has_ids else None,
            "routed_experts": None,
        }
