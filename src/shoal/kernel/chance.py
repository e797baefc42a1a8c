"""Named streams of chance from one seed.

Every draw that a decision makes comes from a named stream, so one seed gives the same decisions on
every run, and a new consumer does not shift what the others draw.
"""

import numpy as np
import xxhash


class Chance:
    """A family of independent random generators, one per name.

    seed: any int of 0 to 2**63-1.  `stream(name)` returns the same generator object on each call.
    """

    __slots__ = ("_seed", "_streams")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._streams: dict[str, np.random.Generator] = {}

    def stream(self, name: str) -> np.random.Generator:
        """Return the generator of `name`; it is made on first use."""
        stream = self._streams.get(name)
        if stream is None:
            sequence = np.random.SeedSequence([self._seed, xxhash.xxh64_intdigest(name.encode())])
            stream = self._streams[name] = np.random.Generator(np.random.PCG64(sequence))
        return stream
