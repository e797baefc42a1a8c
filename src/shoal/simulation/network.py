"""The network between pickers and engines: how long a request is on its way, always the same or by chance.

Owns that delay only.  What KV events and transfers of KV take is the cluster's and `handover`'s.
"""

from collections.abc import Sequence

import numpy as np

MAX_QUANTILES = 1_000
"""Longest table of a jitter."""


class Network:
    """Delays of at least `network_s` seconds each.

    jitter_s: what comes on top, as its quantiles at even distances from 0 to 1, so that of (0, 0.001, 0.009) half are
    below 1 ms and none is above 9 ms; between two of them all is alike.  Empty for none.  rng: draws.
    """

    __slots__ = ("_jitter_s", "_network_s", "_rng")

    def __init__(self, network_s: float, jitter_s: Sequence[float], rng: np.random.Generator) -> None:
        check_jitter(jitter_s)
        self._network_s = network_s
        self._jitter_s = jitter_s
        self._rng = rng

    def delay_s(self) -> float:
        """Return the seconds that the next request is on its way."""
        table = self._jitter_s
        if not table:
            return self._network_s
        place = float(self._rng.random()) * (len(table) - 1)
        low = int(place)
        return self._network_s + table[low] + (place - low) * (table[low + 1] - table[low])


def check_jitter(jitter_s: Sequence[float]) -> None:
    """Raise ValueError for what is no table of quantiles."""
    if jitter_s and not 2 <= len(jitter_s) <= MAX_QUANTILES:
        raise ValueError(f"jitter_s has {len(jitter_s)} quantiles; give 2 to {MAX_QUANTILES}, or none")
    if list(jitter_s) != sorted(jitter_s):
        raise ValueError("jitter_s must ascend, as quantiles do")
