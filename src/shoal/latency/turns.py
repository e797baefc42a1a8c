"""What earlier turns left in a cache: how much of a follow-up's prompt needs no prefill.

The prefix index knows the prompt of the turn before in whole spans only, and its answer not at all, though the engine
holds both.  For a short question after a long answer that is most of what looks uncached.  Owns the bounded table from
the last hash of a served prompt to what the engine said of it.
"""

from collections import OrderedDict
from typing import NamedTuple

MAX_TURNS = 50_000
"""About 15 MB."""


class Turn(NamedTuple):
    """A turn that was served.

    endpoint_id: where.  prompt_tokens: as estimated; engine_tokens: the same prompt as the engine counted it.
    output_tokens: of its answer.
    """

    endpoint_id: str
    prompt_tokens: int
    engine_tokens: int
    output_tokens: int

    @property
    def tokens_ratio(self) -> float:
        """Tokens of the engine over estimated ones."""
        return self.engine_tokens / self.prompt_tokens if self.prompt_tokens else 1.0

    def is_followed_by(self, prompt_tokens: int) -> bool:
        """Whether a prompt that begins like this turn's has room for its answer."""
        return prompt_tokens * self.tokens_ratio >= self.engine_tokens + self.output_tokens

    def held_tokens(self, kept_ratio: float) -> float:
        """Return what its engine holds of a follow-up.  kept_ratio: how much of answers comes back in the next prompt
        as it was: all of it with some models, none with those whose thinking is left out."""
        return self.engine_tokens + kept_ratio * self.output_tokens

    def kept_ratio(self, cached_tokens: int) -> float:
        """Return what the follow-up's cached tokens say of that, 0 to 1."""
        return min(max((cached_tokens - self.engine_tokens) / max(self.output_tokens, 1), 0.0), 1.0)


class Turns:
    """Turns by session and by the last hash of their prompt.

    Without a session, prompts that end in the same hash are told apart by nothing: such a hash is none.
    """

    __slots__ = ("_turns",)

    def __init__(self) -> None:
        self._turns: OrderedDict[tuple[str, int], Turn | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def note(self, session: str, last_hash: int, turn: Turn, *, is_follow_up: bool) -> None:
        """Remember a turn; the oldest give way.  is_follow_up: it was seen to go on with a turn that is known."""
        key = (session, last_hash)
        is_ambiguous = not session and not is_follow_up and key in self._turns
        self._turns[key] = None if is_ambiguous else turn
        self._turns.move_to_end(key)
        if len(self._turns) > MAX_TURNS:
            self._turns.popitem(last=False)

    def find(self, session: str, last_hash: int) -> Turn | None:
        """Return the turn whose prompt ended in that hash."""
        return self._turns.get((session, last_hash))
