"""Where a prompt lies: who was sent it, and whose cache says that it holds it.

Owns which of the indexes are asked for a request, and what the best answer comes to.
"""

from typing import NamedTuple

from shoal.pool import FleetView, Request
from shoal.prefix import BLOCK_TOKENS, Blocks, EstimatedIndex, Match, Tail, read_blocks
from shoal.routing.books import Books
from shoal.routing.candidates import Rows
from shoal.routing.columns import Columns
from shoal.routing.exact import ExactCaches, Held
from shoal.routing.fetches import PromptKeys
from shoal.routing.fleet import Fleet
from shoal.routing.models import ModelTable


class Whereabouts(NamedTuple):
    """The indexes of a router, and what it takes to read them."""

    fleet: Fleet
    books: Books
    models: ModelTable
    estimated: EstimatedIndex
    exact: ExactCaches
    tail: Tail

    def of(
        self, request: Request, hashes: bytes, keys: PromptKeys, now: float
    ) -> tuple[Blocks, Match | None, Held | None]:
        """Return a prompt's hashes, who was sent them, and whose cache says that it has them; None for unknown."""
        blocks = read_blocks(hashes)
        match = self.estimated.match(blocks) if len(blocks) else None
        held = self.exact.match(keys, request.prompt_tokens, now) if keys.by_size else None
        return blocks, match, held

    def most_tokens(self, request: Request, hashes: bytes, keys: PromptKeys, rows: Rows, now: float) -> float:
        """Return how much of a prompt the best of `rows` is believed to hold, in tokens."""
        _, match, held = self.of(request, hashes, keys, now)
        columns = Columns(self.fleet, self.books, self.models, request, match, now, 0.0, held)
        most = float(FleetView(self.fleet.endpoints, columns, (), rows).column("matched_tokens").max())
        return most if held is not None else most + self.tail.tokens(int(most) // BLOCK_TOKENS, request.prompt_tokens)
