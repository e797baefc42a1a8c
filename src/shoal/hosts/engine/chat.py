"""The shape of /v1/chat/completions, key for key as vLLM 0.32 sends it."""

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
from shoal.hosts.engine.bodies import Sampling, StreamOptions
from shoal.hosts.engine.generation import Generation
from shoal.hosts.engine.streams import Frame
from shoal.hosts.engine.tokens import ids


class ChatShape:
    """One chat answer, whole or streamed."""

    __slots__ = ("_answer", "_has_ids", "_head", "_options")

    def __init__(self, answer: Answer, body: Sampling) -> None:
        self._answer = answer
        self._options = body.stream_options or StreamOptions()
        self._has_ids = bool(body.return_token_ids)
        self._head = {
            "id": f"chatcmpl-{answer.id}",
            "object": "chat.completion.chunk",
            "created": answer.created,
            "model": answer.model,
        }

    def whole(self, generations: list[Generation]) -> bytes:
        """Return the body of the unstreamed answer."""
        usage = usage_whole(usage_of(generations), self._answer.has_cached, created_cache_tokens=0)
        return msgspec.json.encode(
            self._head
            | {
                "object": "chat.completion",
                "choices": [self._choice(generation) for generation in generations],
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": usage,
                "prompt_logprobs": None,
                "prompt_token_ids": ids(generations[0].prompt) if self._has_ids else None,
                "prompt_text": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def preamble(self) -> list[bytes]:
        """Nothing comes before the first token."""
        return []

    def opening(self, generation: Generation) -> list[bytes]:
        """The chunk that names the role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": generation.index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._head | {"choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = usage_running(generation.prompt_tokens, 0)
        chunk["prompt_token_ids"] = ids(generation.prompt) if self._has_ids else None
        chunk["prompt_text"] = None
        return [data_event(chunk)]

    def frame(self, generation: Generation) -> Frame | None:
        """Constant bytes, unless each chunk carries its usage or token id."""
        if self._options.continuous_usage_stats or self._has_ids:
            return None
        head = msgspec.json.encode(self._head)[:-1]
        prefix = b'data: %b,"choices":[{"index":%d,"delta":{"content":"' % (head, generation.index)
        suffix = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        last = b'"},"logprobs":null,"finish_reason":"%b","stop_reason":null,"token_ids":null}]%b}\n\n' % (
            generation.reason.encode(),
            b"" if self._options.include_usage else b',"system_fingerprint":"%b"' % FINGERPRINT.encode(),
        )
        return Frame(prefix, suffix, last)

    def token(self, generation: Generation, position: int) -> bytes:
        """One content chunk with all that was asked for."""
        word = generation.answer[4 * position : 4 * position + 4]
        is_last = position + 1 == generation.output_tokens
        choice: dict[str, object] = {
            "index": generation.index,
            "delta": {"content": word.decode()},
            "logprobs": None,
            "finish_reason": generation.reason if is_last else None,
        }
        if is_last:
            choice["stop_reason"] = None
        choice["token_ids"] = ids(word) if self._has_ids else None
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
            "token_ids": generation.answer_ids if self._has_ids else None,
            "routed_experts": None,
        }
