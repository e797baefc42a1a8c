"""Every endpoint the router knows, with its state and its row in the columns.

Owns membership, readiness, the last signals, and the numpy columns that plugins read.  What is in flight is written
here by `books`; failures are judged by `health`, speed is learned by `pace`.
"""

import math
from collections.abc import Iterator
from typing import cast

import numpy as np
import numpy.typing as npt

from shoal.flow.drain import DrainRate
from shoal.pool import Endpoint, EndpointState, Signals
from shoal.routing.health import Health
from shoal.routing.line import Line
from shoal.routing.pace import DEFAULT_S_PER_TOKEN, TOKENS_PER_REQUEST, Pace

# Records after which an endpoint's speed and cache are known well enough to end its trial.
TRIAL_RECORDS = 8

Floats = npt.NDArray[np.float64]

_COLUMNS: dict[str, float] = {
    "waiting": np.nan,
    "running": np.nan,
    "kv_usage": np.nan,
    "kv_capacity_tokens": np.nan,
    "signals_at": -np.inf,
    "inflight_requests": 0.0,
    "inflight_output_tokens": 0.0,
    "booked_uncached_tokens": 0.0,
    "clear_at": 0.0,
    "memory_s": 0.0,
    "queued_s": 0.0,
    "foreign_requests": 0.0,
    "peer_requests": 0.0,
    "peer_uncached_tokens": 0.0,
    "prefill_s_per_token": DEFAULT_S_PER_TOKEN,
    "request_s": TOKENS_PER_REQUEST * DEFAULT_S_PER_TOKEN,
    "is_trial": 1.0,
}

_SHOWN = (
    "inflight_output_tokens",
    "inflight_requests",
    "kv_usage",
    "prefill_s_per_token",
    "request_s",
    "running",
    "waiting",
)


class Member:
    """One endpoint of the fleet.  row: its place in the columns; slot: its number in the prefix index.

    ends: how often own requests end there.
    """

    __slots__ = (
        "cached_tokens_total",
        "endpoint",
        "ends",
        "failures_total",
        "health",
        "line",
        "pace",
        "prompt_tokens_total",
        "reports_cached_tokens",
        "requests_total",
        "row",
        "signals",
        "slot",
        "state",
        "ttft_s_avg",
    )

    def __init__(self, endpoint: Endpoint, state: EndpointState, slot: int) -> None:
        self.endpoint = endpoint
        self.state = state
        self.slot = slot
        self.row = -1
        self.health = Health()
        self.line = Line()
        self.pace = Pace()
        self.ends = DrainRate()
        self.signals: Signals | None = None
        self.reports_cached_tokens: bool | None = None
        self.requests_total = 0
        self.failures_total = 0
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self.ttft_s_avg: float | None = None


class Fleet:
    """Members sorted by id, and one column per figure over them.

    cells: the same columns for reading and writing single figures, at a fifth of the cost of numpy's indexing.  shown:
    those of them that plugins read as they are, while nothing is foreign and every reading is fresh.
    """

    __slots__ = (
        "_by_address",
        "_members",
        "_oldest_at",
        "cells",
        "columns",
        "endpoints",
        "generation",
        "has_foreign",
        "on_trial",
        "rows",
        "shown",
        "signals",
        "slots",
    )

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._by_address: dict[str, Member] = {}
        self.columns: dict[str, Floats] = {name: np.zeros(0) for name in _COLUMNS}
        self.cells: dict[str, memoryview[float]] = {}
        self.shown: dict[str, Floats] = {}
        self.rows: list[Member] = []
        self.endpoints: list[Endpoint] = []
        self.slots: npt.NDArray[np.intp] = np.zeros(0, np.intp)
        self.signals: list[Signals | None] = []
        self.has_foreign = False
        self.on_trial = 0
        self.generation = 0
        self._oldest_at = -math.inf

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.rows)

    def get(self, endpoint_id: str) -> Member | None:
        """The member of that id, None when there is none."""
        return self._members.get(endpoint_id)

    def at(self, endpoint_id: str) -> Member:
        """The member of that id.  Raises KeyError when there is none."""
        return self._members[endpoint_id]

    def at_address(self, address: str) -> Member | None:
        """The member that is dialled at `ip:port`, None when there is none."""
        return self._by_address.get(address)

    def join(self, endpoint: Endpoint, state: EndpointState, slot: int) -> Member:
        """Add an endpoint, or take new labels for one that is there (its books stay)."""
        member = self._members.get(endpoint.id)
        if member is None:
            member = self._members[endpoint.id] = Member(endpoint, state, slot)
        else:
            self._by_address.pop(member.endpoint.address, None)
            member.endpoint = endpoint
        self._by_address[endpoint.address] = member
        self._rebuild()
        return member

    def leave(self, endpoint_id: str) -> Member | None:
        """Remove an endpoint and its row; returns it, None when it was not there."""
        member = self._members.pop(endpoint_id, None)
        if member is not None:
            self._by_address.pop(member.endpoint.address, None)
            self._rebuild()
            member.row = -1
        return member

    def set_state(self, member: Member, state: EndpointState) -> None:
        """Note that an endpoint became ready, loads again, or drains."""
        if member.state is not state:
            member.state = state
            self.generation += 1

    def take_signals(self, member: Member, signals: Signals, now: float) -> bool:
        """Write one reading into the columns; what the engine did not say becomes NaN.

        Returns whether the KV cache has another size than before.
        """
        cells, row = self.cells, member.row
        cells["signals_at"][row] = now
        if member.signals is signals:
            return False
        member.signals = self.signals[row] = signals
        cells["waiting"][row] = np.nan if signals.waiting is None else signals.waiting
        cells["running"][row] = np.nan if signals.running is None else signals.running
        cells["kv_usage"][row] = np.nan if signals.kv_usage_ratio is None else signals.kv_usage_ratio
        capacity_tokens = (signals.num_blocks or 0) * (signals.block_size_tokens or 0)
        if not capacity_tokens or cells["kv_capacity_tokens"][row] == capacity_tokens:
            return False
        cells["kv_capacity_tokens"][row] = float(capacity_tokens)
        return True

    def stale(self, since: float) -> npt.NDArray[np.bool_] | None:
        """Which endpoints were last read before `since`, None when none was."""
        # Readings only become newer: none is older than the oldest of an earlier look.
        if self._oldest_at >= since:
            return None
        read_at = self.columns["signals_at"]
        self._oldest_at = float(read_at.min(initial=math.inf))
        return None if self._oldest_at >= since else read_at < since

    def end_trial(self, member: Member) -> None:
        """Note that an endpoint is known well enough to be compared."""
        if self.on_trial and self.cells["is_trial"][member.row]:
            self.cells["is_trial"][member.row] = 0.0
            self.on_trial -= 1

    def set_foreign(self, member: Member, requests: float) -> None:
        """Note how many requests that are not ours an endpoint was seen to hold."""
        if not requests and not self.has_foreign:
            return
        column = self.columns["foreign_requests"]
        column[member.row] = requests
        self.has_foreign = requests > 0 or bool(column.any())

    def _rebuild(self) -> None:
        """Give every member its row in id order, and carry each figure to its new place."""
        self.generation += 1
        self._oldest_at = -math.inf
        rows = [self._members[name] for name in sorted(self._members)]
        carried = np.array([member.row for member in rows], np.intp)
        old = carried >= 0
        for name, default in _COLUMNS.items():
            column = np.full(len(rows), default)
            column[old] = self.columns[name][carried[old]]
            self.columns[name] = column
            self.cells[name] = cast("memoryview[float]", column.data)
        self.shown = {name: self.columns[name] for name in _SHOWN}
        for row, member in enumerate(rows):
            member.row = row
        self.rows = rows
        self.endpoints = [member.endpoint for member in rows]
        self.signals = [member.signals for member in rows]
        self.slots = np.array([member.slot for member in rows], np.intp)
        self.on_trial = int(self.columns["is_trial"].sum())
