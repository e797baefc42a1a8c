"""What of a prompt an endpoint has cached behind the last hash that it is believed to hold.

A hash covers up to 16 blocks, and a prompt that parts from an earlier one within them matches only up to their begin.
Owns how much of that stretch engines were seen to find all the same.
"""

from shoal.prefix.hashing import BLOCK_TOKENS, SPANS, hashes_within

# One answer's weight after n later ones is DECAY**n.
_DECAY = 0.98
# The weight, in tokens, of the belief before any answer: that nothing is found.
_PRIOR_TOKENS = 200.0


def open_tokens(blocks: int, prompt_tokens: int) -> int:
    """Return how many tokens behind `blocks` matched ones may be cached and unseen; none where nothing matched."""
    if not blocks:
        return 0
    span = int(SPANS[min(hashes_within(blocks), len(SPANS) - 1)])
    return max(0, min(span * BLOCK_TOKENS, prompt_tokens - blocks * BLOCK_TOKENS))


class Tail:
    """The share of open tokens that engines find, over all endpoints of late."""

    __slots__ = ("_found", "_open")

    def __init__(self) -> None:
        self._found = 0.0
        self._open = 0.0

    def tokens(self, blocks: int, prompt_tokens: int) -> int:
        """Return how many tokens are thought to be cached beyond `blocks` matched ones."""
        return int(open_tokens(blocks, prompt_tokens) * self._found / (self._open + _PRIOR_TOKENS))

    def learn(self, blocks: int, prompt_tokens: int, cached_tokens: float) -> None:
        """Take in that of a prompt of which `blocks` were matched `cached_tokens` were found.

        An endpoint that had dropped what was matched says nothing.
        """
        width = open_tokens(blocks, prompt_tokens)
        found = cached_tokens - blocks * BLOCK_TOKENS
        if width and found > -width:
            self._found = self._found * _DECAY + min(max(found, 0.0), width)
            self._open = self._open * _DECAY + width
