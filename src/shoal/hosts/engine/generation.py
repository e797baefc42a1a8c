"""One answer in the making: a prompt, the stretch of tape that answers it, and how it ended."""

from typing import Protocol

from shoal.engine import Finish
from shoal.hosts.engine.tokens import ids


class Generation:
    """What one engine request works on.

    id: the engine's request id.  index: choice in the answer.  prompt, answer: packed tokens.  limit: the client's
    maximum.  finish: set when the engine is done.
    """

    __slots__ = ("answer", "finish", "id", "index", "limit", "prompt")

    def __init__(self, request_id: str, index: int, prompt: bytes, answer: bytes, limit: int) -> None:
        self.id = request_id
        self.index = index
        self.prompt = prompt
        self.answer = answer
        self.limit = limit
        self.finish: Finish | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt) // 4

    @property
    def output_tokens(self) -> int:
        """Tokens the answer will have."""
        return len(self.answer) // 4

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in the prefix cache; 0 until the engine is done."""
        return self.finish.cached_tokens if self.finish else 0

    @property
    def reason(self) -> str:
        """`length` or `stop`, known from the start because the answer is; `abort` when an operator ended it."""
        if self.is_aborted:
            return "abort"
        return "length" if self.output_tokens >= self.limit > 0 else "stop"

    @property
    def is_aborted(self) -> bool:
        """Whether an operator ended it."""
        return self.finish is not None and self.finish.reason == "abort"

    def close(self, finish: Finish) -> None:
        """The engine is done; an answer that was aborted is what there is of it."""
        self.finish = finish
        if finish.reason == "abort":
            self.answer = self.answer[: 4 * finish.output_tokens]

    @property
    def text(self) -> str:
        """The whole answer."""
        return self.answer.decode()

    @property
    def answer_ids(self) -> list[int]:
        """The whole answer as token numbers."""
        return ids(self.answer)


class Sink(Protocol):
    """Where the tokens of one generation go."""

    generation: Generation

    def advance(self, count: int) -> None:
        """Take `count` more tokens."""
        ...

    def end(self) -> None:
        """The generation is done; its `finish` is set."""
        ...
