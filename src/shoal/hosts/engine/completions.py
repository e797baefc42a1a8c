"""The shape of /v1/completions, key for key as vLLM 0.32 sends it."""

import msgspec

from shoal.hosts.engine.answer import (
    DONE,
    FINGERPRINT,
    Answer,
    data_event,
    usage_final,
    usage_of,
    usage_running,
    usage_whole,
)
from shoal.hosts.engine.bodies import CompletionBody, StreamOptions
from shoal.hosts.engine.generation import Generation
from shoal.hosts.engine.streams import Frame
from shoal.hosts.engine.tokens import decode, ids


class CompletionShape:
    """One completion answer, whole or streamed.  With `echo` the first piece of text starts with the prompt."""

    __slots__ = ("_answer", "_has_echo", "_has_ids", "_head", "_options")

    def __init__(self, answer: Answer, body: CompletionBody) -> None:
        self._answer = answer
        self._options = body.stream_options or StreamOptions()
        self._has_ids = bool(body.return_token_ids)
        self._has_echo = bool(body.echo)
        self._head = {
            "id": f"cmpl-{answer.id}",
            "object": "text_completion",
            "created": answer.created,
            "model": answer.model,
        }

    def whole(self, generations: list[Generation]) -> bytes:
        """Return the body of the unstreamed answer."""
        return msgspec.json.encode(
            self._head
            | {
                "choices": [self._choice(generation) for generation in generations],
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": usage_whole(usage_of(generations), self._answer.has_cached),
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def preamble(self) -> list[bytes]:
        """Nothing comes before the first token."""
        return []

    def opening(self, generation: Generation) -> list[bytes]:
        """Nothing but the first token itself."""
        return []

    def frame(self, generation: Generation) -> Frame | None:
        """Constant bytes, unless chunks carry usage, token ids or the prompt."""
        if self._options.continuous_usage_stats or self._has_ids or self._has_echo:
            return None
        head = msgspec.json.encode(self._head)[:-1]
        prefix = b'data: %b,"choices":[{"index":%d,"text":"' % (head, generation.index)
        rest = b'"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
        suffix = b'","logprobs":null,"finish_reason":null,%b}\n\n' % rest
        last = b'","logprobs":null,"finish_reason":"%b",%b%b}\n\n' % (
            generation.reason.encode(),
            rest,
            b"" if self._options.include_usage else b',"system_fingerprint":"%b"' % FINGERPRINT.encode(),
        )
        return Frame(prefix, suffix, last)

    def token(self, generation: Generation, position: int) -> bytes:
        """One text chunk with all that was asked for."""
        word = generation.answer[4 * position : 4 * position + 4]
        is_last = position + 1 == generation.output_tokens
        is_first = position == 0
        choice = {
            "index": generation.index,
            "text": (decode(generation.prompt) if self._has_echo and is_first else "") + word.decode(),
            "logprobs": None,
            "finish_reason": generation.reason if is_last else None,
            "stop_reason": None,
            "prompt_token_ids": ids(generation.prompt) if self._has_ids and is_first else None,
            "token_ids": ids(word) if self._has_ids else None,
        }
        chunk = self._head | {"choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = usage_running(generation.prompt_tokens, position + 1)
        if is_last and not self._options.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        return data_event(chunk)

    def closing(self, generations: list[Generation]) -> list[bytes]:
        """The usage chunk when it was asked for, and the end mark."""
        if not self._options.include_usage:
            return [DONE]
        usage = usage_final(usage_of(generations), self._answer.has_cached)
        return [data_event(self._head | {"choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}), DONE]

    def _choice(self, generation: Generation) -> dict[str, object]:
        return {
            "index": generation.index,
            "text": (decode(generation.prompt) if self._has_echo else "") + generation.text,
            "logprobs": None,
            "finish_reason": generation.reason,
            "stop_reason": None,
            "token_ids": generation.answer_ids if self._has_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": ids(generation.prompt) if self._has_ids else None,
            "routed_experts": None,
        }
