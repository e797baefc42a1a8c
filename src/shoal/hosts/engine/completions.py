"""The shape of /v1/completions, key for key as vLLM 0.32 sends it."""

from shoal.hosts.engine.answer import Answer, usage_of, usage_whole
from shoal.hosts.engine.bodies import CompletionBody
from shoal.hosts.engine.chunks import Choice, Chunks, reason_at, word_at
from shoal.hosts.engine.generation import Generation
from shoal.hosts.engine.streams import Frame
from shoal.hosts.engine.tokens import decode


class CompletionShape:
    """One completion answer, whole or streamed.  With `echo` the first piece of text starts with the prompt."""

    __slots__ = ("_chunks", "_has_cached", "_has_echo")

    def __init__(self, answer: Answer, body: CompletionBody) -> None:
        self._chunks = Chunks(answer, body, "cmpl", "text_completion")
        self._has_cached = answer.has_cached
        self._has_echo = bool(body.echo)

    def whole(self, generations: list[Generation]) -> bytes:
        """Return the body of the unstreamed answer."""
        return self._chunks.whole(map(self._choice, generations), usage_whole(usage_of(generations), self._has_cached))

    def preamble(self) -> list[bytes]:
        """Nothing comes before the first token."""
        return []

    def opening(self, generation: Generation) -> list[bytes]:
        """Nothing but the first token itself."""
        return []

    def frame(self, generation: Generation) -> Frame | None:
        """Constant bytes, unless chunks carry usage, token ids or the prompt."""
        if self._has_echo:
            return None
        ids = b'"stop_reason":null,"prompt_token_ids":null,"token_ids":null'
        rest = b'","logprobs":null,"finish_reason":null,%b' % ids
        finish = b'","logprobs":null,"finish_reason":"%b",%b' % (generation.reason.encode(), ids)
        return self._chunks.frame(generation, b'"text":"', rest, finish)

    def token(self, generation: Generation, position: int) -> bytes:
        """One text chunk with all that was asked for."""
        return self._text(generation, position, word_at(generation, position), reason_at(generation, position))

    def aborted(self, generation: Generation) -> list[bytes]:
        """A chunk without text that has the reason."""
        return [self._text(generation, generation.output_tokens - 1, b"", generation.reason)]

    def _text(self, generation: Generation, position: int, word: bytes, reason: str | None) -> bytes:
        is_first = position == 0
        choice: Choice = {
            "index": generation.index,
            "text": (decode(generation.prompt) if self._has_echo and is_first else "") + word.decode(),
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": None,
            "prompt_token_ids": self._chunks.ids_of(generation.prompt, is_told=is_first),
            "token_ids": self._chunks.ids_of(word),
        }
        return self._chunks.token(generation, position, choice)

    def closing(self, generations: list[Generation]) -> list[bytes]:
        """The usage chunk when it was asked for, and the end mark."""
        return self._chunks.closing(generations)

    def _choice(self, generation: Generation) -> Choice:
        return {
            "index": generation.index,
            "text": (decode(generation.prompt) if self._has_echo else "") + generation.text,
            "logprobs": None,
            "finish_reason": generation.reason,
            "stop_reason": None,
            "token_ids": generation.answer_ids if self._chunks.has_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": self._chunks.ids_of(generation.prompt),
            "routed_experts": None,
        }
