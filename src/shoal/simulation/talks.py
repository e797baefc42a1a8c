"""Pieces that recipes share: lengths, content, and conversations that grow turn by turn.

Owns them; which sessions there are is each recipe's.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np

from shoal.simulation.prompts import Prompt
from shoal.simulation.sessions import Turn

Count = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=4_000_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=10_000_000)]
Range = tuple[Tokens, Tokens]
"""From, to: both ends are drawn too."""


def ordered(recipe: msgspec.Struct) -> None:
    """Check a recipe's ranges as it is made.  Raises ValueError for one that ends below its beginning."""
    for field in recipe.__struct_fields__:
        value: Any = getattr(recipe, field)
        if isinstance(value, tuple) and len(value) == 2 and value[0] > value[1]:
            raise ValueError(f"{field} begins at {value[0]} and ends at {value[1]}; the smaller one goes first")


def talk(prompt: Prompt, plan: tuple[tuple[int, int, float], ...], content: int, max_tokens: int = 0) -> Iterator[Turn]:
    """Say, be answered, say more: the answer is part of the next prompt.  plan: (say, reply, pause before) per turn."""
    pieces = [tokens for say, reply, _ in plan for tokens in (say, reply)]
    grown = prompt.grow(*enumerate(pieces, content))
    for number, (_, reply, think_s) in enumerate(plan):
        asked, whole = grown[2 * number : 2 * number + 2]
        yield Turn(asked, reply, think_s if number else 0.0, max_tokens, whole=whole)


def question(rng: np.random.Generator, opening: Prompt, say: Range, reply: Range) -> Callable[[], Iterator[Turn]]:
    """Return one turn after an opening."""
    return partial(talk, opening, ((draw(rng, say), draw(rng, reply), 0.0),), content(rng))


def content(rng: np.random.Generator) -> int:
    """Return what no other text is."""
    return int(rng.integers(1, 2**62))


def draw(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    """Return a whole number within bounds, both included."""
    low, high = bounds
    return int(rng.integers(low, high + 1))
