"""What clients do: sessions of turns, each turn after the answer to the one before.

Owns the form; which sessions there are is the workloads'.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from shoal.simulation.prompts import Prompt


class Turn(NamedTuple):
    """One request.  think_s: pause before it.  output_tokens: what the answer will have; no policy ever sees it.

    max_tokens: the client's limit, 0 for none.
    """

    prompt: Prompt
    output_tokens: int
    think_s: float = 0.0
    max_tokens: int = 0


class Session(NamedTuple):
    """Turns in order.  turns: makes them anew for each run.  arrives_s: when it begins, None for as soon as a client is
    free."""

    id: str
    turns: Callable[[], Iterator[Turn]]
    arrives_s: float | None = None
    tenant: str = ""
    model: str = "m"
    adapter: str = ""
