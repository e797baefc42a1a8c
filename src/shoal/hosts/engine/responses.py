"""The shape of /v1/responses, key for key as vLLM 0.32 sends it."""

import msgspec

from shoal.hosts.engine.answer import Answer, Usage, named_event, usage_of
from shoal.hosts.engine.bodies import ResponsesBody
from shoal.hosts.engine.generation import Generation
from shoal.hosts.engine.streams import Frame

_FIRST_DELTA = 4


class ResponsesShape:
    """One Responses answer, whole or streamed; nothing is stored, so a response cannot be fetched later."""

    __slots__ = ("_answer", "_body", "_limit")

    def __init__(self, answer: Answer, body: ResponsesBody, limit: int) -> None:
        self._answer = answer
        self._body = body
        self._limit = limit

    def whole(self, generations: list[Generation]) -> bytes:
        """Return the body of the unstreamed answer."""
        return msgspec.json.encode(self._finished(generations))

    def preamble(self) -> list[bytes]:
        """`created` and `in_progress` come with the head, as vLLM sends them before it asks its engine."""
        response = self._response("in_progress", [], None, None)
        return [
            named_event(name, {"response": response, "sequence_number": number, "type": name})
            for number, name in enumerate(("response.created", "response.in_progress"))
        ]

    def opening(self, generation: Generation) -> list[bytes]:
        """The item and the part that the deltas go into."""
        item = self._item("in_progress", [])
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        name = "response.content_part.added"
        where = {"content_index": 0, "item_id": self._item_id, "output_index": 0}
        return [
            self._item_event("response.output_item.added", item, 2),
            named_event(name, where | {"part": part, "sequence_number": 3, "type": name}),
        ]

    def frame(self, generation: Generation) -> Frame | None:
        """Each delta carries its number."""
        return None

    def token(self, generation: Generation, position: int) -> bytes:
        """One delta."""
        return (
            b'event: response.output_text.delta\ndata: {"content_index":0,"delta":"%b","item_id":"%b","logprobs":[],'
            b'"output_index":0,"sequence_number":%d,"type":"response.output_text.delta"}\n\n'
        ) % (generation.answer[4 * position : 4 * position + 4], self._item_id.encode(), position + _FIRST_DELTA)

    def aborted(self, generation: Generation) -> list[bytes]:
        """Nothing of its own: the status of the response says it."""
        return []

    def closing(self, generations: list[Generation]) -> list[bytes]:
        """The four events that close text, part, item and response."""
        generation = generations[0]
        number = generation.output_tokens + _FIRST_DELTA
        where = {"content_index": 0, "item_id": self._item_id, "output_index": 0}
        text = "response.output_text.done"
        part = "response.content_part.done"
        end = "response.completed"
        return [
            named_event(
                text, where | {"logprobs": [], "sequence_number": number, "text": generation.text, "type": text}
            ),
            named_event(part, where | {"part": _part(generation.text), "sequence_number": number + 1, "type": part}),
            self._item_event(
                "response.output_item.done", self._item("completed", [_part(generation.text)]), number + 2
            ),
            named_event(end, {"response": self._finished(generations), "sequence_number": number + 3, "type": end}),
        ]

    @property
    def _item_id(self) -> str:
        return f"msg_{self._answer.id}"

    def _item(self, status: str, content: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": self._item_id,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    @staticmethod
    def _item_event(name: str, item: dict[str, object], number: int) -> bytes:
        return named_event(name, {"item": item, "output_index": 0, "sequence_number": number, "type": name})

    def _finished(self, generations: list[Generation]) -> dict[str, object]:
        generation = generations[0]
        is_cut = generation.reason == "length"
        status = {"length": "incomplete", "abort": "cancelled"}.get(generation.reason, "completed")
        output = [self._item("completed", [_part(generation.text)])]
        details = {"reason": "max_output_tokens"} if is_cut else None
        return self._response(status, output, details, usage_of(generations))

    def _response(
        self, status: str, output: list[dict[str, object]], details: dict[str, str] | None, usage: Usage | None
    ) -> dict[str, object]:
        body = self._body
        return {
            "id": f"resp_{self._answer.id}",
            "created_at": self._answer.created,
            "incomplete_details": details,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "model": self._answer.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "background": False,
            "max_output_tokens": self._limit,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": None if usage is None else self._usage(usage),
            "user": body.user,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _usage(self, usage: Usage) -> dict[str, object]:
        cached = usage.cached if self._answer.has_cached else 0
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": usage.completion,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": usage.prompt + usage.completion,
        }


def _part(text: str) -> dict[str, object]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
