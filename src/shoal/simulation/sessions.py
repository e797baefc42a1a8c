"""What clients do: sessions of turns, each turn after the answer to the one before.

Owns the form; which sessions there are is the workloads'.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from shoal.kernel import InvalidInput
from shoal.simulation.prompts import Prompt

MAX_SPAN_S = 100 * 86_400.0
"""Longest time that a recording may cover: the fleet is simulated in all of it."""

_NONE: Mapping[str, str] = MappingProxyType({})


class Turn(NamedTuple):
    """One request.  think_s: pause before it.  output_tokens: what the answer will have; no policy ever sees it.

    max_tokens: the client's limit, 0 for none.  at_s: seconds since its session began before which it is not sent.
    whole: what begins with the prompt and its answer, as the next turn's prompt does; None where nobody knows.  Engines
    see it, no policy does.
    """

    prompt: Prompt
    output_tokens: int
    think_s: float = 0.0
    max_tokens: int = 0
    at_s: float = 0.0
    whole: Prompt | None = None

    def blocks(self, block_size: int) -> tuple[int, ...]:
        """Return an engine's hashes of the full blocks of the prompt, and of its answer where it is known."""
        if self.whole is None:
            return self.prompt.blocks(block_size)
        return self.whole.blocks(block_size)[: (self.prompt.tokens + self.output_tokens) // block_size]


class Fork(NamedTuple):
    """Sessions that a session begins at once, as an agent its subagents; it goes on when all of them have ended.

    think_s: pause before it.
    """

    sessions: "tuple[Session, ...]"
    think_s: float = 0.0


class Session(NamedTuple):
    """Turns in order.  turns: makes them anew for each run.  arrives_s: when it begins, None for as soon as a client is
    free.  headers: of each request, lower-case names.  A session of which a request fails or is refused ends."""

    id: str
    turns: Callable[[], Iterator[Turn | Fork]]
    arrives_s: float | None = None
    tenant: str = ""
    model: str = "m"
    adapter: str = ""
    headers: Mapping[str, str] = _NONE


def since_first(times_s: Sequence[float], rate: float) -> list[float]:
    """Return when what was recorded at these times happens in a run that begins with the first of them.

    rate: how much faster.  Raises InvalidInput when they cover more than MAX_SPAN_S then.
    """
    first = min(times_s, default=0.0)
    times = [(at - first) / rate for at in times_s]
    if not all(0.0 <= at <= MAX_SPAN_S for at in times):
        days = MAX_SPAN_S / 86_400
        raise InvalidInput(f"its times cover more than {days:.0f} days; is one of them wrong, or of another unit?")
    return times
