"""Who holds which prefix: block hashes of prompts, the estimated index over them, and the exact one.

Here belongs what turns prompts into hashes and remembers which endpoint was sent which blocks, or says that it holds
them.  How a match is weighed against load is `scheduling`'s; when to ask and to add is `routing`'s.  What belongs to KV
events is imported from its own module: `tokens`, `ledger`, `exact`.
"""

from shoal.prefix.hashing import BLOCK_BYTES, BLOCK_TOKENS, MAX_BLOCKS, BlockHasher, Blocks, read_blocks
from shoal.prefix.horizon import UNLIMITED, capacity_blocks
from shoal.prefix.index import DEFAULT_BUDGET_BYTES, EstimatedIndex, IndexGauges
from shoal.prefix.match import Expectation, Match
from shoal.prefix.tail import Tail

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_TOKENS",
    "DEFAULT_BUDGET_BYTES",
    "MAX_BLOCKS",
    "UNLIMITED",
    "BlockHasher",
    "Blocks",
    "EstimatedIndex",
    "Expectation",
    "IndexGauges",
    "Match",
    "Tail",
    "capacity_blocks",
    "read_blocks",
]
