"""The fleet as numpy columns: what filters and scorers read.

Every column has one float64 (or int64) per candidate endpoint, in the order of `ids` (sorted).
NaN means unknown or stale, and is never the same as 0.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.pool.endpoint import Endpoint
from shoal.pool.signals import Signals

Column = npt.NDArray[Any]
Given = Column | list[float] | float

_NO_HASHES: Column = np.zeros(0, np.uint64)


class FleetView:
    """Candidates of one request, as columns that are computed when first read.

    endpoints: the whole offered fleet, sorted by id, never changed in place (a changed fleet is a new sequence, so
    that what depends on labels alone is kept between requests).  columns: name -> column over that fleet, as an array
    or (of a small fleet) a list, or one float that holds for every endpoint.  signals: the last reading of each
    endpoint of the fleet, None when there is none that is fresh.  index: rows of the fleet that are still candidates,
    ascending; None means all.  complete: names of columns in which no value is unknown.  hashes, reach_tokens: of the
    request's prompt, read as `chain`; the n-th hash covers reach_tokens[n + 1] tokens.

    Column names that routing fills (unit): `waiting`, `running` (requests, scraped), `kv_usage` (0 to 1, scraped),
    `inflight_requests`, `inflight_uncached_tokens`, `inflight_output_tokens` (own books),
    `inflight_prefill_s` (seconds until the uncached tokens in flight are prefilled), `matched_tokens` (prompt tokens of
    this request expected in the endpoint's cache: known from its KV events, or else estimated), `estimated_tokens` (the
    estimate of the same), `prefill_s_per_token` (learned), `request_s` (learned seconds that each request in flight
    adds), `max_model_len` (tokens, NaN unknown), `is_trial` (1.0 for an endpoint that is still being tried out),
    `predicted_ttft_s`, `predicted_tpot_s` (seconds, of this request; not there while they cannot be trusted),
    `strictest_tpot_slo_s` (the lowest that a running request asked for), `is_latency_unknown` (1.0 for all while
    predictions are made but cannot be trusted).
    """

    __slots__ = ("_columns", "_endpoints", "_hashes", "_index", "_reach", "_signals", "_taken", "complete")

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        columns: Mapping[str, Given],
        signals: Sequence[Signals | None],
        index: npt.NDArray[np.intp] | None = None,
        complete: frozenset[str] = frozenset(),
        hashes: Column = _NO_HASHES,
        reach_tokens: Sequence[int] = (),
    ) -> None:
        self._endpoints = endpoints
        self._columns = columns
        self._signals = signals
        self._index = index
        self.complete = complete
        self._hashes = hashes
        self._reach = reach_tokens
        self._taken: dict[str, Column] = {}

    def __len__(self) -> int:
        return len(self._endpoints) if self._index is None else len(self._index)

    def column(self, name: str) -> Column:
        """Return the column of `name` over the candidates.  Raises KeyError for a name nobody fills."""
        column = self._columns[name]
        if self._index is None and isinstance(column, np.ndarray):
            return column
        taken = self._taken.get(name)
        if taken is None:
            if isinstance(column, float):
                taken = np.full(len(self), column)
            else:
                taken = np.array(column) if isinstance(column, list) else column
                if self._index is not None:
                    taken = taken.take(self._index)
            self._taken[name] = taken
        return taken

    def values(self, name: str) -> list[float]:
        """Return the column of `name` as plain numbers, for reading: cheaper to work with for a few candidates."""
        column = self._columns[name]
        if isinstance(column, list):
            return column if self._index is None else [column[row] for row in self._index.tolist()]
        if isinstance(column, float):
            return [column] * len(self)
        values: list[float] = self.column(name).tolist()
        return values

    def level(self, name: str) -> float | None:
        """Return the one value of a column that was given as one for every endpoint, None for any other column."""
        try:
            column = self._columns[name]
        except KeyError:
            return None
        return column if isinstance(column, float) else None

    def is_complete(self, name: str) -> bool:
        """Whether it is known without looking that no value of the column is unknown."""
        return name in self.complete

    def has(self, name: str) -> bool:
        """Whether somebody fills the column of `name`."""
        return name in self._columns

    def chain(self) -> list[tuple[int, int]]:
        """Return the prompt as (hash, tokens): each hash covers that many tokens from the prompt's first one on.

        It tells which prompts begin alike, and nothing of what they say.  A prompt shorter than one block has one hash
        of all of it.  Of several prompts the first; empty where the content is not known.
        """
        hashes = self._hashes.tolist()
        if 0 in hashes:
            hashes = hashes[: hashes.index(0)]
        return list(zip(hashes, self._reach[1:], strict=False))

    def beginning(self, tokens: float) -> int:
        """Return the hash of the longest whole beginning within the prompt's first `tokens`; 0 where none is known."""
        count = min(bisect_right(self._reach, tokens) - 1, len(self._hashes))
        return int(self._hashes[count - 1]) if count > 0 else 0

    @property
    def fleet(self) -> Sequence[Endpoint]:
        """The whole offered fleet, filtered or not; the same object until the fleet changes."""
        return self._endpoints

    @property
    def rows(self) -> npt.NDArray[np.intp] | None:
        """The candidates' rows in `fleet`, ascending; None means all of it."""
        return self._index

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """The candidates, in column order."""
        if self._index is None:
            return self._endpoints
        return [self._endpoints[row] for row in self._index]

    @property
    def signals(self) -> Sequence[Signals | None]:
        """The last fresh reading of each candidate, in column order."""
        if self._index is None:
            return self._signals
        return [self._signals[row] for row in self._index]

    def endpoint(self, position: int) -> Endpoint:
        """The candidate at `position` of the columns."""
        return self._endpoints[position if self._index is None else int(self._index[position])]

    def keep(self, mask: npt.NDArray[np.bool_]) -> "FleetView":
        """Return the view of those candidates where `mask` (one bool per candidate) is true."""
        rows = np.flatnonzero(mask)
        if self._index is not None:
            rows = self._index[rows]
        return FleetView(self._endpoints, self._columns, self._signals, rows, self.complete, self._hashes, self._reach)
