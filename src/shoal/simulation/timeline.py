"""What a fleet looked like over a run: per endpoint, a bounded number of looks.

Owns the thinning: when there are too many looks, every other one goes and looks are taken half as often, so that the
same run gives the same timeline and a long one does not fill the memory.
"""

import numpy as np
import numpy.typing as npt

from shoal.pool import Signals

Floats = npt.NDArray[np.float64]
MAX_LOOKS = 512
MAX_VALUES = 8_000_000

_ROWS = 5


class Timeline:
    """Looks at a fleet.  endpoints: their names, in the order of the columns."""

    __slots__ = ("_every", "_held", "_limit", "_looks", "_places", "_skip", "_times", "endpoints")

    def __init__(self, endpoints: list[str]) -> None:
        self.endpoints = endpoints
        self._places = {name: place for place, name in enumerate(endpoints)}
        self._limit = max(32, min(MAX_LOOKS, MAX_VALUES // (_ROWS * max(1, len(endpoints))))) & ~1
        self._every = 1
        self._skip = 0
        self._times: list[float] = []
        self._held: list[int] = []
        self._looks: list[Floats] = []

    def wants(self) -> bool:
        """Whether a look is due; ask once per reading of the metrics."""
        self._skip += 1
        return self._skip >= self._every

    def tick(self, now: float, held: int) -> None:
        """Begin a look at `now`.  held: requests that the router has not sent to an engine."""
        if len(self._times) >= self._limit:
            self._every *= 2
            self._times, self._held, self._looks = self._times[::2], self._held[::2], self._looks[::2]
        self._skip = 0
        self._times.append(now)
        self._held.append(held)
        self._looks.append(np.full((_ROWS, len(self.endpoints)), np.nan, np.float64))

    def see(self, endpoint: str, signals: Signals) -> None:
        """Note one endpoint in the look that was begun; those that nobody sees are down."""
        self._looks[-1][:, self._places[endpoint]] = (
            signals.running if signals.running is not None else np.nan,
            signals.waiting if signals.waiting is not None else np.nan,
            signals.kv_usage_ratio if signals.kv_usage_ratio is not None else np.nan,
            signals.prefix_query_tokens if signals.prefix_query_tokens is not None else np.nan,
            signals.prefix_hit_tokens if signals.prefix_hit_tokens is not None else np.nan,
        )

    @property
    def times_s(self) -> npt.NDArray[np.float64]:
        """When each look was taken."""
        return np.array(self._times)

    @property
    def held(self) -> npt.NDArray[np.int64]:
        """Requests waiting in the router at each look."""
        return np.array(self._held, np.int64)

    @property
    def running(self) -> Floats:
        """Requests in the batch: looks x endpoints, NaN where the endpoint was down; so are the others."""
        return self._row(0)

    @property
    def waiting(self) -> Floats:
        """Requests in the engines' queues."""
        return self._row(1)

    @property
    def kv_usage(self) -> Floats:
        """Share of KV blocks held by running requests, 0 to 1."""
        return self._row(2)

    @property
    def prompt_tokens(self) -> Floats:
        """Prompt tokens that an engine had looked up in its cache since its start."""
        return self._row(3)

    @property
    def cached_tokens(self) -> Floats:
        """Prompt tokens of those that it had found."""
        return self._row(4)

    def _row(self, number: int) -> Floats:
        if not self._looks:
            return np.zeros((0, len(self.endpoints)))
        return np.stack([look[number] for look in self._looks])
