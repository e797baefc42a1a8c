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
        view, is_exact = self._view(request, hashes, keys, rows, now)
        most = float(view.column("matched_tokens").max())
        return most if is_exact else most + self.tail.tokens(int(most) // BLOCK_TOKENS, request.prompt_tokens)

    def is_anywhere(self, request: Request, hashes: bytes, keys: PromptKeys, rows: Rows, now: float) -> bool:
        """Whether any of `rows` is believed to hold any of a prompt."""
        view, _ = self._view(request, hashes, keys, rows, now)
        return bool((view.column("held_tokens") > 0).any())

    def _view(
        self, request: Request, hashes: bytes, keys: PromptKeys, rows: Rows, now: float
    ) -> tuple[FleetView, bool]:
        """What is believed of `rows`, and whether their caches say so themselves."""
        _, match, held = self.of(request, hashes, keys, now)
        columns = Columns(self.fleet, self.books, self.models, request, match, now, 0.0, held)
        return FleetView(self.fleet.endpoints, columns, (), rows), held is not None
